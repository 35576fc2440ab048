"""How long a step takes: a model of its time, fitted to the steps that this worker runs.

    T = c · quantities,  c ≥ 0          the quantities are those of ``engine.work``; each grows with the batch

so T is monotone, and its part in rows may bend up or down at each knot. The fit minimises

    Σ λᵃ (ns / T - 1)²  +  ridge · Σⱼ Aⱼⱼ (cⱼ - scale · ruleⱼ)²

* Errors count in proportion (weights 1/T²), so that short steps say as much as long ones.
* λᵃ: a step fades as later ones of its *kind* come (rows and attention to a power, with or without chunks), so that a
  night of decoding does not erase what is known of prompts; all fade slowly, so that nothing stays for ever.
* What was never seen apart (rows from the fixed part, where all steps are alike) is settled by the rule that holds
  before there is data: multiply-adds and a fixed part, in proportion.
* A step that took far longer than expected pulls no more than one that took ``1 + _PULL`` errors longer.

*Pace* is the median of measured over expected of the last steps. A step that took more than ``STALL`` times what model
and pace expect, of a kind that is known, has stalled: what it took beyond that is nobody's work. When steps go on like
this the pace follows, and they are no stalls any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.least_squares import Matrix, Vector, dot, not_negative
from engine.work import OWN, SIZE, Load, Quantities, quantities

STALL: Final = 3.0
_RECENT: Final = 31  # steps, of pace
_FIRST_FIT: Final = 64  # steps
_BETWEEN_FITS: Final = 32
_MEMORY: Final = 64  # steps of a kind
_JUDGED: Final = 100  # steps, of the quality
_FADE: Final = 0.998  # of everything, at each fit: half is left after 11,000 steps
_KNOWN: Final = 8.0  # steps of a kind, for one to be far from it
_RIDGE: Final = 1e-3
_PULL: Final = 4.0
_LEAST_PULL: Final = 0.25


@dataclass(slots=True)
class _Kind:
    """Normal equations of steps that are alike: Σ weight · q qᵀ (lower half), Σ weight · q · ns, Σ weight of count."""

    gram: Vector = field(default_factory=lambda: [0.0] * (SIZE * (SIZE + 1) // 2))
    target: Vector = field(default_factory=lambda: [0.0] * SIZE)
    steps: float = 0.0

    def add(self, work: Quantities, ns: float, expected_ns: float) -> None:
        fade = 1 - 1 / _MEMORY
        row = [value / expected_ns for value in work]
        products = [left * right for i, left in enumerate(row) for right in row[: i + 1]]
        self.gram = [old * fade + new for old, new in zip(self.gram, products, strict=True)]
        self.target = [old * fade + value * ns / expected_ns for old, value in zip(self.target, row, strict=True)]
        self.steps = self.steps * fade + 1

    def fade(self) -> None:
        self.gram = [value * _FADE for value in self.gram]
        self.target = [value * _FADE for value in self.target]
        self.steps *= _FADE


@dataclass(slots=True)
class Quality:
    """How well steps were foretold, the last hundred counting most; a stall counts as one that is just none."""

    error: float = 0.0  # mean of |measured / expected - 1|
    _mean: float = 0.0
    _spread: float = 0.0  # mean square around the mean
    _residual: float = 0.0  # mean square around what was expected
    _steps: int = 0

    @property
    def r2(self) -> float:
        """Share of the variance of steps that the model explains; 0 with no variance, below it for a bad model."""
        return 1 - self._residual / self._spread if self._spread else 0.0

    def note(self, ns: float, expected_ns: float) -> None:
        self._steps += 1
        new = max(1 / self._steps, 1 / _JUDGED)
        self.error += new * (abs(ns / expected_ns - 1) - self.error)
        self._spread += new * ((1 - new) * (ns - self._mean) ** 2 - self._spread)
        self._mean += new * (ns - self._mean)
        self._residual += new * ((ns - expected_ns) ** 2 - self._residual)


class StepTime:
    """Owns what has been learnt of one deployment on one device."""

    def __init__(self, rule: Quantities) -> None:
        self._rule = rule
        self._fitted: Quantities | None = None
        self._kinds: dict[tuple[int, bool, int], _Kind] = {}
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        self._scale = 0.0  # nanoseconds per unit of the rule
        self._steps = 0
        self.quality = Quality()
        self.stalls = 0
        self.stall_ns = 0

    @property
    def fitted(self) -> bool:
        return self._fitted is not None

    @property
    def coefficients(self) -> Quantities:
        """Nanoseconds per quantity once fitted; before, the rule's, whose unit is its own."""
        return self._fitted or self._rule

    @property
    def pace(self) -> float:
        """Measured over expected of the last steps, the median; far from 1 the model has fallen behind."""
        return sorted(self._ratios)[len(self._ratios) // 2] if self._ratios else 1.0

    def expected(self, loads: Sequence[Load]) -> float:
        """Nanoseconds of a step of these chunks; 0 before anything was measured."""
        return self._expected(quantities(loads))

    def learn(self, loads: Sequence[Load], step_ns: int) -> int:
        """A step has run. Returns how much of its time was a stall."""
        work = quantities(loads)
        kind = self._kind(work)
        stall_ns = self._stall(work, kind, step_ns)
        self._note(work, kind, max(step_ns, 1))
        return stall_ns

    def _expected(self, work: Quantities) -> float:
        coefficients, scale = (self._fitted, 1.0) if self._fitted else (self._rule, self._scale)
        return scale * dot(coefficients, work)

    def _kind(self, work: Quantities) -> _Kind:
        rows = sum(work[1 : OWN.start])
        _, context, pairs, _, chunks = work[OWN]
        key = (int(rows).bit_length(), chunks > 0, int(context + pairs).bit_length() // 3)
        return self._kinds.setdefault(key, _Kind())

    def _stall(self, work: Quantities, kind: _Kind, step_ns: int) -> int:
        if not self._fitted or kind.steps < _KNOWN:
            return 0
        usual_ns = self.pace * self._expected(work)
        if step_ns <= STALL * usual_ns:
            return 0
        stall_ns = step_ns - round(usual_ns)
        self.stalls += 1
        self.stall_ns += stall_ns
        return stall_ns

    def _note(self, work: Quantities, kind: _Kind, step_ns: int) -> None:
        self._steps += 1
        if not self._fitted:
            by_rule = dot(self._rule, work)
            self._scale += (step_ns / by_rule - self._scale) / self._steps
        expected_ns = max(self._expected(work), 1.0)
        self._ratios.append(step_ns / expected_ns)
        pull = 1 + max(_LEAST_PULL, _PULL * self.quality.error)
        learnt_ns = min(float(step_ns), pull * expected_ns) if self._fitted else float(step_ns)
        self.quality.note(min(float(step_ns), STALL * expected_ns), expected_ns)
        kind.add(work, learnt_ns, expected_ns)
        if self._steps >= _FIRST_FIT and self._steps % _BETWEEN_FITS == 0:
            self._fit()

    def _fit(self) -> None:
        """Coefficients are fitted in units of what they contribute, so that all are of one size."""
        gram = [sum(column) for column in zip(*(kind.gram for kind in self._kinds.values()), strict=True)]
        target = [sum(column) for column in zip(*(kind.target for kind in self._kinds.values()), strict=True)]
        sizes = [gram[_at(j, j)] ** 0.5 for j in range(SIZE)]
        seen = [j for j, size in enumerate(sizes) if size > 0]
        rule = self._rule_in_ns(target, gram)
        square: Matrix = [
            [gram[_at(i, j)] / (sizes[i] * sizes[j]) + (_RIDGE if i == j else 0.0) for j in seen] for i in seen
        ]
        wanted = [target[j] / sizes[j] + _RIDGE * rule[j] * sizes[j] for j in seen]
        start = [self._fitted[j] * sizes[j] if self._fitted else 0.0 for j in seen]
        found = dict(zip(seen, not_negative(square, wanted, start), strict=True))
        self._fitted = [found[j] / sizes[j] if j in found else rule[j] for j in range(SIZE)]
        self._forget()

    def _rule_in_ns(self, target: Vector, gram: Vector) -> Quantities:
        """The rule, scaled to what was measured: the scale of least squares."""
        rule = self._rule
        measured = dot(rule, target)
        own = sum(rule[i] * rule[j] * gram[_at(i, j)] for i in range(SIZE) for j in range(SIZE))
        return [measured / own * value for value in rule]

    def _forget(self) -> None:
        for key, kind in list(self._kinds.items()):
            kind.fade()
            if kind.steps < 1 / 2:
                del self._kinds[key]


def _at(i: int, j: int) -> int:
    """Place of an entry of a symmetric matrix whose lower half is kept, row after row."""
    return max(i, j) * (max(i, j) + 1) // 2 + min(i, j)
