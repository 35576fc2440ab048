"""Products of eight-bit integers on the CPU, by FBGEMM, exact up to the two roundings that make the integers.

Activations of language models have a few channels a hundred times as large as the rest, which leave nothing of the
rest when all of a row are rounded alike. So the channels are mixed first, in blocks, by a Hadamard matrix divided by
the root of its size. It is orthogonal: with the weights mixed alike the product is what it was (QuaRot,
https://arxiv.org/abs/2404.00456, does the same to whole models).

Without VNNI, AVX2 adds two neighbouring products of an unsigned and a signed byte in 16 bits, saturating. FBGEMM leaves
it to the caller to avoid that, as a rule by seven bits for activations. Here they have 191 steps, and weights of one
sign that are neighbours sum up to at most 171: 191 · 171 fits. Measured in docs/decisions/0008.
"""

from __future__ import annotations

import warnings
from typing import Final

import torch
from torch import Tensor

_MOST_MIXED: Final = 64  # channels; more mix better and cost more
STEPS: Final = 95  # of an activation, either side of 0
ZERO: Final = STEPS + 1  # stands for 0: the integers of activations are unsigned
PAIR: Final = (2**15 - 1) // (ZERO + STEPS)
_WEIGHT_STEPS: Final = 110  # of a row's largest weight: few neighbours then sum up to more than PAIR
_SMALLEST: Final = 1e-30  # a row of zeros is divided by it


class Int8Weight:
    def __init__(self, weight: Tensor) -> None:
        """``weight``: floats [outputs, inputs]."""
        steps, scale = quantised(mixed(weight.float(), mixing(weight.shape[1])))
        self._mixing = mixing(weight.shape[1])
        self._packed = _prepack(steps, scale)
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def times(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows: float32 [n, inputs]. Returns (product, scale), [n, outputs] and [n, 1], to be multiplied.

        Each row is rounded in units of its own largest value, so that no row's result depends on its neighbours.
        """
        turned = mixed(rows, self._mixing)
        largest = turned.abs().amax(1, keepdim=True).clamp_min_(_SMALLEST)
        return self._product(turned.div_(largest), 1 / STEPS, ZERO, self._packed), largest


def mixing(inputs: int) -> Tensor:
    """Hadamard matrix of the largest power of two, up to 64, that divides ``inputs``, over the root of its size."""
    matrix = torch.ones(1, 1)
    while len(matrix) < _MOST_MIXED and inputs % (2 * len(matrix)) == 0:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / len(matrix) ** 0.5


def mixed(rows: Tensor, by: Tensor) -> Tensor:
    """A new tensor."""
    return torch.mm(rows.reshape(-1, len(by)), by).view(rows.shape)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(steps, scale): int8 [outputs, inputs] and float32 [outputs], whose product is about ``weight``."""
    scale = weight.abs().amax(1).div_(_WEIGHT_STEPS).clamp_min_(_SMALLEST)
    steps = (weight / scale.unsqueeze(1)).round_()
    pairs = steps[:, : steps.shape[1] // 2 * 2].unflatten(1, (-1, 2))
    for sign in (1, -1):
        beyond = (pairs * sign).clamp_min_(0).sum(-1).sub_(PAIR).clamp_min_(0) * sign
        first = (beyond / 2).round_()
        pairs[..., 0] -= first
        pairs[..., 1] -= beyond - first
    return steps.to(torch.int8), scale


def is_there() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _prepack(steps: Tensor, scale: Tensor) -> torch.ScriptObject:
    """In FBGEMM's layout. Where there is VNNI torch would take another library, which lacks the product used here."""
    zeros = torch.zeros(len(steps), dtype=torch.int64)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors are to go; the one here lives for two lines
            whole = torch._make_per_channel_quantized_tensor(steps, scale.double(), zeros, 0)  # noqa: SLF001 -- no public name makes one from its integers
            packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(whole, None)
    finally:
        torch.backends.quantized.engine = before
    return packed
