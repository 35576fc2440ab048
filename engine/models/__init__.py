"""Models: from files that strangers wrote to a decoder and a tokenizer.

errors — ModelError: what is wrong with a model, in a sentence
fields — typed look-ups in metadata
config — the shape of a decoder: what each layer has
config_json — that shape from Hugging Face's config.json
config_gguf — that shape from GGUF metadata
ggml — GGML's number formats back to float32
gguf — reader of GGUF files
weights — tensors by name from GGUF or safetensors, each taken once
tokenizer — tokenizer.json, chat template, special tokens
tokenizer_gguf — a tokenizer.json from GGUF's vocabulary and merges
decoder — embeddings → layers → logits
revision — a digest that names a model's exact files
source — file, folder or hub id → LoadedModel
"""

from __future__ import annotations

import torch

from engine.kernels.device import default_dtype, resolve
from engine.models.errors import ModelError
from engine.models.source import LoadedModel, load_from

__all__ = ["LoadedModel", "ModelError", "load"]


def load(source: str, *, device: str = "auto", dtype: torch.dtype | None = None) -> LoadedModel:
    """Load a model onto a device.

    ``source``: path of a .gguf file or of a folder with config.json, tokenizer.json and safetensors, or a hub id.
    ``dtype``: None is the device's default, float32 on the CPU and bfloat16 on CUDA.
    Raises ModelError when the model is not usable and DeviceError when the device is not there.
    """
    place = resolve(device)
    return load_from(source, device=place, dtype=dtype or default_dtype(place))
