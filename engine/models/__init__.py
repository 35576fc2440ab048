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

import dataclasses
from typing import Final

import torch

from engine.kernels import int8
from engine.kernels.arithmetic import Arithmetic
from engine.kernels.device import DeviceError, default_dtype, resolve
from engine.models.errors import ModelError
from engine.models.source import LoadedModel, load_from

__all__ = ["LoadedModel", "ModelError", "load"]


_ON_A_GPU: Final = {Arithmetic.FP32: torch.float32, Arithmetic.FP16: torch.float16}


def load(
    source: str, *, device: str = "auto", dtype: torch.dtype | None = None, arithmetic: Arithmetic = Arithmetic.AUTO
) -> LoadedModel:
    """Load a model onto a device.

    ``source``: path of a .gguf file or of a folder with config.json, tokenizer.json and safetensors, or a hub id.
    ``dtype``: None is the device's default, float32 on the CPU and bfloat16 on CUDA.
    ``arithmetic``: of the linears; what gives other numbers than the default gives another revision.
    Raises ModelError when the model is not usable, and DeviceError when the device is not there or can't calculate so.
    """
    place = resolve(device)
    usual = dtype or default_dtype(place)
    if arithmetic is Arithmetic.AUTO:
        return load_from(source, device=place, dtype=usual)
    if place.type != "cpu":
        if arithmetic not in _ON_A_GPU:
            raise DeviceError(f"weights in {arithmetic} are for the CPU; on {place.type} use auto, fp16 or fp32")
        usual, in_linears = _ON_A_GPU[arithmetic], Arithmetic.AUTO
    else:
        _check_cpu(arithmetic, usual)
        in_linears = arithmetic
    model = load_from(source, device=place, dtype=usual, arithmetic=in_linears)
    same = usual == default_dtype(place) and in_linears in (Arithmetic.AUTO, Arithmetic.FP32)
    revision = model.revision if same else f"{model.revision}-{arithmetic}"
    return dataclasses.replace(model, revision=revision, arithmetic=arithmetic)


def _check_cpu(arithmetic: Arithmetic, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        raise DeviceError(f"weights in {arithmetic} go with activations in float32, not {dtype}")
    if arithmetic is not Arithmetic.FP32 and not int8.is_there():
        raise DeviceError(f"weights in {arithmetic} need FBGEMM, which torch has on x86-64 only; use auto or fp32")
