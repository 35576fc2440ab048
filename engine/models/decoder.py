"""The decoder: embeddings → layers → logits of the rows that draw. One class, shaped by its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import StepAttention
from engine.kernels.linear import Linear, make_head, make_linear
from engine.models.config import ModelConfig
from engine.models.weights import ROPE_FACTORS, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Heads lie in pairs: dimensions 2i and 2i + 1 of a query or key are what the rotary embedding turns together."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    frequencies: Tensor  # float32 [head size / 2]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, ids: Tensor, positions: Tensor, attend: StepAttention, drawing: Tensor) -> Tensor:
        """ids, positions: int64 [rows]; drawing: int64, numbers of rows. Returns logits [len(drawing), vocabulary]."""
        rows = functional.embedding(ids, self.embedding)
        turns = self._turns(positions)
        for number, layer in enumerate(self.layers):
            rows = self._layer(layer, number, rows, turns, attend)
        return self.head(self._normed(rows.index_select(0, drawing), self.norm))

    def _layer(self, layer: Layer, number: int, rows: Tensor, turns: Tensor, attend: StepAttention) -> Tensor:
        config = self.config
        qkv = layer.qkv(self._normed(rows, layer.attention_norm)).view(len(rows), -1, config.head_dim)
        rotate(qkv[:, : config.num_heads + config.num_kv_heads], turns)
        rows = layer.out.add_to(rows, attend(number, qkv))
        gate, up = layer.gate_up(self._normed(rows, layer.mlp_norm)).chunk(2, -1)
        return layer.down.add_to(rows, functional.silu(gate).mul_(up))

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, weight.shape, weight, self.config.norm_eps)

    def _turns(self, positions: Tensor) -> Tensor:
        """exp(i · position · frequency), complex64 [rows, 1, head size / 2]."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


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
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = reader.take("model.embed_tokens.weight", vocabulary)
    head = embedding if config.tied_head else reader.take("lm_head.weight", vocabulary)
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(_layer(config, reader, f"model.layers.{number}") for number in range(config.num_layers)),
        norm=reader.take("model.norm.weight", (config.hidden_size,)),
        head=make_head(head, reader.arithmetic),
        frequencies=_frequencies(config, reader),
    )
    reader.check_nothing_left()
    return decoder


def _layer(config: ModelConfig, reader: Reader, name: str) -> Layer:
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    return Layer(
        attention_norm=reader.take(f"{name}.input_layernorm.weight", (hidden,)),
        qkv=_qkv(config, reader, f"{name}.self_attn"),
        out=_linear(reader, f"{name}.self_attn", {"o_proj": hidden}, inputs=width, bias=config.attention_bias),
        mlp_norm=reader.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
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
    )


def _linear(reader: Reader, name: str, outputs: dict[str, int], *, inputs: int, bias: bool) -> Linear:
    weight = reader.take_rows({f"{name}.{part}.weight": (size, inputs) for part, size in outputs.items()})
    biases = reader.take_rows({f"{name}.{part}.bias": (size,) for part, size in outputs.items()}) if bias else None
    return make_linear(weight, biases, reader.arithmetic)


def _qkv(config: ModelConfig, reader: Reader, name: str) -> Linear:
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
    weight = reader.take_rows({f"{name}.{part}.weight": (size, config.hidden_size) for part, size in parts.items()})
    bias = None
    if config.attention_bias:
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


def _frequencies(config: ModelConfig, reader: Reader) -> Tensor:
    frequencies = config.rope.frequencies(config.head_dim)
    if reader.has(ROPE_FACTORS):
        frequencies = frequencies / reader.take(ROPE_FACTORS, (config.head_dim // 2,), dtype=torch.float32).cpu()
    return frequencies.to(reader.device)
