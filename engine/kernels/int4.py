"""Weights in groups of 32 with four bits each, a scale and an offset: weight = q · scale + offset, q in 0..15.

A group is 20 bytes, as torch's four-bit embeddings have them, whose unpacking is vectorised: 16 bytes with two weights
each, the first in the low half; scale and offset in float16. Q4_0 and Q4_1 of GGML hold the same numbers in another
order, Q4_K nearly (its scales are products of a float16 and six bits).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

GROUP: Final = 32
GROUP_BYTES: Final = 20
_LEVELS: Final = 15


def groups_from(weight: Tensor) -> Tensor | None:
    """uint8 [outputs, inputs / 32, 20] from floats [outputs, inputs]; None where groups don't fit.

    The steps reach from the smallest to the largest weight of a group.
    """
    if weight.shape[1] % GROUP:
        return None
    values = weight.float().unflatten(1, (-1, GROUP))
    low, high = values.aminmax(dim=-1, keepdim=True)
    offset = _as_half(low)
    scale = _as_half((high - offset) / _LEVELS)
    steps = (values - offset).div_(scale.clamp_min(torch.finfo(torch.float16).tiny)).round_().clamp_(0, _LEVELS)
    return packed(steps.to(torch.uint8), scale, offset)


def packed(steps: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """steps: uint8 [..., 32], each below 16; scale, offset: floats [..., 1]. Returns uint8 [..., 20]."""
    pairs = steps.unflatten(-1, (-1, 2))
    numbers = torch.cat([scale, offset], -1).half().view(torch.uint8)
    return torch.cat([pairs[..., 0] | pairs[..., 1] << 4, numbers], -1)


def unpacked(groups: Tensor) -> Tensor:
    """float32 [outputs, inputs]. The product with the scale and the sum with the offset are rounded once together."""
    flat: Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(groups.view(-1, GROUP_BYTES))
    return flat.view(len(groups), -1)


def _as_half(values: Tensor) -> Tensor:
    """Rounded to float16, float32 again."""
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).half().float()
