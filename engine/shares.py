"""Who pays how much of a step: Shapley values of the step-time model, in integers that add up.

The sequences of a step are the players of a game; what a coalition is worth is the time that the model gives a step of
them alone. The Shapley value (L. S. Shapley, A value for n-person games, 1953) is the only split that adds up, treats
equals alike, charges nothing to who causes nothing, and is additive over games. By additivity each part of the model is
shared out by itself:

    the step      everybody causes all of it or nobody does: equal parts
    own work      draws, context, pairs …: to whoever brings it
    rows          f(total rows), f bent: what a sequence adds depends on who is there already

The third part, for sequences with rows r₁ … rₙ: equal parts if all have equally many. Otherwise exactly, by the average
over all orders, counted by how many sequences of each size came before; with m_g sequences of size g those are
Π(m_g + 1) cases. Where they are more than ``_CASES``, the others are taken as a fluid of which the share t is there
(Owen's multilinear extension, Management Science 18, 1972, with the fluid's mean in place of its distribution), which
has the closed form

    ∫₀¹ f(r + t(R - r)) - f(t(R - r)) dt = (F(R) - F(r) - F(R - r)) / (R - r),        F' = f, F(0) = 0,

scaled to add up to f(R). It is exact for f up to the second degree.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from engine.least_squares import dot
from engine.work import KNOTS, OWN, ROWS, Load, Quantities, stretches

_CASES: Final = 128
_FRACTION: Final = 1 << 20  # shares are compared in this part of a nanosecond


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` (not negative, not all 0) into integers whose sum is ``total``."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    if missing := total - sum(parts):
        by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
        for i in by_remainder[:missing]:
            parts[i] += 1
    return parts


def shares(step_ns: int, loads: Sequence[Load], coefficients: Quantities) -> list[int]:
    """Nanoseconds of a step for each of its chunks; they add up to ``step_ns``."""
    weights = [round(value * _FRACTION) for value in shapley(loads, coefficients)]
    return largest_remainder(step_ns, weights if any(weights) else [1] * len(loads))


def shapley(loads: Sequence[Load], coefficients: Quantities) -> list[float]:
    """Shapley value of each chunk in the model's game, in the model's unit."""
    equal = coefficients[0] / len(loads)
    draw, context, pair, gathered, chunk = coefficients[OWN]
    by_rows = of_rows([load.rows for load in loads], coefficients[ROWS])
    return [
        equal
        + by_rows[load.rows]
        + draw * load.draws
        + context * load.context
        + pair * load.pairs
        + gathered * load.gathered
        + chunk * load.chunks
        for load in loads
    ]


def of_rows(rows: Sequence[int], slopes: Sequence[float]) -> dict[int, float]:
    """By number of rows: what a sequence of so many pays of f(total), f having these slopes between the knots."""
    sizes = Counter(rows)
    total = sum(rows)
    if len(sizes) == 1 or len(set(slopes[: _reached(total)])) == 1:
        per_row = curve(total, slopes) / total
        return {size: size * per_row for size in sizes}
    if math.prod(count + 1 for count in sizes.values()) <= _CASES:
        return _exact(sizes, slopes)
    return _fluid(sizes, slopes)


def curve(rows: int, slopes: Sequence[float]) -> float:
    return dot(slopes, stretches(rows))


def _reached(rows: int) -> int:
    """Stretches in which the first so many rows lie."""
    return sum(rows > knot for knot in KNOTS)


def _exact(sizes: Counter[int], slopes: Sequence[float]) -> dict[int, float]:
    """A coalition is how many of each size are in it; just these s come before a player in s!(n-1-s)! orders."""
    players = sizes.total()
    worth = {
        counts: curve(sum(size * count for size, count in zip(sizes, counts, strict=True)), slopes)
        for counts in itertools.product(*(range(count + 1) for count in sizes.values()))
    }
    first = [1 / (players * math.comb(players - 1, before)) for before in range(players)]
    values = {}
    for place, size in enumerate(sizes):
        others = [count - (i == place) for i, count in enumerate(sizes.values())]
        values[size] = sum(
            first[sum(counts)]
            * math.prod(map(math.comb, others, counts))
            * (worth[*counts[:place], counts[place] + 1, *counts[place + 1 :]] - worth[counts])
            for counts in itertools.product(*(range(count + 1) for count in others))
        )
    return values


def _fluid(sizes: Counter[int], slopes: Sequence[float]) -> dict[int, float]:
    total = sum(size * count for size, count in sizes.items())
    whole = _area(total, slopes)
    values = {size: (whole - _area(size, slopes) - _area(total - size, slopes)) / (total - size) for size in sizes}
    scale = sum(values[size] * count for size, count in sizes.items())
    if scale <= 0:  # flat as far as anybody can tell
        return {size: size * curve(total, slopes) / total for size in sizes}
    return {size: value * curve(total, slopes) / scale for size, value in values.items()}


def _area(rows: int, slopes: Sequence[float]) -> float:
    """Under the curve, from 0 to ``rows``."""
    return sum(
        slope * part * (rows - low - part / 2) for slope, part, low in zip(slopes, stretches(rows), KNOTS, strict=True)
    )
