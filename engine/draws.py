"""What is asked of the sampler for one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_GREEDY_BELOW: Final = 1e-5  # a temperature so low that only the largest logit is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How to draw from one row of logits. Everything is in here, so a row owes nothing to the rows beside it."""

    temperature: float
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0  # index of the token in the completion
    banned: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()  # token, what is added to its logit; each token once
    repetition: float = 1.0  # 1: off
    presence: float = 0.0
    frequency: float = 0.0
    seen: Sequence[int] = ()  # what the three look at; its last ``position`` tokens are the completion so far
    allowed: bytes | None = None  # bit t % 8 of byte t // 8 says whether token t may come; None: all may
    logprobs: int | None = None  # most likely tokens to tell of, beside the one drawn; None: nothing is told

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether the draw is from anything but the model's own logits."""
        penalised = self.repetition != 1 or self.presence != 0 or self.frequency != 0
        return bool(self.banned or self.bias or (penalised and self.seen) or self.allowed is not None)

    @property
    def completion(self) -> Sequence[int]:
        return self.seen[len(self.seen) - self.position :]
