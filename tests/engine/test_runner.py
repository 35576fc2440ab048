"""The runner: whatever the mix, the chunks and the blocks, each sequence gets what it would get alone."""

from __future__ import annotations

import random
from enum import Enum

import numpy as np
import pytest
import torch

from engine.kernels.padded import PaddedAttention
from engine.kernels.sparse import SparseAttention
from engine.models import load
from engine.plan import Rows, StepPlan
from engine.protocol import Sampling
from engine.runner import Feed, TorchRunner
from tests.engine import tiny
from tests.engine.driver import Driver

BLOCK = 4
KERNELS = {"sparse": SparseAttention, "padded": PaddedAttention}
SHAPES = {
    "grouped": {},
    "one key-value head": {"num_key_value_heads": 1},
    "a head each": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "narrow heads": {"head_dim": 2},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def prompts(lengths, *, seed=0):
    choice, vocabulary = random.Random(seed), len(tiny.vocabulary())
    return [[choice.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


def a_runner(model, kernel=None):
    runner = TorchRunner(model, device="cpu", num_blocks=200, block_size=BLOCK, threads=1)
    if kernel is not None:
        runner._attention = KERNELS[kernel](runner._memory, num_heads=model.config.num_heads)
    return runner


def logits(runner, chunks):
    """What the drawing chunks draw from, in the order of the runner's rows: [draws, vocabulary]."""
    feed = Feed.of(StepPlan(number=0, chunks=chunks))
    arrays = [torch.from_numpy(array) for array in (feed.tokens, feed.positions, feed.drawing)]
    with torch.inference_mode():
        attend = runner._attention.prepare(feed.spans)
        found = runner._decoder.forward(arrays[0], arrays[1], attend, arrays[2])
    return {chunk.request_id.int: row for chunk, row in zip([c for c in feed.chunks if c.draws], found, strict=True)}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return load(str(tiny.write_folder(tmp_path_factory.mktemp("tiny"))), device="cpu")


@pytest.fixture
def runner(tiny_model):
    return a_runner(tiny_model)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_tokens_are_those_of_transformers(tmp_path, changes, kernel):
    """In chunks of 1 to 9 rows, beside others that decode, over block boundaries; logits within 1e-4 of up to 1e1."""
    theirs = tiny.llama(**changes)
    driver = Driver(a_runner(load(str(tiny.write_folder(tmp_path, theirs)), device="cpu"), kernel))
    texts = [driver.text(prompt) for prompt in prompts([29, 1, 17, 6])]
    budgets, compared, mixed = random.Random(2), 0, 0
    while unfinished := [text for text in texts if len(text.completion) < 8]:
        rows = {text: min(text.missing, budgets.randint(1, 9)) for text in unfinished}
        found = logits(driver.runner, [driver.chunk(text, count) for text, count in rows.items()])
        mixed += {1} < set(rows.values())
        result = driver.step(rows)
        for text, drawn in zip(rows, result.drawn, strict=True):
            if drawn is not None:
                with torch.inference_mode():
                    wanted = theirs(torch.tensor([text.known[:-1]])).logits[0, -1]
                torch.testing.assert_close(found[text.number], wanted, atol=1e-4, rtol=0)
                assert drawn == int(wanted.argmax())
                compared += 1
    assert compared == 32
    assert mixed > 0  # steps that held chunks and single rows
    assert min(len(text.blocks) for text in texts) >= 2


def test_both_kernels_and_any_mix_of_rows_agree(tiny_model):
    tokens = []
    for kernel in KERNELS:
        for budget in (1, 3, 5, 100):
            driver = Driver(a_runner(tiny_model, kernel), seed=budget)
            texts = [driver.text(prompt) for prompt in prompts([40, 2, 9, 9, 23])]
            driver.finish(texts, 10, budget=budget)
            tokens.append([text.completion for text in texts])
    assert all(one == tokens[0] for one in tokens)


def test_a_sequence_that_lost_its_blocks_gets_the_same_tokens(runner):
    driver = Driver(runner)
    undisturbed, preempted = (driver.text(prompt) for prompt in prompts([21]) * 2)
    driver.finish([undisturbed, preempted], 5)
    driver.preempt(preempted)
    driver.finish([undisturbed, preempted], 12)
    assert preempted.completion == undisturbed.completion
    assert preempted.watermark > 21


def test_sequences_may_share_the_blocks_of_their_common_beginning(runner):
    driver = Driver(runner)
    beginning, ends = prompts([12])[0], prompts([3, 5], seed=4)
    alone = [driver.text(beginning + end) for end in ends]
    driver.finish(alone, 6)
    shared = [driver.text(beginning + end) for end in ends]
    driver.step({shared[0]: 12})
    shared[1].blocks, shared[1].computed = shared[0].blocks[:3], 12
    driver.finish(shared, 6)
    assert shared[1].blocks[:3] == shared[0].blocks[:3]
    assert [text.completion for text in shared] == [text.completion for text in alone]


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_an_earlier_owner_left_in_a_block_touches_nobody(tiny_model, kernel):
    clean, dirty = Driver(a_runner(tiny_model, kernel)), Driver(a_runner(tiny_model, kernel))
    dirty.runner._memory._all.fill_(float("nan"))
    completions = []
    for driver in (clean, dirty):
        texts = [driver.text(prompt) for prompt in prompts([5, 14, 31])]
        driver.finish(texts, 9, budget=6)
        completions.append([text.completion for text in texts])
    assert completions[0] == completions[1]


def test_rows_are_counted_by_what_they_are(runner):
    driver = Driver(runner)
    fresh, decoding, again = (driver.text(prompt) for prompt in prompts([9, 4, 6]))
    driver.finish([decoding], 1)
    driver.finish([again], 3)
    driver.preempt(again)  # 8 rows are lost: 6 of the prompt and 2 of its completion; 1 token never had KV
    result = driver.step({fresh: 5, decoding: 1, again: 9})
    assert result.rows == Rows(prompt=5, recomputed=8, generated=2)
    assert result.drawn[0] is None
    result = driver.step({fresh: 4})
    assert result.rows == Rows(prompt=4, recomputed=0, generated=1)


def test_a_resumed_completion_counts_as_given(runner):
    driver = Driver(runner)
    resumed = driver.text(prompts([7])[0])
    assert driver.step({resumed: 7}).rows.prompt == 7


def test_drawn_tokens_stand_in_the_order_of_the_plan(tiny_model):
    lengths = [3, 30, 1, 8, 17]
    alone = []
    for prompt in prompts(lengths):
        driver = Driver(a_runner(tiny_model))
        text = driver.text(prompt)
        driver.finish([text], 1)
        alone.append(text.completion[0])
    together = Driver(a_runner(tiny_model))
    texts = [together.text(prompt) for prompt in prompts(lengths)]
    assert together.step({text: text.missing for text in texts}).drawn == alone


def test_a_step_may_draw_nothing(runner):
    driver = Driver(runner)
    text = driver.text(prompts([9])[0])
    result = driver.step({text: 4})
    assert result.drawn == [None]
    assert result.rows == Rows(prompt=4)
    assert result.device_ns > 0


def test_banned_tokens_are_not_drawn_and_others_are(runner):
    driver = Driver(runner)
    free = driver.text(prompts([5])[0])
    driver.finish([free], 1)
    barred = driver.text(prompts([5])[0], banned=free.completion)
    driver.step({barred: 5})
    assert barred.completion != free.completion


def test_sampled_tokens_depend_on_seed_choice_and_place_alone(tiny_model):
    def completion(driver, seed, others):
        text = driver.text(prompts([6])[0], Sampling(max_tokens=9, temperature=1.5, top_k=50, seed=seed))
        beside = [driver.text(prompt) for prompt in prompts([others] * others, seed=9)]
        driver.finish([*beside, text] if others else [text], 9)
        return text.completion

    alone = completion(Driver(a_runner(tiny_model)), 11, 0)
    assert completion(Driver(a_runner(tiny_model), seed=3), 11, 5) == alone
    assert completion(Driver(a_runner(tiny_model)), 12, 0) != alone


def test_limits_say_what_a_step_costs(smollm2):
    """Hand count for SmolLM2-135M: 30 layers of 576 wide, 9 heads of 64, 3 for keys and values, MLP of 1536."""
    limits = TorchRunner(smollm2, device="cpu", num_blocks=3, threads=1).limits
    linears = 576 * 576 + 576 * 192 + 576 * 192 + 576 * 576 + 576 * 1536 + 576 * 1536 + 1536 * 576
    assert limits.macs_per_row == 30 * linears == 106_168_320
    assert limits.macs_per_attended == 30 * 9 * (64 + 64) == 34_560
    assert limits.macs_per_draw == 576 * 49_152
    assert (limits.context_length, limits.vocab_size, limits.eos_token_ids) == (8192, 49_152, (2,))
    assert (limits.num_blocks, limits.block_size) == (3, 16)


def test_memory_holds_as_many_blocks_as_fit(tiny_model):
    per_block = 2 * 2 * 2 * 8 * BLOCK * 4  # layers, keys and values, heads, head size, positions, bytes
    runner = TorchRunner(tiny_model, device="cpu", kv_memory_bytes=10 * per_block + 1, block_size=BLOCK)
    assert runner.limits.num_blocks == 10
    with pytest.raises(ValueError, match=f"a block takes {per_block}"):
        TorchRunner(tiny_model, device="cpu", kv_memory_bytes=per_block - 1, block_size=BLOCK)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near(tmp_path, dtype):
    """The path of CUDA, run on the CPU: logits within a few units of the type's last place."""
    folder = str(tiny.write_folder(tmp_path))
    exact, rough = (a_runner(load(folder, device="cpu", dtype=kind)) for kind in (torch.float32, dtype))
    assert isinstance(rough._attention, PaddedAttention)
    drivers = [Driver(exact), Driver(rough)]
    rows = []
    for driver in drivers:
        text, other = (driver.text(prompt) for prompt in prompts([19, 5]))
        driver.step({text: 11, other: 5})
        rows.append(logits(driver.runner, [driver.chunk(text, 8), driver.chunk(other, 1)]))
    scale = max(row.abs().max() for row in rows[0].values())
    for number, row in rows[0].items():
        torch.testing.assert_close(
            rows[1][number].float(), row, atol=float(scale) * 16 * torch.finfo(dtype).eps, rtol=0
        )


def test_nothing_within_a_forward_waits_for_the_device(tmp_path):
    """On the meta device a tensor has no values: whatever would fetch one raises. bfloat16, as on CUDA."""
    runner = a_runner(load(str(tiny.write_folder(tmp_path)), device="cpu", dtype=torch.bfloat16))
    driver = Driver(runner)
    texts = [driver.text(prompt) for prompt in prompts([9, 4, 6])]
    driver.finish(texts[:2], 1)
    feed = Feed.of(StepPlan(number=0, chunks=[driver.chunk(text, text.missing) for text in texts]))
    attend = runner._attention.prepare(feed.spans)
    with torch.inference_mode(), torch.device("meta"):
        decoder = to_meta(runner._decoder)
        moved = to_meta(attend)
        rows = [torch.empty(array.shape, dtype=torch.int64) for array in (feed.tokens, feed.positions, feed.drawing)]
        found = decoder.forward(rows[0], rows[1], moved, rows[2])
    assert found.shape == (3, len(tiny.vocabulary()))


def to_meta(thing, seen=None):
    """A deep copy with every tensor on the meta device."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        return torch.empty_like(thing, device="meta")
    if isinstance(thing, tuple | list):
        return type(thing)(to_meta(item, seen) for item in thing)
    if not type(thing).__module__.startswith("engine.") or isinstance(thing, np.ndarray | Enum):
        return thing
    if id(thing) not in seen:
        copy = seen[id(thing)] = object.__new__(type(thing))
        names = list(getattr(thing, "__dict__", {})) or list(getattr(type(thing), "__slots__", ()))
        for name in names:
            object.__setattr__(copy, name, to_meta(getattr(thing, name), seen))
    return seen[id(thing)]
