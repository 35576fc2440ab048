"""Attention over keys and values that lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import Scoring


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """queries: [n, heads, rows, head size]; keys, values: [n, kv heads, positions, head size]; mask: added to the
    scores, [rows, positions] or [n, 1, 1, positions]; None: row i sees positions up to i, without a soft cap only.
    Returns what queries are.
    """
    if scoring.softcap is None or mask is None:
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    scores.mul_(scoring.scale / scoring.softcap).tanh_().mul_(scoring.softcap)
    scores += mask if mask.dim() == 2 else mask.unsqueeze(1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def causal_mask(rows: int, positions: int, *, like: Tensor, before: int = 0, window: int | None = None) -> Tensor:
    """Row i sees positions up to ``before`` + i, the last ``window`` of them: 0 there, -inf elsewhere."""
    beyond = torch.full((rows, positions), float("-inf"), dtype=like.dtype, device=like.device)
    if window is None:
        return beyond.triu_(before + 1)
    return beyond.triu(before + 1) + beyond.tril_(before - window)
