"""Weights by name, from wherever they lie: the names are Hugging Face's, the order of a head's dimensions is stated."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import safetensors
import torch
from torch import Tensor

from engine.kernels.arithmetic import Arithmetic
from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.gguf import GgufFile

ROPE_FACTORS: Final = "rope_factors"  # divide the rotary frequencies; only GGUF files carry them

_GGUF_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GGUF_OTHER: Final = re.compile(r"(\w+)\.(weight|bias)")
_TEXT_HALF: Final = re.compile(r"(model\.)?language_model\.(model\.)?")
_DTYPES: Final = {"F32", "F16", "BF16"}


class _Slice(Protocol):
    """What safetensors tells of a tensor without reading it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class Weights(Protocol):
    """Named tensors of one model."""

    paired_heads: (
        bool  # a rotated pair is dimensions (2i, 2i + 1) of a head; else (i, i + half), as Hugging Face has it
    )

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """Float32, float16 or bfloat16, on the CPU."""
        ...

    def groups(self, name: str) -> Tensor | None:
        """As engine.kernels.int4 has them, if that is what the tensor is stored as."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLayout:
    """In what a GGUF file of an architecture differs from Hugging Face's weights, other than in names."""

    paired_heads: bool
    sandwich_norms: bool  # then the norm before the MLP is not the one after attention
    norm_offset: float  # the file has already added it to its norms


class GgufWeights:
    """Tensors of a GGUF file, under Hugging Face's names and with its values."""

    def __init__(self, file: GgufFile, layout: GgufLayout) -> None:
        self.paired_heads = layout.paired_heads
        self._file = file
        self._norm_offset = layout.norm_offset
        self._theirs = {_hugging_face_name(name, layout): name for name in file.tensors}

    @property
    def names(self) -> Collection[str]:
        return self._theirs.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._theirs[name]].shape

    def read(self, name: str) -> Tensor:
        tensor = self._file.tensor(self._theirs[name])
        return tensor - self._norm_offset if self._norm_offset and name.endswith("norm.weight") else tensor

    def groups(self, name: str) -> Tensor | None:
        return self._file.groups(self._theirs[name])


def _hugging_face_name(name: str, layout: GgufLayout) -> str:
    """A name without counterpart stays what it is, and is complained about when nothing uses it."""
    if name == "rope_freqs.weight":
        return ROPE_FACTORS
    if (layer := _GGUF_LAYER.fullmatch(name)) and layer[2] in _GGUF_NAMES:
        theirs = "pre_feedforward_layernorm" if layout.sandwich_norms and layer[2] == "ffn_norm" else None
        return f"model.layers.{int(layer[1])}.{theirs or _GGUF_NAMES[layer[2]]}.{layer[3]}"
    if (other := _GGUF_OTHER.fullmatch(name)) and other[1] in _GGUF_NAMES:
        return f"{_GGUF_NAMES[other[1]]}.{other[2]}"
    return name


class SafetensorsWeights:
    """Tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    paired_heads = False

    def __init__(self, folder: Path, index: Fields | None) -> None:
        self._files = {file: _open(folder / file) for file in _shards(index)}
        self._where = {
            _of_text(name): (file, name)
            for file, handle in self._files.items()
            for name in handle.keys()  # noqa: SIM118 -- a handle is no mapping
        }
        self._check_index(index)
        self.paths = [folder / file for file in self._files]

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        kind = self._slice(name).get_dtype()
        if kind not in _DTYPES:
            raise ModelError(f"tensor {name} is stored as {kind}; supported: {', '.join(sorted(_DTYPES))}")
        file, stored = self._where[name]
        tensor: Tensor = self._files[file].get_tensor(stored)
        return tensor

    def groups(self, name: str) -> None:
        """Nothing is stored so."""

    def _slice(self, name: str) -> _Slice:
        file, stored = self._where[name]
        description: _Slice = self._files[file].get_slice(stored)
        return description

    def _check_index(self, index: Fields | None) -> None:
        for name, _ in index.within("weight_map").items() if index else ():
            if _of_text(name) not in self._where:
                raise ModelError(f"the index names tensor {name[:80]}, which is in none of its files")


def _of_text(name: str) -> str:
    """Models that also see keep the half that reads under a name of its own."""
    if not _TEXT_HALF.match(name):
        return name
    rest = _TEXT_HALF.sub("", name)
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _shards(index: Fields | None) -> list[str]:
    """File names, each within the folder: an index is data from strangers."""
    if index is None:
        return ["model.safetensors"]
    files = {file for _, file in index.within("weight_map").items()}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError("model.safetensors.index.json names a file that is not a .safetensors in its own folder")
    return sorted(str(file) for file in files)


def _open(path: Path) -> safetensors.safe_open:
    if not path.is_file():
        raise ModelError(f"{path.name} is missing")
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path.name} is not a whole safetensors file: {error}") from None


class Reader:
    """Takes tensors by name, checks their shapes, and knows what nobody took."""

    def __init__(
        self,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic = Arithmetic.AUTO,
    ) -> None:
        self.arithmetic = arithmetic
        self._weights = weights
        self._dtype = dtype
        self.device = device
        self._left = set(weights.names)
        self.paired_heads = weights.paired_heads

    def has(self, name: str) -> bool:
        return name in self._weights.names

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        return self._place(self._read(name, shape), dtype)

    def take_rows(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """Several tensors stacked by rows into one, so that one multiplication does for all.

        For INT4 as four-bit groups (engine.kernels.int4), if all are stored so.
        """
        tensors = [self._read(name, shape) for name, shape in shapes.items()]
        if self.arithmetic is Arithmetic.INT4:
            groups = [group for name in shapes if (group := self._weights.groups(name)) is not None]
            if len(groups) == len(shapes):
                return torch.cat(groups)
        return self._place(torch.cat(tensors), None)

    def forget(self, pattern: str) -> None:
        """Tensors that may be there and aren't needed."""
        self._left = {name for name in self._left if not re.search(pattern, name)}

    def check_nothing_left(self) -> None:
        if self._left:
            example = min(self._left)[:80]
            raise ModelError(
                f"the model holds {len(self._left)} tensors this architecture has no use for, such as {example}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self.has(name):
            raise ModelError(f"tensor {name} is missing")
        found = self._weights.shape(name)
        if found != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}; the configuration asks for {list(shape)}")
        self._left.discard(name)
        return self._weights.read(name)

    def _place(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        return tensor.to(device=self.device, dtype=dtype or self._dtype).contiguous()
