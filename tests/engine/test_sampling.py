"""Penalties, bias and logprobs through the whole engine, against `transformers` on the real model."""

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.meter import Identity, Meter
from engine.models import LoadedModel
from engine.protocol import ErrorCode, Event, Job, Outcome
from engine.runner import TorchRunner
from engine.timeline import Span, Timeline
from tests.engine import world

PROMPT = "Write one sentence about the sea, then write it again, and again: The sea is"
TOLERANCE = 2e-3  # natural logarithms; two float32 forwards that add up in another order


def job(prompt: list[int], max_tokens: int, *, attempt: int = 1, generated: list[int] | None = None, **sampling) -> Job:
    made = world.job(prompt, max_tokens, attempt=attempt, generated=generated, ignore_eos=True)
    return msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, **sampling))


def run(model: LoadedModel, jobs: list[Job], *, num_blocks: int = 64) -> tuple[dict, list]:
    """The events by request, and the reports."""
    identity = Identity(worker="w1", device="host/cpu", device_kind="cpu", deployment="m")
    config = EngineConfig(max_batch=8, step_tokens=48)
    runner = TorchRunner(model, device="cpu", num_blocks=num_blocks, threads=torch.get_num_threads())
    engine = Engine(runner, Meter(identity, Timeline(Span.OVERHEAD), fixed_rows=config.fixed_rows), config)
    for each in jobs:
        engine.add(each)
    found: dict = {each.request_id: [] for each in jobs}
    reports = []
    while engine.has_work:
        output = engine.step()
        assert output.failure is None
        reports += [ended.report for ended in output.ended]
        events: list[Event] = [event for events in output.events.values() for event in events]
        for event in events:
            found[event.request_id].append(event)
    engine.check_integrity()
    return found, reports


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.ids]


def logprobs_of(events: list[Event]) -> list:
    told = [logprob for event in events for logprob in event.logprobs or ()]
    assert len(told) == len(ids_of(events))
    return told


def test_greedy_tokens_with_penalty_and_bias_equal_those_of_transformers(smollm2, transformers_smollm2) -> None:
    reference, tokenizer = transformers_smollm2
    prompt = tokenizer(PROMPT)["input_ids"]
    bias = {tokenizer(" blue")["input_ids"][0]: 5.0, tokenizer(" a")["input_ids"][0]: -100.0}
    asked = job(prompt, 16, temperature=0.0, repetition_penalty=1.4, logit_bias=tuple(bias.items()), ignore_eos=False)
    plain = job(prompt, 16, temperature=0.0, ignore_eos=False)
    found, _ = run(smollm2, [asked, plain])
    settings = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([prompt]),
            repetition_penalty=1.4,
            sequence_bias=[[[token], value] for token, value in bias.items()],
            **settings,
        )
        without = reference.generate(torch.tensor([prompt]), **settings)
    assert ids_of(found[asked.request_id]) == expected[0, len(prompt) :].tolist()
    assert ids_of(found[plain.request_id]) == without[0, len(prompt) :].tolist()
    assert ids_of(found[asked.request_id]) != ids_of(found[plain.request_id])


def test_logprobs_are_those_of_transformers_through_chunks_and_preemption(smollm2, transformers_smollm2) -> None:
    reference, tokenizer = transformers_smollm2
    prompt = tokenizer(PROMPT)["input_ids"]
    settings = {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 5}
    jobs = [job(prompt * (1 + n % 2), 30, seed=n, **settings) for n in range(4)]
    found, reports = run(smollm2, jobs, num_blocks=9)
    assert sum(report.preemptions for report in reports) >= 1
    for each in jobs:
        ids, told = ids_of(found[each.request_id]), logprobs_of(found[each.request_id])
        with torch.inference_mode():
            logits = reference(torch.tensor([each.prompt + ids[:-1]])).logits[0, len(each.prompt) - 1 :]
        expected = logits.float().log_softmax(-1)
        for row, token, logprob in zip(expected, ids, told, strict=True):
            assert logprob.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            assert logprob.logprobs == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
            assert row[logprob.ids].tolist() == pytest.approx(logprob.logprobs, abs=TOLERANCE)
            assert logprob.logprobs == sorted(logprob.logprobs, reverse=True)


ASKED = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "logit_bias": ((28, 2.0), (253, -3.0)),
    "logprobs": 2,
}


def test_a_resumed_attempt_draws_and_tells_what_the_lost_one_would_have(smollm2: LoadedModel) -> None:
    prompt = list(range(100, 130))
    whole = job(prompt, 16, temperature=0.9, top_p=0.95, seed=7, **ASKED)
    found, _ = run(smollm2, [whole])
    ids, told = ids_of(found[whole.request_id]), logprobs_of(found[whole.request_id])
    for known in (1, 13):
        resumed = job(prompt, 16, attempt=2, generated=ids[:known], temperature=0.9, top_p=0.95, seed=7, **ASKED)
        others = [job(prompt[number:], 8, temperature=1.0, seed=number, **ASKED) for number in range(1, 4)]
        again, _ = run(smollm2, [*others, resumed])
        assert ids_of(again[resumed.request_id]) == ids[known:]
        for one, other in zip(logprobs_of(again[resumed.request_id]), told[known:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert one.ids == other.ids


def test_what_would_break_a_draw_is_refused(smollm2: LoadedModel) -> None:
    wrong: list[dict] = [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": 1e30},
        {"presence_penalty": 3.0},
        {"frequency_penalty": float("-inf")},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logprobs": -1},
    ]
    jobs = [job([1, 2], 5, **change) for change in wrong]
    jobs.append(job([1, 2], 5, logit_bias=((10**9, 1.0),)))
    _, reports = run(smollm2, jobs)
    assert {report.outcome for report in reports} == {Outcome.REFUSED}
    codes = [report.error for report in reports]
    assert codes == [ErrorCode.INVALID_SAMPLING] * len(wrong) + [ErrorCode.OUT_OF_VOCABULARY]
