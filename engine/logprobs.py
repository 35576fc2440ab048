"""Log-probabilities of drawn tokens, and of the most likely ones beside them.

They are the model's own: log-softmax of its logits before bias, penalties, masks and temperature, as vLLM tells them
(``raw_logprobs``). So they say what the model thought, whatever was asked of the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.draws import Draw
from engine.protocol import Logprob


@dataclass(frozen=True, slots=True)
class Watch:
    """The rows of which something is to be told, from before anything changes their logits."""

    rows: Sequence[int]
    counts: Sequence[int]  # most likely tokens to tell of
    logits: Tensor  # float32 [len(rows), vocabulary], a copy

    @classmethod
    def of(cls, logits: Tensor, draws: Sequence[Draw]) -> Self | None:
        """logits: [rows, vocabulary]. None when nobody asks."""
        asked = {row: one.logprobs for row, one in enumerate(draws) if one.logprobs is not None}
        if not asked:
            return None
        rows = torch.tensor(list(asked), device=logits.device)
        return cls(list(asked), list(asked.values()), logits[rows].float())

    def tell(self, ids: Tensor) -> dict[int, Logprob]:
        """By row, once the tokens are drawn. ids: int64 [all rows], on the device of the logits."""
        rows = torch.tensor(self.rows, device=ids.device)
        chosen = self.logits.gather(1, ids[rows].unsqueeze(1))
        best = self.logits.topk(min(max(self.counts), self.logits.shape[1]), -1)
        values = torch.cat([chosen, best.values], 1) - self.logits.logsumexp(-1, keepdim=True)
        told = zip(self.rows, self.counts, values.tolist(), best.indices.tolist(), strict=True)
        return {
            row: Logprob(logprob=values[0], ids=ids[:count], logprobs=values[1 : 1 + count])
            for row, count, values, ids in told
        }
