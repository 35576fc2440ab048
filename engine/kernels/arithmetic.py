"""What the weights of linear layers are kept and multiplied as. Imports no torch: the configuration names it too."""

from __future__ import annotations

from enum import StrEnum


class Arithmetic(StrEnum):
    """Measured on a CPU in docs/decisions/0008; a GPU multiplies in its own number format."""

    AUTO = "auto"  # float32 on the CPU; the device's own format elsewhere
    FP32 = "fp32"
    FP16 = "fp16"  # half the memory; products and sums in float32
    INT8 = "int8"  # a quarter; activations are rounded to eight bits, row by row
    INT4 = "int4"  # a sixth: groups of 32 weights with a scale and an offset; products and sums in float32
