"""The shape of a decoder from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the metadata leaves open (which layers have a
window or no rope, the base of the local rope, how queries are scaled) is part of an architecture's name; the values are
those of llama.cpp's loaders (`load_arch_hparams` in src/models).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from engine.models.config import MOST_LAYERS, Activation, LayerShape, ModelConfig, Rope, RopeKind
from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.weights import GgufLayout


def from_metadata(fields: Fields, *, vocab_size: int, tensors: Collection[str]) -> ModelConfig:
    """``tensors``: names. The vocabulary is as long as the embedding; the head is tied when it has no tensor."""
    family = fields.text("general.architecture")
    if family not in _FAMILIES:
        raise ModelError(f"architecture {family[:40]!r} is not supported; supported: {', '.join(_FAMILIES)}")
    if fields.integer(f"{family}.expert_count", 0, least=0):
        raise ModelError("mixture-of-experts models are not supported")
    ours = fields.under(f"{family}.")
    return _FAMILIES[family](_llama(ours, vocab_size=vocab_size, tensors=tensors), ours)


def layout_of(fields: Fields, config: ModelConfig) -> GgufLayout:
    return GgufLayout(
        paired_heads=fields.text("general.architecture") in _PAIRED,
        sandwich_norms=config.sandwich_norms,
        norm_offset=config.norm_offset,
    )


def _llama(fields: Fields, *, vocab_size: int, tensors: Collection[str]) -> ModelConfig:
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError("a rotary embedding over a part of each head is not supported")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        context_length=fields.integer("context_length"),
        tied_head="output.weight" not in tensors,
        layers=(LayerShape(rope=_rope(fields)),) * fields.integer("block_count", most=MOST_LAYERS),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        head_norms="blk.0.attn_q_norm.weight" in tensors,
    )


def _windowed_everywhere(base: ModelConfig, fields: Fields) -> ModelConfig:
    """Mistral goes by the name of Llama; only a window tells it."""
    return dataclasses.replace(base, layers=_windowed(base, fields, slides=[True] * base.num_layers))


def _smollm3(base: ModelConfig, _: Fields) -> ModelConfig:
    layers = [
        layer if (number + 1) % 4 else dataclasses.replace(layer, rope=None) for number, layer in enumerate(base.layers)
    ]
    return dataclasses.replace(base, layers=tuple(layers))


def _gemma2(base: ModelConfig, fields: Fields) -> ModelConfig:
    fields = fields.over(
        {
            "attention.sliding_window": 4096,
            "attention.sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    )
    return dataclasses.replace(
        _gemma(base, fields, layers_of_27b=46),
        layers=_windowed(base, fields, slides=_pattern(base, fields)),
        attention_softcap=fields.real("attn_logit_softcapping"),
    )


def _gemma3(base: ModelConfig, fields: Fields) -> ModelConfig:
    fields = fields.over({"attention.sliding_window_pattern": 6})
    layers = _windowed(base, fields, slides=_pattern(base, fields))
    local = Rope(theta=fields.real("rope.freq_base_swa", 10_000.0))
    return dataclasses.replace(
        _gemma(base, fields, layers_of_27b=62),
        layers=tuple(layer if layer.window is None else dataclasses.replace(layer, rope=local) for layer in layers),
    )


def _gemma(base: ModelConfig, fields: Fields, *, layers_of_27b: int) -> ModelConfig:
    """What Gemma 2 and 3 have in common."""
    wide = base.num_layers == layers_of_27b  # the only size whose queries are not scaled by the size of a head
    cap = "final_logit_softcapping"
    return dataclasses.replace(
        base,
        sandwich_norms=True,
        norm_offset=1.0,
        activation=Activation.GELU_TANH,
        embedding_scale=base.hidden_size**0.5,
        query_scalar=max(1, base.hidden_size // base.num_heads) if wide else base.head_dim,
        logit_softcap=fields.real(cap) if fields.has(cap) else None,
    )


def _pattern(base: ModelConfig, fields: Fields) -> list[bool]:
    """Which layers slide: told one by one, or by a period that ends with a layer that does not."""
    key = "attention.sliding_window_pattern"
    if not isinstance(fields.raw(key), list):
        every = fields.integer(key)
        return [(number + 1) % every != 0 for number in range(base.num_layers)]
    told = fields.flags(key)
    if len(told) != base.num_layers:
        raise ModelError(f"metadata: {key} tells of {len(told)} layers, but there are {base.num_layers}")
    return list(told)


def _windowed(base: ModelConfig, fields: Fields, *, slides: Sequence[bool]) -> tuple[LayerShape, ...]:
    window = fields.integer("attention.sliding_window", 0, least=0) or None
    return tuple(
        dataclasses.replace(layer, window=window if slide else None)
        for layer, slide in zip(base.layers, slides, strict=True)
    )


def _rope(fields: Fields) -> Rope:
    theta = fields.real("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=RopeKind.LINEAR, factor=fields.real("rope.scaling.factor", 1.0))
    raise ModelError(f"rotary scaling {kind[:40]!r} is not supported; none and linear are")


_FAMILIES: Final[Mapping[str, Callable[[ModelConfig, Fields], ModelConfig]]] = {
    "llama": _windowed_everywhere,
    "smollm3": _smollm3,
    "qwen2": lambda base, _: base,
    "qwen3": lambda base, _: base,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
_PAIRED: Final = {"llama", "smollm3"}  # a rotated pair is two neighbours of a head; else (i, i + half)
