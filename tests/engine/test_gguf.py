"""Reading GGUF: equal to the `gguf` package where a file is good, a sentence where it is not."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from engine.models import ModelError, load
from engine.models.ggml import GgmlType, dequantise, format_of
from engine.models.gguf import GgufFile
from tests.engine import tiny

FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
HALVES = {  # where the blocks of a type hold float16 numbers: random bytes there could be infinite
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}


def random_blocks(kind, count):
    layout = format_of(kind, tensor="t")
    random = np.random.default_rng(int(kind))
    if kind in FLOATS:
        values = random.standard_normal((count, layout.elements)).astype(np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType(int(kind))).view(np.uint8).reshape(count, layout.bytes)
    blocks = random.integers(0, 256, (count, layout.bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = random.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", GgmlType, ids=lambda kind: kind.name)
def test_every_type_comes_back_as_gguf_has_it_to_the_last_bit(kind):
    blocks = random_blocks(kind, 21)
    layout = format_of(kind, tensor="t")
    shape = (3, 7 * layout.elements)
    rows = blocks.reshape(3, 7 * layout.bytes)
    if kind in (GgmlType.F32, GgmlType.F16):
        rows = rows.view({GgmlType.F32: np.float32, GgmlType.F16: np.float16}[kind])
    wanted = dequantize(rows, gguf.GGMLQuantizationType(int(kind)))
    found = dequantise(torch.from_numpy(blocks.reshape(-1)), kind, shape=shape, tensor="t")
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_the_tensors_of_smollm2_are_what_gguf_reads(smollm2_gguf):
    kinds = set()
    with GgufFile(smollm2_gguf) as ours:
        theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
        assert ours.tensors.keys() == theirs.keys()
        for name in (name for name in theirs if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.29."))):
            tensor = theirs[name]
            kinds.add(tensor.tensor_type.name)
            np.testing.assert_array_equal(ours.tensor(name).numpy(), dequantize(tensor.data, tensor.tensor_type))
    assert kinds == {"Q4_1", "Q8_0", "F32"}


def test_metadata_of_every_type_is_what_was_written(tmp_path):
    def change(writer):
        for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            getattr(writer, f"add_{kind}")(f"x.{kind}", 77)
        writer.add_float32("x.float32", 0.5)
        writer.add_float64("x.float64", 0.25)
        writer.add_bool("x.yes", True)
        writer.add_string("x.text", "größer 🐘")
        writer.add_array("x.numbers", [1, 2, 3])
        writer.add_array("x.texts", ["a", "", "ü"])

    with GgufFile(tiny.write_gguf(tmp_path / "m.gguf", change=change)) as file:
        found = {key[2:]: value for key, value in file.metadata.items() if key.startswith("x.")}
    integers = dict.fromkeys(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"), 77)
    assert found == integers | {
        "float32": 0.5,
        "float64": 0.25,
        "yes": True,
        "text": "größer 🐘",
        "numbers": [1, 2, 3],
        "texts": ["a", "", "ü"],
    }


def test_a_file_cut_at_any_length_is_an_error(tmp_path):
    whole = tiny.write_gguf(tmp_path / "m.gguf").read_bytes()
    load(str(tmp_path / "m.gguf"), device="cpu")
    with GgufFile(tmp_path / "m.gguf") as file:
        last = max(tensor.offset + tensor.bytes for tensor in file.tensors.values())
        start = min(tensor.offset for tensor in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, start, 7), *range(start, last, 1999), last - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            load(str(cut), device="cpu")


def test_a_byte_changed_anywhere_in_the_head_is_an_error_or_harmless(tmp_path):
    """No other exception, no crash, no gigabyte: whatever a header says, it is held against the file."""
    whole = tiny.write_gguf(tmp_path / "m.gguf").read_bytes()
    with GgufFile(tmp_path / "m.gguf") as file:
        start = min(tensor.offset for tensor in file.tensors.values())
    changed = tmp_path / "changed.gguf"
    random = np.random.default_rng(5)
    refused = 0
    for at in random.choice(start, 300, replace=False):
        data = bytearray(whole)
        data[at] = random.choice([0, 1, 127, 128, 255, data[at] ^ 1 << random.integers(8)])
        changed.write_bytes(data)
        try:
            load(str(changed), device="cpu")
        except ModelError:
            refused += 1
    assert refused > 50


def header(tensors=0, pairs=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def pair(key, kind, value):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def described(name=b"t", dims=(32,), kind=0, offset=0):
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


HUGE = struct.pack("<Q", 2**62)
HOSTILE = {
    "nothing at all": (b"", "not a GGUF file"),
    "another kind of file": (b"PK\x03\x04" + b"\0" * 64, "not a GGUF file"),
    "an old version": (header(version=1) + b"\0" * 64, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "more tensors than bytes": (header(tensors=2**60), "more than the file can hold"),
    "more pairs than bytes": (header(pairs=2**60), "more than the file can hold"),
    "a key without end": (header(pairs=1) + HUGE + b"\0" * 64, "cut short"),
    "a key that is not text": (header(pairs=1) + pair(b"\xff\xfe", 4, b"\0" * 64), "UTF-8"),
    "a text without end": (header(pairs=1) + pair(b"k", 8, HUGE), "cut short"),
    "an array without end": (header(pairs=1) + pair(b"k", 9, struct.pack("<I", 4) + HUGE), "cut short"),
    "an array of endless texts": (header(pairs=1) + pair(b"k", 9, struct.pack("<I", 8) + HUGE), "more than the file"),
    "arrays in arrays": (header(pairs=1) + pair(b"k", 9, struct.pack("<IQ", 9, 1) + b"\0" * 64), "type 9"),
    "an unknown type": (header(pairs=1) + pair(b"k", 99, b"\0" * 64), "unknown type 99"),
    "a key twice": (header(pairs=2) + pair(b"k", 4, b"\0" * 4) * 2, "twice"),
    "ten dimensions": (header(tensors=1) + described(dims=(1,) * 10), "10 dimensions"),
    "an endless tensor": (header(tensors=1) + described(dims=(2**60, 2**60)) + b"\0" * 64, "beyond its end"),
    "a tensor past the end": (header(tensors=1) + described(offset=2**60) + b"\0" * 512, "beyond its end"),
    "a tensor of an unknown type": (header(tensors=1) + described(kind=77) + b"\0" * 512, "GGML type 77"),
    "a torn block": (header(tensors=1) + described(dims=(33,), kind=2) + b"\0" * 512, "not a multiple of 32"),
    "a tensor twice": (header(tensors=2) + described() * 2 + b"\0" * 512, "twice"),
    "an alignment of nothing": (
        header(tensors=1, pairs=1) + pair(b"general.alignment", 4, b"\0" * 4) + described() + b"\0" * 512,
        "alignment",
    ),
}


@pytest.mark.parametrize(("data", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_with_what_is_wrong(tmp_path, data, said):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as caught:
        load(str(path), device="cpu")
    assert str(path) in str(caught.value)


def setting(key, value, kind=gguf.GGUFValueType.UINT32):
    return lambda writer: tiny.overwrite(writer, key, value, kind)


TEXT, ARRAY, FLOAT = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32
WRONG = {
    "experts": (setting("llama.expert_count", 8), "mixture-of-experts"),
    "yarn": (setting("llama.rope.scaling.type", "yarn", TEXT), "yarn"),
    "part of a head": (setting("llama.rope.dimension_count", 4), "part of each head"),
    "uneven heads": (setting("llama.attention.head_count_kv", 3), "evenly"),
    "no heads": (setting("llama.attention.head_count", 0), "head_count is 0"),
    "a head count that is a text": (setting("llama.attention.head_count", "4", TEXT), "whole number"),
    "more layers than tensors": (setting("llama.block_count", 3), "layers.2.input_layernorm.weight is missing"),
    "fewer layers than tensors": (setting("llama.block_count", 1), "9 tensors this architecture has no use for"),
    "another width": (setting("llama.feed_forward_length", 128), r"\[64, 32\]; the configuration asks for \[128, 32\]"),
    "not a number": (setting("llama.rope.freq_base", float("nan"), FLOAT), "positive number"),
    "unigram": (setting("tokenizer.ggml.model", "t5", TEXT), "tokenizer 't5' of GGUF is not supported"),
    "pieces without scores": (setting("tokenizer.ggml.model", "llama", TEXT), "lacks tokenizer.ggml.scores"),
    "an unknown split": (setting("tokenizer.ggml.pre", "klingon", TEXT), "klingon"),
    "a token outside": (setting("tokenizer.ggml.eos_token_id", 5000), "5000"),
    "tokens twice": (setting("tokenizer.ggml.tokens", ["a"] * 300, ARRAY), "same token twice|token types"),
    "a merge of one": (setting("tokenizer.ggml.merges", ["hello"], ARRAY), "two tokens"),
    "a merge of strangers": (setting("tokenizer.ggml.merges", ["qq zz"], ARRAY), "tokenizer is not usable"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_model_that_contradicts_itself_is_refused_with_what_is_wrong(tmp_path, change, said):
    path = tiny.write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(ModelError, match=said):
        load(str(path), device="cpu")


def test_another_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        load(str(tiny.write_gguf(tmp_path / "m.gguf", architecture="mamba")), device="cpu")
