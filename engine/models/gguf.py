"""Reader of GGUF files, versions 2 and 3, little-endian: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

A file is data from strangers. Every count is held against the bytes that are left before anything is made of it,
tensors are read (not mapped, so that a file cut short while it is read is an error and not a signal), and nothing in it
is executed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final, Self, TypeAlias

import numpy as np
import torch

from engine.models.errors import ModelError
from engine.models.ggml import dequantise, format_of, four_bit_groups

MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMENSIONS: Final = 4
_SMALLEST_PAIR: Final = 13  # length of the key, type and one byte of value
_SMALLEST_TENSOR: Final = 24  # length of the name, dimensions, type and offset

Value: TypeAlias = int | float | bool | str | list[int] | list[float] | list[str]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in torch's order: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    bytes: int


class GgufFile:
    """Metadata and tensors of an open file. Raises ModelError wherever the file is not what it says."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            cursor = _Cursor(self._file, path.stat().st_size)
            tensor_count, pair_count = _read_header(cursor)
            self.metadata = _read_pairs(cursor, pair_count)
            self.tensors = _read_tensors(cursor, tensor_count, self.metadata)
            self.data_start = cursor.at
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as float32."""
        info = self.tensors[name]
        return dequantise(self._data(info), info.kind, shape=info.shape, tensor=name)

    def groups(self, name: str) -> torch.Tensor | None:
        """A matrix as four-bit groups (engine.kernels.int4), if its type can be told so."""
        info = self.tensors[name]
        return four_bit_groups(self._data(info), info.kind, shape=info.shape)

    def _data(self, info: GgufTensor) -> torch.Tensor:
        data = torch.empty(info.bytes, dtype=torch.uint8)
        self._file.seek(info.offset)
        if self._file.readinto(data.numpy().data) != info.bytes:
            raise ModelError(f"the file ends within tensor {info.name}")
        return data


class _Cursor:
    """Reads forward and never past the end."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self._file = file
        self._size = size
        self.at = 0

    @property
    def left(self) -> int:
        return self._size - self.at

    def take(self, count: int, what: str) -> bytes:
        data = self._file.read(count) if count <= self.left else b""
        if len(data) != count:
            raise ModelError(f"the file is cut short: it ends within {what}")
        self.at += count
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str) -> str:
        try:
            return self.take(self.u64(what), what).decode()
        except UnicodeDecodeError:
            raise ModelError(f"{what} is not UTF-8") from None

    def numbers(self, kind: int, count: int, what: str) -> list[int] | list[float]:
        dtype = np.dtype(_NUMBERS[kind])
        values: list[int] | list[float] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
        return values


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata pairs)."""
    if cursor.take(4, "its first four bytes") != MAGIC:
        raise ModelError("this is not a GGUF file: it does not begin with GGUF")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = struct.unpack(">I", struct.pack("<I", version))[0]
        hint = " (a big-endian file)" if swapped in (2, 3) else ""
        raise ModelError(f"GGUF version {version}{hint} is not supported; 2 and 3 are")
    tensor_count, pair_count = cursor.u64("the number of tensors"), cursor.u64("the number of metadata pairs")
    if tensor_count * _SMALLEST_TENSOR + pair_count * _SMALLEST_PAIR > cursor.left:
        raise ModelError(
            f"the header promises {tensor_count} tensors and {pair_count} pairs, more than the file can hold"
        )
    return tensor_count, pair_count


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Value]:
    pairs: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in pairs:
            raise ModelError(f"metadata key {key[:80]!r} stands twice")
        pairs[key] = _read_value(cursor, f"metadata {key[:80]!r}")
    return pairs


def _read_value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind in _NUMBERS:
        return cursor.numbers(kind, 1, what)[0]
    raise ModelError(f"{what} has unknown type {kind}")


def _read_array(cursor: _Cursor, what: str) -> list[int] | list[float] | list[str]:
    kind, count = cursor.u32(what), cursor.u64(what)
    if kind == _STRING:
        if count * 8 > cursor.left:
            raise ModelError(f"{what} promises {count} texts, more than the file can hold")
        return [cursor.string(what) for _ in range(count)]
    if kind in _NUMBERS:
        return cursor.numbers(kind, count, what)
    raise ModelError(f"{what} is an array of unsupported type {kind}")


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Value]) -> dict[str, GgufTensor]:
    infos = [_read_tensor_info(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError("metadata general.alignment is not a positive whole number")
    start = cursor.at + -cursor.at % alignment
    size = cursor.at + cursor.left
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelError(f"tensor {name[:80]} stands twice")
        tensor = _place(name, shape, kind, start + offset)
        if tensor.offset + tensor.bytes > size:
            raise ModelError(f"the file is cut short: tensor {name[:80]} lies beyond its end")
        tensors[name] = tensor
    return tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, GGML type, offset from the start of the data)."""
    name = cursor.string("the name of a tensor")
    what = f"the description of tensor {name[:80]}"
    dimensions = cursor.u32(what)
    if dimensions > _MAX_DIMENSIONS:
        raise ModelError(f"tensor {name[:80]} has {dimensions} dimensions; at most {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))
    return name, shape[::-1], cursor.u32(what), cursor.u64(what)


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    layout = format_of(kind, tensor=name[:80])
    row = shape[-1] if shape else 1
    if row % layout.elements:
        raise ModelError(f"rows of tensor {name[:80]} hold {row} weights, not a multiple of {layout.elements}")
    elements = 1
    for size in shape:
        elements *= size
    return GgufTensor(name, shape, kind, offset, elements // layout.elements * layout.bytes)
