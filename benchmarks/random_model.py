"""Models of any shape with random weights: speed and parity do not ask what a model has learnt."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import torch

from engine.models import LoadedModel
from engine.models.config import LayerShape, ModelConfig, Rope, RopeKind
from engine.models.decoder import build
from engine.models.weights import Reader

LLAMA_8B: Final = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    layers=(LayerShape(rope=Rope(theta=500_000.0, kind=RopeKind.LLAMA3, factor=8.0)),) * 32,
    context_length=131_072,
    tied_head=False,
)
TINY: Final = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    layers=(LayerShape(rope=Rope(theta=10_000.0)),) * 4,
    context_length=2048,
    tied_head=True,
)


class RandomWeights:
    """Weights of a configuration, drawn on a device with a variance that keeps activations in range."""

    paired_heads = True

    def __init__(self, config: ModelConfig, *, device: str, seed: int = 0) -> None:
        self._shapes = _shapes(config)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        drawn = torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)
        return drawn / math.sqrt(shape[-1])


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (width, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, width),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def random_model(config: ModelConfig, *, device: str, dtype: torch.dtype, draw_on: str | None = None) -> LoadedModel:
    """``draw_on``: where the numbers come from; the same device gives the same model on two devices."""
    weights = RandomWeights(config, device=draw_on or device)
    with torch.inference_mode():
        decoder = build(config, Reader(weights, dtype=dtype, device=torch.device(device)))
    return LoadedModel(
        name="random",
        config=config,
        decoder=decoder,
        tokenizer_json="",
        chat_template="",
        special_tokens={},
        eos_token_ids=(),
        revision="random",
        context_length=config.context_length,
    )
