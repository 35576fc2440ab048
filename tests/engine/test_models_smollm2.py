"""SmolLM2 with its real weights, from GGUF and from a folder, against `transformers`."""

from __future__ import annotations

import pytest
import tokenizers
import torch

from engine.models import load
from engine.plan import StepPlan
from engine.runner import Feed, TorchRunner
from tests.engine.driver import Driver

QUESTIONS = [
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Count from 1 to 20.",
    "Here is a list of words. " + " ".join(f"word{n}" for n in range(60)) + " Which is the longest?",
]
TOLERANCE = 2e-3  # logits reach 30; float32 products summed in another order


@pytest.fixture(scope="module", params=["gguf", "folder"])
def model(request, smollm2):
    if request.param == "gguf":
        return smollm2
    return load(str(request.getfixturevalue("smollm2_folder")), device="cpu")


@pytest.fixture
def runner(model):
    return TorchRunner(model, device="cpu", num_blocks=80, block_size=16)


def ids_of(model, question):
    tokenizer = tokenizers.Tokenizer.from_str(model.tokenizer_json)
    return tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids


def test_greedy_tokens_are_those_of_transformers_in_any_mix(model, runner, transformers_smollm2):
    """Checked by one forward of `transformers` over each finished sequence: every token is its most likely next."""
    driver = Driver(runner)
    texts = [driver.text(ids_of(model, question)) for question in QUESTIONS]
    arrivals = {0: texts[:1], 5: texts[1:3], 9: texts[3:]}
    running, mixed = [], 0
    for step in range(80):
        running += arrivals.get(step, [])
        rows = {text: min(text.missing, 24) for text in running if len(text.completion) < 40}
        mixed += 1 in rows.values() and max(rows.values()) > 1
        if rows:
            driver.step(rows)
    assert [len(text.completion) for text in texts] == [40] * 4
    assert mixed >= 4  # steps that held chunks of prompts beside single rows
    assert min(len(text.blocks) for text in texts) >= 4
    for text in texts:
        with torch.inference_mode():
            theirs = transformers_smollm2[0](torch.tensor([text.known[:-1]])).logits[0, text.given - 1 :]
        assert text.completion == theirs.argmax(-1).tolist()


def test_logits_are_those_of_transformers(model, runner, transformers_smollm2):
    driver = Driver(runner)
    text = driver.text(ids_of(model, QUESTIONS[3]))
    driver.step({text: 50})
    feed = Feed.of(StepPlan(number=0, chunks=[driver.chunk(text, text.missing)]))
    with torch.inference_mode():
        attend = runner._attention.prepare(feed.spans)
        arrays = [torch.from_numpy(array) for array in (feed.tokens, feed.positions)]
        rows = torch.arange(len(feed.tokens))
        ours = runner._decoder.forward(*arrays, attend, rows)
        theirs = transformers_smollm2[0](torch.tensor([text.known])).logits[0, 50:]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
