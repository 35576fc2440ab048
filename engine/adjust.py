"""Logits before the draw: bias, penalties, and what may not come.

In the order of vLLM and `transformers`: what is added to single tokens, then the repetition penalty, then frequency and
presence; whatever may not come is excluded last. All of it concerns a few tokens of a few rows, so it is a list of
(row, token) places for all rows at once, made on the host: nothing waits for the device, and a row that asks for
nothing has no place in the list.

repetition (Keskar et al., "CTRL", 2019, 4.1; as `transformers` applies it): each token of the prompt and the completion
    has its logit divided by the penalty where it is positive, multiplied where it is negative.
frequency, presence (OpenAI, "Advanced usage: parameter details"): each token that came c > 0 times in the completion
    has c · frequency + presence taken off its logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.draws import Draw

_Rows: TypeAlias = Sequence[tuple[int, Draw]]
_NEVER: Final = float("-inf")


def adjust(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits: [rows, vocabulary], overwritten. Returns them, or float32 ones where anything had to be changed.

    Rows that ask for nothing keep their values. ``seen`` and ``bias`` hold ids of the vocabulary only.
    """
    rows = [(row, one) for row, one in enumerate(draws) if one.adjusts]
    if not rows:
        return logits
    logits = logits.float()
    _bias(logits, [(row, one) for row, one in rows if one.bias])
    _repeat(logits, [(row, one) for row, one in rows if one.repetition != 1 and one.seen])
    _count(logits, [(row, one) for row, one in rows if (one.presence or one.frequency) and one.completion])
    _ban(logits, [(row, one) for row, one in rows if one.banned])
    _mask(logits, [(row, one) for row, one in rows if one.allowed is not None])
    return logits


def _bias(logits: Tensor, rows: _Rows) -> None:
    if rows:
        at = _places(logits, rows, lambda one: [token for token, _ in one.bias])
        logits[at] += _floats([value for _, one in rows for _, value in one.bias], logits)


def _repeat(logits: Tensor, rows: _Rows) -> None:
    """A token seen twice is written twice, with the same value."""
    if rows:
        at = _places(logits, rows, lambda one: one.seen)
        penalty = _floats(np.repeat([one.repetition for _, one in rows], [len(one.seen) for _, one in rows]), logits)
        before = logits[at]
        logits[at] = torch.where(before < 0, before * penalty, before / penalty)


def _count(logits: Tensor, rows: _Rows) -> None:
    if not rows:
        return
    width = logits.shape[1]
    tokens = [np.asarray(one.completion, dtype=np.int64) + number * width for number, (_, one) in enumerate(rows)]
    flat, counts = np.unique(np.concatenate(tokens), return_counts=True)
    numbers, found = np.divmod(flat, width)
    frequency, presence = np.array([(one.frequency, one.presence) for _, one in rows])[numbers].T
    at = _on(np.array([row for row, _ in rows])[numbers], logits), _on(found, logits)
    logits[at] -= _floats(counts * frequency + presence, logits)


def _ban(logits: Tensor, rows: _Rows) -> None:
    if rows:
        logits[_places(logits, rows, lambda one: one.banned)] = _NEVER


def _mask(logits: Tensor, rows: _Rows) -> None:
    if not rows:
        return
    width = logits.shape[1]
    packed = np.stack([np.frombuffer(one.allowed or b"", dtype=np.uint8)[: -(-width // 8)] for _, one in rows])
    bits = _on(packed, logits).unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=logits.device)
    excluded = (bits & 1).reshape(len(rows), -1)[:, :width] == 0
    at = _on(np.array([row for row, _ in rows]), logits)
    logits[at] = logits[at].masked_fill(excluded, _NEVER)


def _places(logits: Tensor, rows: _Rows, tokens_of: Callable[[Draw], Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(rows, tokens) of all that ``tokens_of`` gives, as an index into the logits."""
    tokens = [np.asarray(tokens_of(one), dtype=np.int64) for _, one in rows]
    numbers = np.repeat([row for row, _ in rows], [len(some) for some in tokens])
    return _on(numbers, logits), _on(np.concatenate(tokens), logits)


def _floats(values: Sequence[float] | NDArray[np.float64], like: Tensor) -> Tensor:
    return _on(np.asarray(values, dtype=np.float32), like)


def _on(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
