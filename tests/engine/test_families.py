"""Every family of decoders against `transformers`: small random weights that it wrote itself, float32."""

from __future__ import annotations

import json
import random

import pytest
import torch

from engine.config import EngineConfig
from engine.kernels.padded import PaddedAttention
from engine.kernels.sparse import SparseAttention
from engine.models import load
from engine.plan import StepPlan
from engine.runner import Feed, TorchRunner
from tests.engine import tiny
from tests.engine.driver import Driver
from tests.engine.test_parity import engine_over
from tests.engine.world import job

TOLERANCE = 1e-4  # of logits up to 1e1; float32 sums in another order
KERNELS = {"sparse": SparseAttention, "padded": PaddedAttention}


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request, tmp_path_factory):
    """(name, transformers' model, folder that it wrote)"""
    theirs = tiny.of_family(request.param, **tiny.FAMILIES[request.param])
    return request.param, theirs, tiny.write_folder(tmp_path_factory.mktemp(request.param), theirs)


def prompts(lengths):
    choice = random.Random(1)
    return [[choice.randrange(2, len(tiny.vocabulary())) for _ in range(length)] for length in lengths]


def logits_of(model, ids):
    """[positions, vocabulary]"""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_greedy_tokens_are_those_of_transformers_through_chunks_preemption_window_and_rope_context(family):
    name, theirs, folder = family
    runner = TorchRunner(load(str(folder), device="cpu"), device="cpu", num_blocks=26, block_size=4, threads=1)
    engine = engine_over(runner, EngineConfig(max_batch=4, step_tokens=8))
    jobs = [job(prompt, 24, temperature=0.0, ignore_eos=True) for prompt in prompts([30, 3, 18, 9])]
    tokens = {each.request_id: [] for each in jobs}
    waiting, reports, plans = list(jobs), [], []
    while waiting or engine.has_work:
        if waiting and len(plans) % 3 == 0:
            engine.add(waiting.pop(0))
        output = engine.step()
        plans += [output.plan] if output.plan else []
        reports += [ended.report for ended in output.ended]
        for event in (event for events in output.events.values() for event in events):
            tokens[event.request_id] += event.ids
        engine.check_integrity()
    for each in jobs:
        found = tokens[each.request_id]
        assert found == logits_of(theirs, [*each.prompt, *found[:-1]])[len(each.prompt) - 1 :].argmax(-1).tolist()
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    assert sum(chunk.request_id == jobs[0].request_id and chunk.end <= 30 for chunk in chunks) >= 3, "no chunks"
    assert any({1} < {len(chunk.tokens) for chunk in plan.chunks} for plan in plans), "no prompts beside others"
    assert sum(report.preemptions for report in reports) >= 1
    assert min(len(each.prompt) for each in jobs) + 23 > tiny.WINDOW
    assert max(chunk.end for chunk in chunks) > 2 * tiny.ORIGINAL_CONTEXT.get(name, 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_are_those_of_transformers_in_any_mix_of_rows(family, kernel):
    _, theirs, folder = family
    model = load(str(folder), device="cpu")
    runner = TorchRunner(model, device="cpu", num_blocks=200, block_size=4, threads=1)
    runner._attention = KERNELS[kernel](runner._memory, num_heads=model.config.num_heads, scoring=model.config.scoring)
    driver, budgets, compared = Driver(runner), random.Random(2), 0
    texts = [driver.text(prompt) for prompt in prompts([29, 1, 17, 6])]
    found = {text: [] for text in texts}
    while unfinished := [text for text in texts if len(text.completion) < 16]:
        rows = {text: min(text.missing, budgets.choice([1, 2, 9, 20])) for text in unfinished}
        for number, row in drawn_from(runner, [driver.chunk(text, count) for text, count in rows.items()]).items():
            found[texts[number - 1]].append(row)
        driver.step(rows)
    for text in texts:
        wanted = logits_of(theirs, text.known[:-1])[text.given - 1 :]
        torch.testing.assert_close(torch.stack(found[text]), wanted, atol=TOLERANCE, rtol=0)
        compared += len(wanted)
    assert compared == 64
    assert max(len(text.known) for text in texts) > 3 * tiny.WINDOW


def drawn_from(runner, chunks):
    feed = Feed.of(StepPlan(number=0, chunks=chunks))
    arrays = [torch.from_numpy(array) for array in (feed.tokens, feed.positions, feed.drawing)]
    with torch.inference_mode():
        rows = runner._decoder.forward(arrays[0], arrays[1], runner._attention.prepare(feed.spans), arrays[2])
    return {chunk.request_id.int: row for chunk, row in zip([c for c in feed.chunks if c.draws], rows, strict=True)}


GEMMA_ROPES = tiny.FAMILIES["gemma3_text"]["rope_parameters"]
# What a family has and Llama has not, by what would take it away. The file then still loads.
MATTERS = {
    "mistral": [{"sliding_window": None}, {"sliding_window": 11}],
    "smollm3": [{"no_rope_layers": [1] * 5}, {"no_rope_layers": [1, 1, 0, 1, 1]}],
    "qwen2": [{"use_sliding_window": False, "layer_types": None}, {"layer_types": ["sliding_attention"] * 2}],
    "gemma2": [
        {"sliding_window": 11},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"query_pre_attn_scalar": 16},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
    ],
    "gemma3_text": [
        {"sliding_window": 11},
        {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 3},
        {"rope_parameters": GEMMA_ROPES | {"full_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
        {"rope_parameters": GEMMA_ROPES | {"sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}},
        {"final_logit_softcapping": 6.0},
    ],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name, several in MATTERS.items() for changes in several]
)
def test_each_setting_of_a_family_makes_a_difference(tmp_path, name, changes):
    folder = tiny.write_folder(tmp_path, tiny.of_family(name, **tiny.FAMILIES[name]))
    before = prompt_logits(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert (prompt_logits(folder) - before).abs().max() > 100 * TOLERANCE


def prompt_logits(folder):
    driver = Driver(TorchRunner(load(str(folder), device="cpu"), device="cpu", num_blocks=20, threads=1))
    text = driver.text(prompts([40])[0])
    return drawn_from(driver.runner, [driver.chunk(text, 40)])[text.number]
