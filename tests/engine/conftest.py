"""Models for the computing half: the real one from GGUF and as a folder, and small ones with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import LoadedModel, load


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    return load(str(smollm2_gguf), device="cpu")


@pytest.fixture(scope="session")
def smollm2_folder(transformers_smollm2, tmp_path_factory) -> Path:
    """The same weights as a Hugging Face folder of safetensors, in shards."""
    model, tokenizer = transformers_smollm2
    folder = tmp_path_factory.mktemp("smollm2")
    model.is_quantized = False
    for leftover in ("hf_quantizer", "quantization_method"):
        vars(model).pop(leftover, None)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder, max_shard_size="200MB")
    tokenizer.save_pretrained(folder)
    return folder
