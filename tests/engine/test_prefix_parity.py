"""Prefix hits on the real model: the same greedy tokens as without, in a mixed batch, through preemption."""

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.meter import Identity, Meter
from engine.models import LoadedModel
from engine.protocol import AttemptReport, Job
from engine.runner import TorchRunner
from engine.timeline import Span, Timeline
from tests.engine.owner import check_identities
from tests.engine.world import TENANT_B, job

SYSTEM = (
    "You are a patient teacher who explains things to children in short and simple sentences. You never use a word "
    "that a child of eight would not know, you give an example from daily life, and you end with a question. "
)
QUESTIONS = ("Why is the sky blue?", "How does a boat float?", "Why is the sky blue? And at night?", "What is rain?")
TOKENS = 33  # more than two blocks of 16


class Run:
    """Jobs through an engine, one more every few steps; integrity after each step."""

    def __init__(self, runner: TorchRunner, config: EngineConfig, jobs: list[Job], *, arrive_every: int) -> None:
        identity = Identity(worker="w1", device="host/cpu", device_kind="cpu", deployment="m")
        self.engine = Engine(runner, Meter(identity, Timeline(Span.OVERHEAD), fixed_rows=config.fixed_rows), config)
        self.tokens: dict[object, list[int]] = {each.request_id: [] for each in jobs}
        self.reports: dict[object, AttemptReport] = {}
        waiting, steps = list(jobs), 0
        while waiting or self.engine.has_work:
            if waiting and steps % arrive_every == 0:
                self.engine.add(waiting.pop(0))
            output = self.engine.step()
            steps += 1
            for event in (event for events in output.events.values() for event in events):
                self.tokens[event.request_id] += event.ids
            self.reports |= {ended.report.request_id: ended.report for ended in output.ended}
            self.engine.check_integrity()


def test_greedy_tokens_are_the_same_with_hits_and_without(smollm2: LoadedModel, transformers_smollm2) -> None:
    reference, tokenizer = transformers_smollm2
    prompts = [tokenizer(SYSTEM + question)["input_ids"] for question in QUESTIONS]
    jobs = [job(prompt, TOKENS) for prompt in prompts] + [job(prompts[0], TOKENS, tenant=TENANT_B)]
    runner = TorchRunner(smollm2, device="cpu", num_blocks=14, threads=torch.get_num_threads())
    without = Run(runner, EngineConfig(max_batch=4, step_tokens=48, prefix_cache=False), jobs, arrive_every=6)
    hits = Run(runner, EngineConfig(max_batch=4, step_tokens=48), jobs, arrive_every=6)

    assert hits.tokens == without.tokens
    logits = reference(torch.tensor([prompts[2] + hits.tokens[jobs[2].request_id][:-1]])).logits[0]
    assert logits[len(prompts[2]) - 1 :].argmax(-1).tolist() == hits.tokens[jobs[2].request_id]
    same = len(tokenizer(SYSTEM)["input_ids"]) // 16 * 16
    assert [without.reports[each.request_id].cached_tokens for each in jobs] == [0] * 5
    cached = [hits.reports[each.request_id].cached_tokens for each in jobs]
    assert cached[0] == cached[4] == 0, "the first, and another tenant"
    assert min(cached[1:4]) >= same
    assert sum(report.preemptions for report in hits.reports.values()) >= 1
    check_identities([hits.engine.meter.cut(last=True)], hits.reports.values())
