"""Whose turn it is among tenants: the bound of the virtual token counter, and how long a quiet tenant waits."""

import sys
from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.protocol import Job, JobClass
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.waiting import INPUT_COST, OUTPUT_COST
from tests.engine.world import TENANT_A, TENANT_B, World, completion_of, job, limits, prompt_of

MAX_BATCH = 4
requests = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)


class Service:
    """Tokens by cost and weight that each tenant has got so far, counted from what ran."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = 0
        self._begun: set[UUID] = set()
        self.got: Counter[UUID] = Counter()

    def count(self, jobs: dict[UUID, Job]) -> None:
        plans = self._world.runner.plans
        for chunk in (chunk for plan in plans[self._seen :] for chunk in plan.chunks):
            asked = jobs[chunk.request_id]
            cost = OUTPUT_COST * chunk.draws
            if chunk.request_id not in self._begun:
                self._begun.add(chunk.request_id)
                cost += INPUT_COST * (len(asked.prompt) - chunk.start)
            self.got[asked.origin.tenant_id] += cost / asked.weight
        self._seen = len(plans)


@settings(max_examples=50, deadline=None)
@given(requests, requests, st.sampled_from([0.5, 1.0, 2.0, 5.0]), st.integers(8, 24), st.integers(0, 40))
def test_of_two_backlogged_tenants_none_gets_further_ahead_than_the_bound(a, b, weight, num_blocks, lead) -> None:
    """Theorem 4.4 of the paper: at most 2 U between any two moments at which both have always had requests waiting."""
    world = World(EngineConfig(max_batch=MAX_BATCH, step_tokens=8), limits(num_blocks=num_blocks))
    jobs: dict[UUID, Job] = {}

    def ask(sizes, tenant: UUID, share: float, count: int) -> None:
        for number in range(count):
            prompt, tokens = sizes[number % len(sizes)]
            asked = job(prompt, tokens, tenant=tenant, weight=share)
            jobs[asked.request_id] = asked
            world.engine.add(asked)

    ask(a, TENANT_A, weight, 40)
    for _ in range(lead):
        world.step()
    ask(b, TENANT_B, 1.0, 40)
    bound = 2 * MAX_BATCH * (INPUT_COST + OUTPUT_COST) * 12 / min(weight, 1.0)
    service, ahead = Service(world), []
    while {s.job.origin.tenant_id for s in _waiting(world.engine.scheduler)} == {TENANT_A, TENANT_B}:
        service.count(jobs)
        ahead.append(service.got[TENANT_A] - service.got[TENANT_B])
        world.step()
    assert max(ahead, default=0) - min(ahead, default=0) <= bound
    world.run()
    for each in jobs.values():
        assert world.tokens(each) == completion_of(each.prompt, each.sampling.max_tokens)


def _waiting(scheduler: Scheduler) -> list[Sequence]:
    tenants = [tenant for line in scheduler.waiting._lines.values() for tenant in line._tenants.values()]
    return [sequence for tenant in tenants for _, sequence in tenant.heap if tenant.waiting]


def test_service_follows_the_weights() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=8), limits(num_blocks=16))
    jobs = [job(6, 5, tenant=TENANT_A, weight=3.0) for _ in range(200)]
    jobs += [job(6, 5, tenant=TENANT_B) for _ in range(200)]
    for each in jobs:
        world.engine.add(each)
    while len(world.reports) < 120:
        world.step()
    ended = Counter(report.origin.tenant_id for report in world.reports)
    assert ended[TENANT_A] == pytest.approx(90, abs=3)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_counts_as_one(weight: float) -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    jobs = [job(4, 2, tenant=tenant, weight=weight) for tenant in (TENANT_A, TENANT_A, TENANT_B, TENANT_B)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    assert [report.request_id for report in world.reports] == [jobs[i].request_id for i in (0, 2, 1, 3)]


def _flood(world: World, *, count: int = 200, tokens: int = 60) -> None:
    for _ in range(count):
        world.engine.add(job(100, tokens, tenant=TENANT_A))


def _steps_until_first_token(world: World, asked: Job) -> int:
    before = len(world.outputs)
    world.engine.add(asked)
    while not any(event.request_id == asked.request_id for event in world.events):
        world.step()
    return len(world.outputs) - before


@pytest.mark.parametrize(("max_batch", "num_blocks"), [(4, 1000), (64, 40), (8, 200)])
@pytest.mark.parametrize("warm_up", [1, 7, 50, 300])
def test_a_quiet_tenant_beside_two_hundred_long_prompts_waits_for_no_completion(max_batch, num_blocks, warm_up) -> None:
    """Whether places or memory are short: its first token comes in as many steps as its own prompt needs beside those
    who run, which take one row each, however long the flood and its completions are.
    """
    model = limits(num_blocks=num_blocks, block_size=16, context_length=200)
    world = World(EngineConfig(max_batch=max_batch, step_tokens=64), model)
    _flood(world)
    for _ in range(warm_up):
        world.step()
    waits = []
    for length in (10, 50, 20, 100):
        asked = job(length, 3, tenant=TENANT_B)
        waits.append(_steps_until_first_token(world, asked))
        needed = -(-length // (64 - len(world.engine.scheduler.running)))
        assert waits[-1] <= needed + 1
        while not any(report.request_id == asked.request_id for report in world.reports):
            world.step()
        for _ in range(5):
            world.step()
    assert len(world.engine.scheduler.waiting) > 0, "the flood is still there"


def test_where_memory_holds_but_one_of_the_flood_a_quiet_tenant_waits_for_that_one_at_most() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=12, block_size=16, context_length=200))
    _flood(world, tokens=60)
    for length in (100, 10, 100, 50):
        for _ in range(7):
            world.step()
        assert _steps_until_first_token(world, job(length, 3, tenant=TENANT_B)) <= 60 + 2 + 2


def test_a_quiet_tenant_pushes_out_one_of_many_and_never_the_only_one() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=16), limits(num_blocks=32))
    first, second = job(6, 20, tenant=TENANT_A), job(6, 20, tenant=TENANT_A)
    world.engine.add(first)
    world.engine.add(second)
    world.step()
    turns = {s.job.request_id: s.turn for s in world.engine.scheduler.running}
    quiet, third = job(6, 20, tenant=TENANT_B), job(6, 20, tenant=UUID(int=0xC))
    world.engine.add(quiet)
    world.step()
    assert {s.job.request_id for s in world.engine.scheduler.running} == {first.request_id, quiet.request_id}
    world.engine.add(third)
    world.step()
    assert {s.job.request_id for s in world.engine.scheduler.running} == {first.request_id, quiet.request_id}
    while second.request_id not in {s.job.request_id for s in world.engine.scheduler.running}:
        world.step()
    (again,) = [s for s in world.engine.scheduler.running if s.job is second]
    assert again.turn == turns[second.request_id], "its place in the order is what it was"
    world.run()
    assert world.engine.scheduler.preemptions == 1
    for each in (first, second, quiet, third):
        assert world.tokens(each) == completion_of(each.prompt, 20)


def test_who_was_pushed_out_again_and_again_still_ends() -> None:
    """A tenant that always comes back with one small request cannot keep the other from ending, nor it him."""
    world = World(EngineConfig(max_batch=2, step_tokens=16), limits(num_blocks=32))
    flood = [job(6, 30, tenant=TENANT_A) for _ in range(4)]
    for each in flood:
        world.engine.add(each)
    quiet: list[Job] = []
    while len({r.request_id for r in world.reports} & {each.request_id for each in flood}) < 4:
        if not quiet or any(report.request_id == quiet[-1].request_id for report in world.reports):
            quiet.append(job(2, 1, tenant=TENANT_B))
            world.engine.add(quiet[-1])
        world.step()
        assert len(world.outputs) < 1000
    assert len(quiet) > 20


def test_a_tenant_that_stayed_away_has_saved_up_no_turns() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    world.engine.add(job(4, 1, tenant=TENANT_B))
    for _ in range(30):
        world.engine.add(job(4, 4, tenant=TENANT_A))
    while len(world.reports) < 20:
        world.step()
    late = [job(4, 4, tenant=TENANT_B) for _ in range(8)]
    for each in late:
        world.engine.add(each)
    while len(world.reports) < 30:
        world.step()
    assert Counter(r.origin.tenant_id for r in world.reports[20:])[TENANT_B] == 5


def test_class_goes_before_fairness_and_each_class_has_counters_of_its_own() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    deferred = [job(4, 4, klass=JobClass.BATCH, tenant=TENANT_B) for _ in range(3)]
    for each in deferred:
        world.engine.add(each)
    while len(world.reports) < 2:
        world.step()
    a, b = [job(4, 4, tenant=TENANT_A) for _ in range(2)], [job(4, 4, tenant=TENANT_B) for _ in range(2)]
    for each in (*a, *b):
        world.engine.add(each)
    world.run()
    order = [report.request_id for report in world.reports[2:]]
    assert order == [each.request_id for each in (a[0], b[0], a[1], b[1], deferred[2])]


def test_what_a_prefix_hit_saves_is_not_charged() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=32), limits(num_blocks=40, block_size=4))
    stem = prompt_of(24)
    world.engine.add(job([*stem, 1], 1, tenant=TENANT_A))
    world.run()
    hits = [job([*stem, number], 1, tenant=TENANT_A) for number in range(2, 12)]
    others = [job(25, 1, tenant=TENANT_B) for _ in range(10)]
    for each in (*hits, *others):
        world.engine.add(each)
    while len(world.reports) < 9:
        world.step()
    assert Counter(r.origin.tenant_id for r in world.reports[1:])[TENANT_A] == 7


def test_when_nobody_is_there_all_are_even_again_and_nothing_is_remembered() -> None:
    world = World()
    for number in range(50):
        world.engine.add(job(4, 2, tenant=UUID(int=number)))
    world.run()
    assert all(not line._tenants for line in world.engine.scheduler.waiting._lines.values())


@pytest.mark.parametrize("tenants", [1, 20, 10_000])
def test_a_step_beside_ten_thousand_waiting_costs_no_more_than_beside_ten(tenants: int) -> None:
    """Counted in calls, not in time. Steps admit, end, charge and look at a head that finds no room."""
    calls = {waiting: _calls_of_steps(waiting, tenants) for waiting in (10, 10_000)}
    assert calls[10_000] <= 1.5 * calls[10]


def _calls_of_steps(waiting: int, tenants: int) -> int:
    model = limits(num_blocks=64)
    scheduler = Scheduler(EngineConfig(max_batch=8, step_tokens=16), model)
    for number in range(waiting):
        asked = job(8, 4, tenant=UUID(int=number % tenants))
        scheduler.add(
            Sequence(
                job=asked, arrival=number, tokens=list(asked.prompt), prompt=8, given=8,
                received_at=0.0, received_ns=0, inbox_ns=0,
            )
        )  # fmt: skip
    calls = 0

    def count(_frame, event, _argument) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    for number in range(6):
        sys.setprofile(count)
        plan = scheduler.schedule(number)
        sys.setprofile(None)
        by_key = {(s.job.request_id, s.choice): s for s in scheduler.running}
        for chunk in plan.chunks:
            sequence = by_key[chunk.request_id, chunk.choice]
            scheduler.ran(sequence, chunk, 5 if chunk.draws else None)
            if sequence.completion == 2:
                scheduler.remove(sequence, number)
    return calls
