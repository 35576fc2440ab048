"""The whole engine against `transformers`: same weights, same greedy tokens, whatever happens to a sequence."""

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.meter import Identity, Meter
from engine.models import LoadedModel
from engine.protocol import AttemptReport, ErrorCode, Event, Job, Outcome
from engine.runner import TorchRunner
from engine.timeline import Span, Timeline
from tests.engine.owner import check_identities
from tests.engine.world import TENANT_A, TENANT_B, job

QUESTIONS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a message in a bottle and answers it.",
    "Explain step by step how a steam engine turns heat into motion, and why its efficiency is limited. " * 4,
    "List the planets of the solar system in order and say one thing about each of them. " * 3,
    "Once upon a time",
)
TOKENS = 56  # more than three blocks of 16


def engine_over(runner: TorchRunner, config: EngineConfig) -> Engine:
    identity = Identity(worker="w1", device="host/cpu", device_kind="cpu", deployment="m")
    return Engine(runner, Meter(identity, Timeline(Span.OVERHEAD), fixed_rows=config.fixed_rows), config)


def test_greedy_tokens_equal_those_of_transformers_through_chunks_blocks_and_preemption(
    smollm2: LoadedModel, transformers_smollm2
) -> None:
    reference, tokenizer = transformers_smollm2
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    runner = TorchRunner(smollm2, device="cpu", num_blocks=18, threads=torch.get_num_threads())
    engine = engine_over(runner, EngineConfig(max_batch=4, step_tokens=48))
    jobs = [
        job(
            prompt,
            TOKENS,
            tenant=TENANT_A if number % 2 else TENANT_B,
            temperature=0.0,
            ignore_eos=False,
            min_tokens=TOKENS,
        )
        for number, prompt in enumerate(prompts)
    ]
    tokens, reports, plans = _run(engine, jobs, arrive_every=7)

    for each in jobs:
        assert tokens[each.request_id] == _greedy(reference, each.prompt, tokens[each.request_id])
        assert len(tokens[each.request_id]) == TOKENS
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    for each in jobs:
        mine = [chunk for chunk in chunks if chunk.request_id == each.request_id]
        assert mine[-1].end // runner.limits.block_size - len(each.prompt) // runner.limits.block_size >= 3
    longest = max(jobs, key=lambda each: len(each.prompt))
    first_token = next(i for i, c in enumerate(chunks) if c.request_id == longest.request_id and c.draws)
    assert sum(c.request_id == longest.request_id for c in chunks[: first_token + 1]) >= 2
    assert sum(report.preemptions for report in reports) >= 1
    assert sum(report.recomputed_tokens for report in reports) > 0
    assert max(len(plan.chunks) for plan in plans) >= 3
    assert any(len({len(c.tokens) > 1 for c in plan.chunks}) == 2 for plan in plans), "prompts beside running ones"
    engine.check_integrity()

    interval = engine.meter.cut(last=True)
    check_identities([interval], reports)
    assert interval.mixed_tenant_steps > 0


def test_a_continuation_draws_what_the_lost_attempt_would_have_drawn(smollm2: LoadedModel) -> None:
    runner = TorchRunner(smollm2, device="cpu", num_blocks=64, threads=torch.get_num_threads())
    prompt = list(range(100, 130))
    whole = job(prompt, 24, temperature=0.9, top_p=0.95, seed=7)
    alone, _, _ = _run(engine_over(runner, EngineConfig()), [whole], arrive_every=1)
    expected = alone[whole.request_id]
    for known in (1, 9, 23):
        resumed = job(prompt, 24, attempt=2, generated=expected[:known], temperature=0.9, top_p=0.95, seed=7)
        others = [job(prompt[number:], 20, temperature=1.0, seed=number) for number in range(1, 4)]
        tokens, _, _ = _run(engine_over(runner, EngineConfig()), [*others, resumed], arrive_every=2)
        assert expected[:known] + tokens[resumed.request_id] == expected


def test_jobs_that_could_hurt_a_step_are_refused_and_their_neighbours_finish(smollm2: LoadedModel) -> None:
    runner = TorchRunner(smollm2, device="cpu", num_blocks=16, threads=torch.get_num_threads())
    engine = engine_over(runner, EngineConfig(max_batch=8))
    hostile = {
        ErrorCode.OUT_OF_VOCABULARY: job([1, 2**62], 5),
        ErrorCode.INVALID_SAMPLING: job([1, 2], 5, temperature=float("nan")),
        ErrorCode.KV_CAPACITY_EXCEEDED: job([5] * 10, 250),
        ErrorCode.CONTEXT_LENGTH_EXCEEDED: job([5] * 10, 10_000),
        ErrorCode.EMPTY_PROMPT: job([], 5),
    }
    extreme = [
        job([1], 1),
        job([5] * 236, 20, temperature=1e-9),
        job([7] * 8, 5, temperature=1e30, top_p=1e-300, seed=2**63 + 5),
        job([7] * 8, 5, temperature=1e-300, seed=2**64 - 1),
        job([7] * 8, 5, temperature=1.0, seed=-(2**62)),
        job([7] * 8, 5, temperature=1.0, top_p=5e-324, stop_token_ids=tuple(range(200)), min_tokens=5),
    ]
    _, reports, _ = _run(engine, [*hostile.values(), *extreme], arrive_every=1)
    outcomes = {report.request_id: (report.outcome, report.error) for report in reports}
    for code, each in hostile.items():
        assert outcomes[each.request_id] == (Outcome.REFUSED, code)
    for each in extreme:
        assert outcomes[each.request_id] == (Outcome.COMPLETED, "")


def _run(engine: Engine, jobs: list[Job], *, arrive_every: int):
    """Jobs arrive one by one, every few steps. Returns the tokens by request, the reports and the plans."""
    tokens: dict = {each.request_id: [] for each in jobs}
    reports: list[AttemptReport] = []
    plans = []
    waiting = list(jobs)
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % arrive_every == 0:
            engine.add(waiting.pop(0))
        output = engine.step()
        steps += 1
        plans += [output.plan] if output.plan else []
        reports += [ended.report for ended in output.ended]
        events: list[Event] = [event for events in output.events.values() for event in events]
        for event in events:
            tokens[event.request_id] += event.ids
        engine.check_integrity()
    return tokens, reports, plans


def _greedy(model, prompt: list[int], completion: list[int]) -> list[int]:
    """What `transformers` finds most likely after the prompt and each prefix of the completion, in one forward. Equal
    to the completion if and only if its own greedy generation, with the end of sequence banned, is.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
        logits[:, model.generation_config.eos_token_id] = -torch.inf
    return logits.argmax(-1).tolist()
