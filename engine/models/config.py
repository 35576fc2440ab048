"""The shape of a decoder: what each layer has, and what it computes with.

Sources of the formulas: rotary embedding https://arxiv.org/abs/2104.09864; its "llama3" scaling as in the reference
code of Llama 3.1 (also `transformers.modeling_rope_utils`); soft caps https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from engine.kernels.attention import Scoring
from engine.kernels.memory import KvShape
from engine.models.errors import ModelError

MOST_LAYERS: Final = 1024  # far above any model, far below what a hostile number would cost


class RopeKind(StrEnum):
    PLAIN = "plain"
    LINEAR = "linear"
    LLAMA3 = "llama3"


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: base and the stretch that lets a model read further than it was first trained for."""

    theta: float
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
        plain = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if self.kind is RopeKind.LINEAR:
            return plain / self.factor
        if self.kind is RopeKind.LLAMA3:
            return self._stretched(plain)
        return plain

    def _stretched(self, plain: torch.Tensor) -> torch.Tensor:
        """Long waves are divided by the factor, short ones kept, those in between interpolated."""
        turns = self.original_context * plain / (2 * math.pi)  # of a pair within the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * plain / self.factor + smooth * plain


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What may differ from layer to layer."""

    rope: Rope | None  # None: positions are not told
    window: int | None = None  # a row sees so many positions, its own included; None: all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """RMSNorm, grouped-query attention and a gated MLP are common to all; the rest is told here. Without the fields
    that have a default it is Llama.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied_head: bool
    layers: tuple[LayerShape, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # queries and keys are normed head by head, before they are turned
    sandwich_norms: bool = False  # what attention and MLP give is normed too, before it is added
    norm_offset: float = 0.0  # norms multiply by weight + offset, in float32 where there is an offset
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    query_scalar: int | None = None  # scores are divided by its root; None: the head size
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads can't share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} is odd: the rotary embedding turns pairs of dimensions")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def kept(self) -> KvShape:
        return KvShape(layers=self.num_layers, heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def scoring(self) -> Scoring:
        return Scoring(
            scale=(self.query_scalar or self.head_dim) ** -0.5,
            softcap=self.attention_softcap,
            windows=tuple(layer.window for layer in self.layers),
        )

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds of one row in the linears of all layers; the head comes on top for rows that draw."""
        qkv = self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        out = self.num_heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (qkv + out + mlp)

    @property
    def macs_per_draw(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def macs_per_attended(self) -> int:
        """Multiply-adds of one row with one attended position, over all layers: a score and a weighted sum per head.

        As if no layer had a window: an upper bound for models that have.
        """
        return self.num_layers * self.num_heads * self.head_dim * 2
