"""Linear layers: y = x · Wᵀ + b, in the form that is quickest on the device, or that was asked for.

On the CPU oneDNN multiplies by weights that were laid out for it once; with 8 to 32 rows, as decoding has, that is
about twice as fast as an ordinary matrix product. Weights in fewer bits: docs/decisions/0008.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.arithmetic import Arithmetic
from engine.kernels.int4 import groups_from, unpacked
from engine.kernels.int8 import Int8Weight

_ROWS_HINT: Final = 64  # the layout oneDNN picks for it is good from 1 row to 512


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        """``other`` + the product, in one operation where the device has one."""
        ...


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        return other + functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """float32 on the CPU. Keeps only the packed copy of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)  # noqa: SLF001 -- torch has no public name for it
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 -- as above
        self._sum = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001 -- as above

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = self._product(rows, self._weight, self._bias, "none", [], "")
        return product

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        total: Tensor = self._sum(rows, other, self._weight, self._bias, "add")
        return total


class HalfLinear:
    """Weights rounded to float16 (larger ones than 65,504 to that), products and sums in float32, by FBGEMM."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        fits = weight.clamp(-_LARGEST_HALF, _LARGEST_HALF)
        self._weight = torch.ops.quantized.linear_prepack_fp16(fits, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = self._product(rows, self._weight)
        return product

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        return self(rows).add_(other)


class Int8Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = Int8Weight(weight)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product, scale = self._weight.times(rows)
        return product.mul_(scale) if self._bias is None else torch.addcmul(self._bias, product, scale)

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        if self._bias is not None:
            return self(rows).add_(other)
        product, scale = self._weight.times(rows)
        return torch.addcmul(other, product, scale)


class Int4Linear:
    """Unpacks the weight for each product: it takes a sixth of the memory and about the time of float32."""

    def __init__(self, groups: Tensor, bias: Tensor | None = None) -> None:
        """``groups``: as in engine.kernels.int4."""
        self._groups = groups
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, unpacked(self._groups), self._bias)

    def add_to(self, other: Tensor, rows: Tensor) -> Tensor:
        return self(rows).add_(other)


_LARGEST_HALF: Final = torch.finfo(torch.float16).max


def make_linear(weight: Tensor, bias: Tensor | None = None, arithmetic: Arithmetic = Arithmetic.AUTO) -> Linear:
    """``weight``: floats [outputs, inputs], or four-bit groups as in engine.kernels.int4."""
    if weight.dtype == torch.uint8:
        return Int4Linear(weight, bias)
    if arithmetic is Arithmetic.INT4 and (groups := groups_from(weight)) is not None:
        return Int4Linear(groups, bias)
    if arithmetic is Arithmetic.INT8:
        return Int8Linear(weight, bias)
    if arithmetic in (Arithmetic.FP16, Arithmetic.INT4):
        return HalfLinear(weight, bias)
    if _can_pack(weight):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def make_head(weight: Tensor, arithmetic: Arithmetic = Arithmetic.AUTO) -> Linear:
    """The last linear of a model. Fewer than 16 bits there cost as much quality as in all the others together."""
    few = arithmetic in (Arithmetic.INT8, Arithmetic.INT4)
    return make_linear(weight, arithmetic=Arithmetic.FP16 if few else arithmetic)


def _can_pack(weight: Tensor) -> bool:
    """Builds of torch without oneDNN lack the operations."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
