"""Draws one token per row of logits, all rows at once.

Order as in `transformers`: what changes single logits (``engine.adjust``), temperature, then top-k, top-p, min-p. Each
of the last three keeps the tokens at or above some logit, so together they are one threshold per row, ties included.
The draw inverts the cumulative distribution over the kept tokens, in the order of the vocabulary, at one uniform number
per (seed, choice, position). It depends on nothing else: not on the batch, the place in it, or the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from engine.adjust import adjust
from engine.draws import Draw

_FIRST_LOOK: Final = 256  # largest logits of a row among which the CPU looks for a nucleus first: sorting all is slow


def draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits: [rows, vocabulary], overwritten. Returns token ids, int64 [rows], on the same device."""
    logits = adjust(logits, draws)
    chosen = logits.argmax(-1)
    warm = [row for row, one in enumerate(draws) if not one.greedy]
    if warm:
        rows = torch.tensor(warm, device=logits.device)
        chosen[rows] = _sample(logits[rows].float(), [draws[row] for row in warm])
    return chosen


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    weights, _ = kept(logits, draws)
    cumulative = weights.double().cumsum_(-1)
    # Below the total, as a uniform number is at most 1 - 2**-53; so the token found has a weight of its own.
    target = uniforms(draws).to(logits.device).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def kept(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """logits: float32 [rows, vocabulary], overwritten.

    Returns (weights, lowest): what each token is drawn in proportion to, 0 where it is not kept, and the lowest logit
    kept per row, scaled and relative to the largest.
    """
    # Relative to the largest, so that no temperature overflows and every weight lies in 0..1.
    logits -= logits.amax(-1, keepdim=True)
    logits /= _column([one.temperature for one in draws], logits)
    lowest = _column([one.min_p for one in draws], logits).log()  # the log of 0 keeps all
    cut = [row for row, one in enumerate(draws) if one.top_k or one.top_p < 1]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        lowest[rows] = torch.maximum(lowest[rows], _cut(logits[rows], [draws[row] for row in cut]))
    return logits.masked_fill_(logits < lowest, float("-inf")).exp_(), lowest.squeeze(1)


def _cut(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The lowest logit that top-k and top-p keep: [rows, 1]."""
    vocabulary = logits.shape[1]
    top_k = [min(one.top_k or vocabulary, vocabulary) for one in draws]
    limited = max((k for k in top_k if k < vocabulary), default=1)
    # Without a look at how far a nucleus reaches, which would make a GPU's queue wait, all must be sorted.
    look = max(_FIRST_LOOK, limited) if logits.device.type == "cpu" else vocabulary
    while True:
        largest = logits.topk(min(look, vocabulary), -1).values
        lowest, whole = _cut_among(largest, logits, top_k, [one.top_p for one in draws])
        if look >= vocabulary or bool(whole.all()):
            return lowest
        look *= 8


def _cut_among(largest: Tensor, logits: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(threshold, whether it is final), each [rows, 1], as far as the ``largest`` logits of each row tell."""
    shown, vocabulary = largest.shape[1], logits.shape[1]
    last = torch.tensor([min(k, shown) - 1 for k in top_k], device=logits.device).unsqueeze(1)
    unlimited = torch.tensor([k == vocabulary for k in top_k], device=logits.device).unsqueeze(1)
    kth = largest.gather(1, last).masked_fill_(unlimited, float("-inf"))
    total = torch.where(logits < kth, 0.0, logits.exp()).sum(-1, keepdim=True, dtype=torch.float64)
    wanted = total * _column(top_p, total)
    reached = largest.double().exp_().cumsum_(-1)
    nucleus = largest.gather(1, (reached < wanted).sum(-1, keepdim=True).clamp_(max=shown - 1))
    everything = _column(top_p, total) >= 1
    threshold = torch.maximum(kth, nucleus.masked_fill_(everything, float("-inf")))
    return threshold, everything | (reached[:, -1:] >= wanted)


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device).unsqueeze(1)


def _signed(value: int) -> int:
    """The 64-bit integer that equals ``value`` modulo 2**64."""
    return ((value + 2**63) % 2**64) - 2**63


_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


def uniforms(draws: Sequence[Draw]) -> Tensor:
    """One number in [0, 1) per draw, float64, from its seed, choice and position.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; constants of
    https://prng.di.unimi.it/splitmix64.c) started at the seed, split by choice, then by position; its upper 53 bits.
    """
    state = torch.zeros(len(draws), dtype=torch.int64)
    for key in ([one.seed for one in draws], [one.choice for one in draws], [one.position for one in draws]):
        state = _mixed(state + torch.tensor([_signed(number + 1) for number in key]) * _GAMMA)
    return _shifted(state, 11).double() * 2**-53


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
