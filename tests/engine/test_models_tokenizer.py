"""A tokenizer made from GGUF gives the ids that `transformers` gives."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer

from engine.models import ModelError, load
from engine.models.fields import Fields
from engine.models.tokenizer_gguf import from_gguf
from tests.engine import tiny

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "It's they've we'll I'd you're 'S 'T",
    "tabs\tand\r\nlines\n\n\nand  more   spaces    here",
    "1 12 123 1234567890 3.14159 1e-9 0x7f ½ ² ٣٤ 一二三 Ⅳ",
    "v1.2.3-rc4+build567 at 12:34:56 on 2026-11-30",
    "def f(x):\n    return x**2 + 10  # comment\n\n\tif x == 100:\n        pass\n",
    '{"a": [1, 22, 333], "b": null, "url": "https://example.com/x?y=1&z=%20"}',
    "SELECT * FROM t WHERE id IN (1,2,3) AND name LIKE '%x%';",
    "naïve café Ångström ÅÄÖ ẞß",
    "Größe und Maß, «guillemets» „quotes“ — dash…",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया ไทย",
    "🐘🇩🇪👩‍👩‍👧‍👦 emoji\u200d and \ufe0f selectors",
    "combining e\u0301 a\u0308 \u1e69 \u0000 \ufffd \U0010ffff",
    "\u00a0non\u2003breaking\u3000spaces\u2028line",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more<|im_end|><|im_end|> <file_sep> <repo_name>",
    "<|im_start |> < |im_end|> <|im_star",
    "a" * 300 + "é" * 50 + "?!" * 40,
    "CamelCaseIdentifier snake_case_name kebab-case-name UPPER",
    "\n1. first\n2. second\n   10. tenth\n\n11. eleventh  42",
]
SPLIT_MATTERS = re.compile(r"\s\s+\d|\s[½²٣Ⅳ]")  # digits after several spaces; digits of more than one byte


@pytest.fixture(scope="module")
def ours(smollm2):
    return tokenizers.Tokenizer.from_str(smollm2.tokenizer_json)


@pytest.fixture(scope="module")
def theirs(transformers_smollm2):
    return transformers_smollm2[1]


@pytest.mark.parametrize("text", [text for text in TEXTS if not SPLIT_MATTERS.search(text)])
def test_ids_are_those_of_transformers(ours, theirs, text):
    assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers_once_it_splits_digits_as_the_model_was_trained(ours, theirs, text):
    """The file names its pre-tokenizer, smollm: digits one by one, then GPT-2's split. `transformers` knows only the
    latter.
    """
    trained = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours.encode(text).ids == trained.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(ours, text):
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_decoding_may_leave_control_tokens_out(ours):
    ids = ours.encode("<|im_start|>user\nHi<|im_end|>").ids
    assert ours.decode(ids, skip_special_tokens=True) == "user\nHi"


def test_template_and_special_tokens_are_those_of_transformers(smollm2, theirs):
    assert smollm2.chat_template == theirs.chat_template
    assert smollm2.special_tokens == theirs.special_tokens_map
    assert smollm2.eos_token_ids == (theirs.eos_token_id,)


def test_the_beginning_of_text_token_stands_in_front_where_the_file_asks_for_it(tmp_path):
    plain = load(str(tiny.write_gguf(tmp_path / "plain.gguf")), device="cpu")
    asked = load(str(tiny.write_gguf(tmp_path / "bos.gguf", change=lambda w: w.add_add_bos_token(True))), device="cpu")
    without, with_bos = (
        tokenizers.Tokenizer.from_str(m.tokenizer_json).encode("hello hello").ids for m in (plain, asked)
    )
    assert with_bos == [1, *without]


def test_llama3_splits_digits_by_three_and_keeps_whole_tokens_whole(tmp_path):
    def change(writer):
        tiny.overwrite(writer, "tokenizer.ggml.pre", "llama-bpe", gguf.GGUFValueType.STRING)
        words = [*tiny.vocabulary(), "Ġwhole", "123", "12", "1234"]
        tiny.overwrite(writer, "tokenizer.ggml.tokens", words, gguf.GGUFValueType.ARRAY)
        tiny.overwrite(writer, "tokenizer.ggml.token_type", [3, 3] + [1] * (len(words) - 2), gguf.GGUFValueType.ARRAY)

    weights = tiny.tensors()
    weights["token_embd.weight"] = weights["token_embd.weight"].repeat(2, axis=0)[: len(tiny.vocabulary()) + 4]
    model = load(str(tiny.write_gguf(tmp_path / "m.gguf", change=change, weights=weights)), device="cpu")
    tokenizer = tokenizers.Tokenizer.from_str(model.tokenizer_json)
    assert tokenizer.encode(" whole 12345").tokens[:1] == ["Ġwhole"]
    assert "123" in tokenizer.encode("12345").tokens
    assert "1234" not in tokenizer.encode("1234").tokens


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "qwen2", "tekken"])
def test_each_split_of_gguf_cuts_as_transformers_cuts(pre):
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tiny.vocabulary(),
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tiny.vocabulary()) - 2),
        "tokenizer.ggml.merges": tiny.MERGES,
    }
    ours, theirs = made(from_gguf(Fields(metadata, where="metadata"))), transformers_tokenizer(metadata)
    for text in TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        if "<|endoftext|>" not in text:  # which it adds to any vocabulary
            assert ours.encode(text).ids == theirs.encode(text).ids


SYLLABLES = [a + b for a in "bcdfgklmnprst" for b in "aeiou"]
PIECES = ["▁", "▁▁", *"abcdefghiklmnoprstuwy", *SYLLABLES, *[f"▁{s}" for s in SYLLABLES[::3]], "ing", "▁a", "ha", "▁ha"]


def pieces(*, gemma):
    """Metadata of a small SentencePiece vocabulary, in the manner of Llama 2 or of Gemma."""
    random = np.random.default_rng(4)
    words = list(dict.fromkeys(PIECES + [a + b for a, b in zip(SYLLABLES, SYLLABLES[7:], strict=False)]))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", "<s>", "</s>", "<turn>", "[table]"]
    spelled = [word.replace("▁", " ") if gemma and set(word) == {"▁"} and len(word) > 1 else word for word in words]
    scores = [-1000.0] * 5 + [0.0] * 256 + (-random.permutation(len(words))).astype(float).tolist()
    metadata = {
        "general.architecture": "gemma3" if gemma else "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": first + bytes_ + spelled,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 4] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | ({"tokenizer.ggml.add_space_prefix": False} if gemma else {})


PIECE_TEXTS = [*TEXTS, "banana  tomato<turn>rinsing", "<s>ba</s> ha", "[table]  a [table]", "▁ba", " lemuna" * 9]


@pytest.mark.parametrize("gemma", [False, True], ids=["llama 2", "gemma"])
def test_pieces_of_sentencepiece_give_the_ids_and_texts_that_transformers_gives(gemma):
    metadata = pieces(gemma=gemma)
    ours, theirs = made(from_gguf(Fields(metadata, where="metadata"))), transformers_tokenizer(metadata)
    for text in PIECE_TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == [1, *ids]  # such files ask for the beginning unless they say otherwise
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert len(theirs.encode("banana", add_special_tokens=False).ids) < 6


def test_a_vocabulary_of_pieces_that_is_not_whole_is_refused():
    for change, said in (
        ({"tokenizer.ggml.scores": [0.5]}, "but 1 scores"),
        ({"tokenizer.ggml.scores": ["a"] * 9}, "list of numbers"),
        ({"tokenizer.ggml.scores": [float("nan")] * 9}, "list of numbers"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "1000000"),
    ):
        with pytest.raises(ModelError, match=said):
            from_gguf(Fields(pieces(gemma=False) | change, where="metadata"))


def made(files):
    return tokenizers.Tokenizer.from_str(files.tokenizer_json)


def transformers_tokenizer(metadata):
    """`transformers`' own reading of the same metadata."""
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    theirs = {
        names.get(key.removeprefix("tokenizer.ggml."), key.removeprefix("tokenizer.ggml.")): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    return convert_gguf_tokenizer(metadata["general.architecture"], theirs)[0]


def test_tokenizer_json_of_a_folder_is_taken_as_it_is(tmp_path):
    folder = tiny.write_folder(tmp_path)
    model = load(str(folder), device="cpu")
    assert json.loads(model.tokenizer_json) == json.loads((folder / "tokenizer.json").read_text())
    assert model.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert model.chat_template == "{{ messages }}"
