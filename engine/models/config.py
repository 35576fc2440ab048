"""The shape of a decoder, read from config.json or from GGUF metadata.

Sources of the formulas: rotary embedding https://arxiv.org/abs/2104.09864; its "llama3" scaling as in the reference
code of Llama 3.1 (also `transformers.modeling_rope_utils`); keys of GGUF
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from engine.kernels.memory import KvShape
from engine.models.errors import ModelError
from engine.models.fields import Fields

_FAMILIES: Final = ("llama",)


class RopeKind(StrEnum):
    PLAIN = "plain"
    LINEAR = "linear"
    LLAMA3 = "llama3"


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
class ModelConfig:
    """Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context_length: int
    tied_head: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads can't share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} is odd: the rotary embedding turns pairs of dimensions")

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kept(self) -> KvShape:
        return KvShape(layers=self.num_layers, heads=self.num_kv_heads, head_dim=self.head_dim)

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
        """Multiply-adds of one row with one attended position, over all layers: a score and a weighted sum per head."""
        return self.num_layers * self.num_heads * self.head_dim * 2


def from_hf(config: Fields) -> ModelConfig:
    """From a config.json of Hugging Face."""
    family = config.text("model_type")
    _check_family(family)
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: activation {activation!r} is not supported; silu is")
    if config.has("quantization_config"):
        raise ModelError("config.json: quantised Hugging Face checkpoints are not supported; use GGUF or plain weights")
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    context = config.integer("max_position_embeddings", 2048)
    return ModelConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", max(1, hidden // heads)),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope=_hf_rope(config, context=context),
        context_length=context,
        tied_head=config.flag("tie_word_embeddings", default=False),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _hf_rope(config: Fields, *, context: int) -> Rope:
    """``rope_parameters`` since transformers 5, ``rope_theta`` and ``rope_scaling`` before."""
    scaling = config.within("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = scaling.real("rope_theta", config.real("rope_theta", 10_000.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if scaling.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json: a rotary embedding over a part of each head is not supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=RopeKind.LINEAR, factor=scaling.real("factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=RopeKind.LLAMA3,
            factor=scaling.real("factor"),
            low_freq_factor=scaling.real("low_freq_factor"),
            high_freq_factor=scaling.real("high_freq_factor"),
            original_context=scaling.integer("original_max_position_embeddings", context),
        )
    raise ModelError(f"config.json: rotary scaling {kind!r} is not supported; default, linear and llama3 are")


def from_gguf(fields: Fields, *, vocab_size: int, tied_head: bool) -> ModelConfig:
    """From GGUF metadata. The vocabulary is as long as the embedding, and the head is tied when it has no tensor."""
    family = fields.text("general.architecture")
    _check_family(family)
    if fields.integer(f"{family}.expert_count", 0, least=0):
        raise ModelError("mixture-of-experts models are not supported")
    heads = fields.integer(f"{family}.attention.head_count")
    hidden = fields.integer(f"{family}.embedding_length")
    head_dim = fields.integer(f"{family}.attention.key_length", max(1, hidden // heads))
    if fields.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("a rotary embedding over a part of each head is not supported")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer(f"{family}.feed_forward_length"),
        num_layers=fields.integer(f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer(f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.real(f"{family}.attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, family=family),
        context_length=fields.integer(f"{family}.context_length"),
        tied_head=tied_head,
    )


def _gguf_rope(fields: Fields, *, family: str) -> Rope:
    theta = fields.real(f"{family}.rope.freq_base", 10_000.0)
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=RopeKind.LINEAR, factor=fields.real(f"{family}.rope.scaling.factor", 1.0))
    raise ModelError(f"rotary scaling {kind!r} is not supported; none and linear are")


def _check_family(family: str) -> None:
    if family not in _FAMILIES:
        raise ModelError(f"architecture {family[:40]!r} is not supported; supported: {', '.join(_FAMILIES)}")
