"""The shape of a decoder from a config.json of Hugging Face.

What a file leaves out has the value that `transformers`' configuration class gives it. A family is what it changes of
Llama.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine.models.config import MOST_LAYERS, Activation, LayerShape, ModelConfig, Rope, RopeKind
from engine.models.errors import ModelError
from engine.models.fields import Fields

_GEMMA: Final = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_LEFT_OUT: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "smollm3": {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0},
}
_TEXT_HALVES: Final = {"gemma3": "text_config"}  # models that also see, by where they keep the half that reads


def from_json(config: Fields) -> ModelConfig:
    family = config.text("model_type")
    if family in _TEXT_HALVES:
        config = config.within(_TEXT_HALVES[family])
        family = config.text("model_type", f"{family}_text")
    if family not in _FAMILIES:
        known = ", ".join([*_FAMILIES, *_TEXT_HALVES])
        raise ModelError(f"architecture {family[:40]!r} is not supported; supported: {known}")
    if config.has("quantization_config"):
        raise ModelError("config.json: quantised Hugging Face checkpoints are not supported; use GGUF or plain weights")
    config = config.over(_LEFT_OUT[family])
    return _FAMILIES[family](_llama(config), config)


def _llama(config: Fields) -> ModelConfig:
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    context = config.integer("max_position_embeddings", 2048)
    bias = config.flag("attention_bias", default=False)
    rope = _rope(config.within("rope_parameters" if config.has("rope_parameters") else "rope_scaling"), config)
    return ModelConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", max(1, hidden // heads)),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        context_length=context,
        tied_head=config.flag("tie_word_embeddings", default=False),
        layers=(LayerShape(rope=rope),) * config.integer("num_hidden_layers", most=MOST_LAYERS),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        activation=_activation(config, "hidden_act"),
    )


def _mistral(base: ModelConfig, config: Fields) -> ModelConfig:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return dataclasses.replace(base, layers=tuple(dataclasses.replace(layer, window=window) for layer in base.layers))


def _smollm3(base: ModelConfig, config: Fields) -> ModelConfig:
    every = config.integer("no_rope_layer_interval", 4)
    told = [int((number + 1) % every != 0) for number in range(base.num_layers)]
    if config.has("no_rope_layers"):  # 1 where a layer has rope
        told = list(config.integers("no_rope_layers"))[: base.num_layers]
        _check_length("no_rope_layers", told, base)
    slides = config.flag("use_sliding_window", default=False) and config.has("sliding_window")
    layers = _windowed(base, config, slides=[slides and not rope for rope in told])
    bare = [layer if rope else dataclasses.replace(layer, rope=None) for layer, rope in zip(layers, told, strict=True)]
    return dataclasses.replace(base, layers=tuple(bare))


def _qwen2(base: ModelConfig, config: Fields) -> ModelConfig:
    return dataclasses.replace(base, qkv_bias=True, out_bias=False, layers=_qwen_layers(base, config))


def _qwen3(base: ModelConfig, config: Fields) -> ModelConfig:
    return dataclasses.replace(base, head_norms=True, layers=_qwen_layers(base, config))


def _qwen_layers(base: ModelConfig, config: Fields) -> tuple[LayerShape, ...]:
    slides = config.flag("use_sliding_window", default=False)
    first = config.integer("max_window_layers", 28, least=0)
    return _windowed(base, config, slides=[slides and number >= first for number in range(base.num_layers)])


def _gemma2(base: ModelConfig, config: Fields) -> ModelConfig:
    return dataclasses.replace(
        _gemma(base, config),
        layers=_windowed(base, config, slides=[number % 2 == 0 for number in range(base.num_layers)]),
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
    )


def _gemma3(base: ModelConfig, config: Fields) -> ModelConfig:
    if config.has("attn_logit_softcapping"):
        raise ModelError("config.json: Gemma 3 with attn_logit_softcapping is not supported")
    every = config.integer("sliding_window_pattern", 6)
    layers = _windowed(base, config, slides=[(number + 1) % every != 0 for number in range(base.num_layers)])
    local = Rope(theta=config.real("rope_local_base_freq", 10_000.0))
    if config.has("rope_parameters"):
        ropes = config.within("rope_parameters")
        local = _rope(ropes.within("sliding_attention").over({"rope_theta": local.theta}), config)
    return dataclasses.replace(
        _gemma(base, config),
        layers=tuple(layer if layer.window is None else dataclasses.replace(layer, rope=local) for layer in layers),
        head_norms=True,
    )


def _gemma(base: ModelConfig, config: Fields) -> ModelConfig:
    """What Gemma 2 and 3 have in common."""
    if config.flag("use_bidirectional_attention", default=False):
        raise ModelError("config.json: attention to what comes later (use_bidirectional_attention) is not supported")
    return dataclasses.replace(
        base,
        sandwich_norms=True,
        norm_offset=1.0,
        activation=_activation(config, "hidden_activation"),
        embedding_scale=base.hidden_size**0.5,
        query_scalar=config.integer("query_pre_attn_scalar"),
        logit_softcap=_softcap(config, "final_logit_softcapping"),
    )


def _activation(config: Fields, key: str) -> Activation:
    name = config.text(key, "silu")
    if name not in set(Activation):
        raise ModelError(f"config.json: activation {name[:40]!r} is not supported; {' and '.join(Activation)} are")
    return Activation(name)


def _softcap(config: Fields, key: str) -> float | None:
    return config.real(key) if config.has(key) else None


def _windowed(base: ModelConfig, config: Fields, *, slides: Sequence[bool]) -> tuple[LayerShape, ...]:
    """``slides``: which layers have the window where layer_types does not say."""
    if config.has("layer_types"):
        kinds = config.texts("layer_types")
        _check_length("layer_types", kinds, base)
        if odd := set(kinds) - {"sliding_attention", "full_attention"}:
            raise ModelError(f"config.json: layers with {min(odd)[:40]} are not supported")
        slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(
        dataclasses.replace(layer, window=config.integer("sliding_window") if slide else None)
        for layer, slide in zip(base.layers, slides, strict=True)
    )


def _check_length(key: str, values: Sequence[object], base: ModelConfig) -> None:
    if len(values) != base.num_layers:
        raise ModelError(f"config.json: {key} tells of {len(values)} layers, but there are {base.num_layers}")


def _rope(scaling: Fields, config: Fields) -> Rope:
    """``scaling``: rope_parameters since transformers 5, rope_scaling with a rope_theta beside it before. Where layers
    differ it holds one of each kind, and this is that of full attention.
    """
    scaling = scaling.within("full_attention") if scaling.has("full_attention") else scaling
    theta = scaling.real("rope_theta", config.real("rope_theta", 10_000.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if scaling.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json: a rotary embedding over a part of each head is not supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=RopeKind.LINEAR, factor=scaling.real("factor"))
    if kind == "llama3":
        context = config.integer("max_position_embeddings", 2048)
        return Rope(
            theta=theta,
            kind=RopeKind.LLAMA3,
            factor=scaling.real("factor"),
            low_freq_factor=scaling.real("low_freq_factor"),
            high_freq_factor=scaling.real("high_freq_factor"),
            original_context=scaling.integer("original_max_position_embeddings", context),
        )
    raise ModelError(f"config.json: rotary scaling {kind[:40]!r} is not supported; default, linear and llama3 are")


_FAMILIES: Final[Mapping[str, Callable[[ModelConfig, Fields], ModelConfig]]] = {
    "llama": lambda base, _: base,
    "mistral": _mistral,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
