"""From the name a person gives to a decoder and a tokenizer: a GGUF file, a folder of safetensors, a hub id."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from engine.kernels.arithmetic import Arithmetic
from engine.models import tokenizer, tokenizer_gguf
from engine.models.config import ModelConfig
from engine.models.config_gguf import from_metadata, layout_of
from engine.models.config_json import from_json
from engine.models.decoder import Decoder, build
from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.gguf import MAGIC, GgufFile
from engine.models.revision import digest
from engine.models.tokenizer import TokenizerFiles
from engine.models.weights import GgufWeights, Reader, SafetensorsWeights, Weights

_HUB_ID: Final = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_HUB_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.jinja", "config.json", "generation_config.json")
_HUB_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_INDEX: Final = "model.safetensors.index.json"
_LARGEST_TEXT: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything a worker needs of a model; only ``decoder`` holds memory of a device."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer_json: str
    chat_template: str  # Jinja, empty where the model has none
    special_tokens: dict[str, str]  # bos_token, eos_token … as the template names them
    eos_token_ids: tuple[int, ...]
    revision: str  # see engine.models.revision
    context_length: int
    arithmetic: Arithmetic = Arithmetic.AUTO  # of the linears


def load_from(
    source: str, *, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic = Arithmetic.AUTO
) -> LoadedModel:
    path = Path(source).expanduser()
    try:
        if path.is_file():
            return _load_gguf(path, device=device, dtype=dtype, arithmetic=arithmetic)
        if path.is_dir():
            return _load_folder(path, name=path.resolve().name, device=device, dtype=dtype, arithmetic=arithmetic)
        if _HUB_ID.fullmatch(source):
            return _load_folder(_download(source), name=source, device=device, dtype=dtype, arithmetic=arithmetic)
    except ModelError as error:
        raise ModelError(f"model {source}: {error}") from None
    except OSError as error:
        raise ModelError(f"model {source}: {error.strerror or error}") from None
    raise ModelError(f"model {source}: there is no such file or folder, and it is no hub id like owner/name")


def _load_gguf(path: Path, *, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic) -> LoadedModel:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError("this is not a GGUF file; other single files are not supported, and pickles never will be")
    with GgufFile(path) as gguf:
        fields = Fields(gguf.metadata, where="metadata")
        shape = _gguf_config(gguf, fields)
        files = tokenizer_gguf.from_gguf(fields)
        weights = GgufWeights(gguf, layout_of(fields, shape))
        decoder = _decoder(shape, weights, device=device, dtype=dtype, arithmetic=arithmetic)
    return _loaded(path.stem, shape, decoder, files, revision=digest(small={}, weights=[path]))


def _gguf_config(gguf: GgufFile, fields: Fields) -> ModelConfig:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("tensor token_embd.weight is missing or is no matrix")
    return from_metadata(fields, vocab_size=embedding.shape[0], tensors=gguf.tensors.keys())


def _load_folder(
    folder: Path, *, name: str, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic
) -> LoadedModel:
    small = {
        file.name: _text(file)
        for file in sorted(folder.iterdir())
        if file.suffix in (".json", ".jinja") and file.is_file()
    }
    config = _json(small, "config.json", needed=True)
    shape = from_json(config)
    files = tokenizer.from_folder(
        _needed(small, "tokenizer.json"),
        settings=_json(small, "tokenizer_config.json"),
        generation=_json(small, "generation_config.json"),
        config=config,
        template=small.get("chat_template.jinja"),
    )
    weights = SafetensorsWeights(folder, _json(small, _INDEX) if _INDEX in small else None)
    decoder = _decoder(shape, weights, device=device, dtype=dtype, arithmetic=arithmetic)
    return _loaded(name, shape, decoder, files, revision=digest(small=small, weights=weights.paths))


def _decoder(
    shape: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic
) -> Decoder:
    with torch.inference_mode():
        return build(shape, Reader(weights, dtype=dtype, device=device, arithmetic=arithmetic))


def _loaded(name: str, shape: ModelConfig, decoder: Decoder, files: TokenizerFiles, *, revision: str) -> LoadedModel:
    for number in files.eos_token_ids:
        if not 0 <= number < shape.vocab_size:
            raise ModelError(f"end-of-sequence token {number} lies outside the vocabulary of {shape.vocab_size}")
    return LoadedModel(
        name=name,
        config=shape,
        decoder=decoder,
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
        eos_token_ids=files.eos_token_ids,
        revision=revision,
        context_length=shape.context_length,
    )


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_TEXT:
        raise ModelError(f"{path.name} is larger than {_LARGEST_TEXT >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path.name} is not UTF-8") from None


def _needed(small: dict[str, str], name: str) -> str:
    if name not in small:
        raise ModelError(f"the folder lacks {name}")
    return small[name]


def _json(small: dict[str, str], name: str, *, needed: bool = False) -> Fields:
    text = _needed(small, name) if needed else small.get(name, "{}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{name} is not JSON") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object")
    return Fields(value, where=name)


def _download(hub_id: str) -> Path:
    """Fetch what a model consists of (never code, never pickles) into the cache of huggingface_hub."""
    import huggingface_hub  # noqa: PLC0415 -- a second to import, and only hub ids need it
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415 -- as above

    try:
        folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=[*_HUB_FILES, *_HUB_TOKENIZER_FILES])
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"it is no file or folder here, and the hub did not give it: {reason[:200]}") from None
    return Path(folder)
