"""Models for the computing half: the real one from GGUF and as a folder, and small ones with random weights."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import pytest
import torch

from engine.models import LoadedModel, load


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    return load(str(smollm2_gguf), device="cpu")


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2_gguf: Path):
    """`transformers`' own reading of the same file: (model, tokenizer)."""
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        # It parses the whole file three times and makes one table of names hundreds of times: 40 seconds, else 15.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return _read_by_transformers(transformers, smollm2_gguf)


def _read_by_transformers(transformers, smollm2_gguf: Path):
    place = {"pretrained_model_name_or_path": smollm2_gguf.parent, "gguf_file": smollm2_gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(**place)


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
