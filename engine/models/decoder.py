"""The decoder: embeddings → layers → logits of the rows that draw. One class, shaped by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import StepAttention
from engine.kernels.linear import Linear, make_head, make_linear
from engine.models.config import Activation, LayerShape, ModelConfig
from engine.models.weights import ROPE_FACTORS, Reader

_ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """None: the model's layers have no such thing, or this one hasn't."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    rope: int | None  # number of its frequencies
    out: Linear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Heads lie in pairs: dimensions 2i and 2i + 1 of a query or key are what the rotary embedding turns together."""

    config: ModelConfig
    embedding: Tensor
    embedding_scale: float  # a number of the embedding's type
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    frequencies: tuple[Tensor, ...]  # of each different rope: float32 [head size / 2]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, ids: Tensor, positions: Tensor, attend: StepAttention, drawing: Tensor) -> Tensor:
        """ids, positions: int64 [rows]; drawing: int64, numbers of rows. Returns logits [len(drawing), vocabulary]."""
        rows = self._embedded(ids)
        turns = self._turns(positions)
        for number, layer in enumerate(self.layers):
            rows = self._layer(layer, number, rows, turns, attend)
        logits = self.head(self._normed(rows.index_select(0, drawing), self.norm))
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.embedding)
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    def _layer(self, layer: Layer, number: int, rows: Tensor, turns: Sequence[Tensor], attend: StepAttention) -> Tensor:
        config = self.config
        qkv = layer.qkv(self._normed(rows, layer.attention_norm)).view(len(rows), -1, config.head_dim)
        turned = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = turned.tensor_split((config.num_heads,), 1)
            queries.copy_(self._normed(queries, layer.query_norm))
            keys.copy_(self._normed(keys, layer.key_norm))
        if layer.rope is not None:
            rotate(turned, turns[layer.rope])
        rows = self._added(rows, layer.out, attend(number, qkv), layer.attention_out_norm)
        gate, up = layer.gate_up(self._normed(rows, layer.mlp_norm)).chunk(2, -1)
        return self._added(rows, layer.down, _ACTIVATIONS[config.activation](gate).mul_(up), layer.mlp_out_norm)

    def _added(self, rows: Tensor, linear: Linear, inputs: Tensor, norm: Tensor | None) -> Tensor:
        return linear.add_to(rows, inputs) if norm is None else rows + self._normed(linear(inputs), norm)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """A weight of float32 beside rows of another type asks for the whole in float32."""
        if rows.dtype == weight.dtype:
            return functional.rms_norm(rows, weight.shape, weight, self.config.norm_eps)
        return functional.rms_norm(rows.float(), weight.shape, weight, self.config.norm_eps).to(rows.dtype)

    def _turns(self, positions: Tensor) -> list[Tensor]:
        """exp(i · position · frequency) of each rope, complex64 [rows, 1, head size / 2]."""
        angles = [positions.unsqueeze(1).float() * frequencies for frequencies in self.frequencies]
        return [torch.polar(torch.ones_like(angle), angle).unsqueeze(1) for angle in angles]


def rotate(heads: Tensor, turns: Tensor) -> None:
    """Turn each pair of dimensions of heads [rows, n, head size], in place, in float32."""
    pairs = heads.unflatten(-1, (-1, 2))
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def build(config: ModelConfig, reader: Reader) -> Decoder:
    """Take every tensor of the model. Raises ModelError on one that is missing, of another shape, or left over."""
    if config.tied_head:
        reader.forget(r"^lm_head\.weight$")
    reader.forget(r"\.rotary_emb\.inv_freq$")  # old checkpoints store what the configuration says
    reader.forget(r"^(model\.)?(vision_tower|multi_modal_projector)\.")  # of a model that also sees
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = reader.take("model.embed_tokens.weight", vocabulary)
    head = embedding if config.tied_head else reader.take("lm_head.weight", vocabulary)
    decoder = Decoder(
        config=config,
        embedding=embedding,
        embedding_scale=torch.tensor(config.embedding_scale, dtype=embedding.dtype).item(),
        layers=tuple(
            _layer(config, shape, reader, f"model.layers.{number}") for number, shape in enumerate(config.layers)
        ),
        norm=_norm(config, reader, "model.norm", config.hidden_size),
        head=make_head(head, reader.arithmetic),
        frequencies=_frequencies(config, reader),
    )
    reader.check_nothing_left()
    return decoder


def _layer(config: ModelConfig, shape: LayerShape, reader: Reader, name: str) -> Layer:
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    sandwich = config.sandwich_norms
    before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return Layer(
        attention_norm=_norm(config, reader, f"{name}.input_layernorm", hidden),
        qkv=_qkv(config, reader, f"{name}.self_attn"),
        query_norm=_head_norm(config, reader, f"{name}.self_attn.q_norm") if config.head_norms else None,
        key_norm=_head_norm(config, reader, f"{name}.self_attn.k_norm") if config.head_norms else None,
        rope=None if shape.rope is None else config.ropes.index(shape.rope),
        out=_linear(reader, f"{name}.self_attn", {"o_proj": hidden}, inputs=width, bias=config.out_bias),
        attention_out_norm=_norm(config, reader, f"{name}.post_attention_layernorm", hidden) if sandwich else None,
        mlp_norm=_norm(config, reader, f"{name}.{before_mlp}", hidden),
        gate_up=_linear(
            reader,
            f"{name}.mlp",
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            inputs=hidden,
            bias=config.mlp_bias,
        ),
        down=_linear(
            reader, f"{name}.mlp", {"down_proj": hidden}, inputs=config.intermediate_size, bias=config.mlp_bias
        ),
        mlp_out_norm=_norm(config, reader, f"{name}.post_feedforward_layernorm", hidden) if sandwich else None,
    )


def _norm(config: ModelConfig, reader: Reader, name: str, size: int) -> Tensor:
    if not config.norm_offset:
        return reader.take(f"{name}.weight", (size,))
    return reader.take(f"{name}.weight", (size,), dtype=torch.float32) + config.norm_offset


def _head_norm(config: ModelConfig, reader: Reader, name: str) -> Tensor:
    weight = _norm(config, reader, name, config.head_dim)
    if not reader.paired_heads:
        weight = weight.clone()
        pair_dimensions(weight, head_dim=config.head_dim)
    return weight


def _linear(reader: Reader, name: str, outputs: dict[str, int], *, inputs: int, bias: bool) -> Linear:
    weight = reader.take_rows({f"{name}.{part}.weight": (size, inputs) for part, size in outputs.items()})
    biases = reader.take_rows({f"{name}.{part}.bias": (size,) for part, size in outputs.items()}) if bias else None
    return make_linear(weight, biases, reader.arithmetic)


def _qkv(config: ModelConfig, reader: Reader, name: str) -> Linear:
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
    weight = reader.take_rows({f"{name}.{part}.weight": (size, config.hidden_size) for part, size in parts.items()})
    bias = None
    if config.qkv_bias:
        bias = reader.take_rows({f"{name}.{part}.bias": (size,) for part, size in parts.items()})
    if not reader.paired_heads:
        turned = width + kv_width
        pair_dimensions(weight[:turned], head_dim=config.head_dim)
        if bias is not None:
            pair_dimensions(bias[:turned], head_dim=config.head_dim)
    return make_linear(weight, bias, reader.arithmetic)


def pair_dimensions(rows: Tensor, *, head_dim: int) -> None:
    """Within each head move dimension i beside i + half, in place: [heads · head size, …]."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    rows.copy_(halves.transpose(1, 2).reshape(rows.shape))


def _frequencies(config: ModelConfig, reader: Reader) -> tuple[Tensor, ...]:
    factors = torch.ones(1)
    if reader.has(ROPE_FACTORS):
        factors = reader.take(ROPE_FACTORS, (config.head_dim // 2,), dtype=torch.float32).cpu()
    return tuple((rope.frequencies(config.head_dim) / factors).to(reader.device) for rope in config.ropes)
