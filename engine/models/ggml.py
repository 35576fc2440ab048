"""The number formats of GGML: blocks of a few weights with common scales, turned back into float32.

Layouts as in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0 …); the arithmetic keeps the
order of operations of `gguf.quants`, so that results are equal to the last bit. Each function takes blocks, uint8
[n, bytes], and fills float32 [n, elements].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from engine.kernels.int4 import GROUP, packed
from engine.models.errors import ModelError


class GgmlType(IntEnum):
    """Numbers as they stand in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


@dataclass(frozen=True, slots=True)
class BlockFormat:
    elements: int
    bytes: int
    fill: Callable[[Tensor, Tensor], object]


def format_of(number: int, *, tensor: str) -> BlockFormat:
    try:
        return _FORMATS[GgmlType(number)]
    except ValueError:
        known = ", ".join(kind.name for kind in GgmlType)
        raise ModelError(
            f"tensor {tensor} has GGML type {number}, which is not supported; supported: {known}"
        ) from None


def dequantise(data: Tensor, number: int, *, shape: tuple[int, ...], tensor: str) -> Tensor:
    """``data``: uint8, all blocks of the tensor. Returns float32 of ``shape``."""
    layout = format_of(number, tensor=tensor)
    out = torch.empty(shape, dtype=torch.float32)
    if out.numel():
        layout.fill(data.view(-1, layout.bytes), out.view(-1, layout.elements))
    return out


def four_bit_groups(data: Tensor, number: int, *, shape: tuple[int, ...]) -> Tensor | None:
    """As engine.kernels.int4 has them; None for a type that is no multiple of four bits with scale and offset.

    Equal numbers but for Q4_K, whose scales and minima, products of two numbers, are rounded to float16.
    """
    split = _FOUR_BITS.get(number)
    if split is None or len(shape) != 2:
        return None
    steps, scale, offset = split(data.view(-1, format_of(number, tensor="").bytes))
    return packed(steps, scale, offset).view(shape[0], shape[1] // GROUP, -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 that stands at byte ``at`` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low halves of the bytes are the first half of the elements, high halves the second."""
    half = packed.shape[1]
    out[:, :half].copy_(packed & 15)
    out[:, half:].copy_(packed >> 4)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4] → 0 or 16 per element [n, 32]: bit i of the little-endian word belongs to element i."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> bits) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits in twelve bytes, as float32 [n, 8] each (Q4_K and Q5_K)."""
    low, middle, high = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return scales.float(), minima.float()


def _scale_groups(blocks: Tensor, groups: Tensor) -> None:
    """In place: groups [n, 8, 32] ← d · scale · groups − dmin · minimum."""
    scales, minima = _six_bit_scales(blocks[:, 4:16].contiguous())
    scales.mul_(_half(blocks, 0))
    minima.mul_(_half(blocks, 2))
    groups.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def _nibble_groups(packed: Tensor, groups: Tensor) -> None:
    """128 bytes → [n, 8, 32]: each 32 bytes hold two groups, the first in their low halves."""
    packed = packed.view(-1, 4, 32)
    groups[:, 0::2].copy_(packed & 15)
    groups[:, 1::2].copy_(packed >> 4)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 8, 32)
    _nibble_groups(blocks[:, 16:].contiguous(), groups)
    _scale_groups(blocks, groups)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 8, 32)
    _nibble_groups(blocks[:, 48:].contiguous(), groups)
    bits = torch.arange(8, dtype=torch.uint8).view(8, 1)
    groups.add_(((blocks[:, 16:48].unsqueeze(1) >> bits) & 1) << 4)
    _scale_groups(blocks, groups)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    shifts = torch.tensor([0, 4], dtype=torch.uint8).view(2, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    values = ((low >> shifts) & 15).view(-1, 256) | (((high >> pairs) & 3) << 4).view(-1, 256)
    out.copy_(values).sub_(32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_FORMATS: Final = {
    GgmlType.F32: BlockFormat(1, 4, _f32),
    GgmlType.F16: BlockFormat(1, 2, _f16),
    GgmlType.BF16: BlockFormat(1, 2, _bf16),
    GgmlType.Q8_0: BlockFormat(32, 34, _q8_0),
    GgmlType.Q4_0: BlockFormat(32, 18, _q4_0),
    GgmlType.Q4_1: BlockFormat(32, 20, _q4_1),
    GgmlType.Q5_0: BlockFormat(32, 22, _q5_0),
    GgmlType.Q5_1: BlockFormat(32, 24, _q5_1),
    GgmlType.Q4_K: BlockFormat(256, 144, _q4_k),
    GgmlType.Q5_K: BlockFormat(256, 176, _q5_k),
    GgmlType.Q6_K: BlockFormat(256, 210, _q6_k),
}


def _split_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(steps, scale, offset) of each group; likewise below."""
    steps = blocks.new_empty(len(blocks), GROUP)
    _nibbles(blocks[:, 2:], steps)
    scale = _half(blocks, 0)
    return steps, scale, scale * -8


def _split_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    steps = blocks.new_empty(len(blocks), GROUP)
    _nibbles(blocks[:, 4:], steps)
    return steps, _half(blocks, 0), _half(blocks, 2)


def _split_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    steps = blocks.new_empty(len(blocks), 8, GROUP)
    _nibble_groups(blocks[:, 16:].contiguous(), steps)
    scales, minima = _six_bit_scales(blocks[:, 4:16].contiguous())
    return steps, scales.mul_(_half(blocks, 0)).unsqueeze(-1), minima.mul_(_half(blocks, 2)).neg_().unsqueeze(-1)


_FOUR_BITS: Final[dict[int, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]] = {
    GgmlType.Q4_0: _split_q4_0,
    GgmlType.Q4_1: _split_q4_1,
    GgmlType.Q4_K: _split_q4_k,
}
