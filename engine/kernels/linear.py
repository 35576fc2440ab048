"""Linear layers: y = x · Wᵀ + b, in the form that is quickest on the device.

On the CPU oneDNN multiplies by weights that were laid out for it once; with 8 to 32 rows, as decoding has, that is
about twice as fast as an ordinary matrix product (docs/decisions).
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

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


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    if _can_pack(weight):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _can_pack(weight: Tensor) -> bool:
    """Builds of torch without oneDNN lack the operations."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
