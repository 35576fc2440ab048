import random
from uuid import UUID

import pytest

from engine.config import ConfigError, EngineConfig
from engine.protocol import JobClass
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.world import World, completion_of, job, limits

BATCH = JobClass.BATCH


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_draws_with_the_last() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=8))
    asked = job(19, 2)
    world.engine.add(asked)
    world.run()
    chunks = [plan.chunks[0] for plan in world.runner.plans]
    assert [(c.start, c.end, c.draws) for c in chunks] == [
        (0, 8, False),
        (8, 16, False),
        (16, 19, True),
        (19, 20, True),
    ]


def test_running_sequences_get_their_row_before_any_prompt_gets_the_rest() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=8))
    old, new = job(3, 6), job(30, 1)
    world.engine.add(old)
    world.step()
    world.engine.add(new)
    world.step()
    assert world.scheduled[-1] == [(old.request_id, 1), (new.request_id, 7)]


def test_no_step_exceeds_its_budget_or_its_batch_and_no_row_is_left_while_somebody_could_use_it() -> None:
    world = World(EngineConfig(max_batch=3, step_tokens=8), limits(num_blocks=64))
    for length in (17, 3, 9, 30, 1, 12):
        world.engine.add(job(length, 3))
    while world.engine.has_work:
        world.step()
        rows = sum(count for _, count in world.scheduled[-1])
        behind = any(sequence.missing > 1 for sequence in world.engine.scheduler.running)
        assert rows == 8 if behind else rows <= 8
        assert len(world.scheduled[-1]) <= 3
    assert len(world.reports) == 6


def test_whatever_prompts_arrive_who_is_being_answered_gets_a_token_in_every_step_of_bounded_rows() -> None:
    world = World(EngineConfig(max_batch=6, step_tokens=8), limits(num_blocks=200))
    answered = [job(3, 40) for _ in range(4)]
    for each in answered:
        world.engine.add(each)
    for _ in range(3):
        world.step()
    for number in range(30):
        world.engine.add(job(40, 2, klass=list(JobClass)[number % 2], tenant=UUID(int=number % 3)))
        if number % 3:
            world.step()
            drew = {chunk.request_id for chunk in world.runner.plans[-1].chunks if chunk.draws}
            assert drew >= {each.request_id for each in answered}
            assert sum(len(chunk.tokens) for chunk in world.runner.plans[-1].chunks) <= 8


def test_interactive_goes_before_batch_and_equals_go_by_arrival() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    jobs = [job(4, 1, klass=BATCH), job(4, 1, klass=BATCH), job(4, 1), job(4, 1)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    assert [step[0][0] for step in world.scheduled] == [jobs[i].request_id for i in (2, 3, 0, 1)]


def test_an_interactive_newcomer_overtakes_a_batch_prompt_that_is_still_behind() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=8))
    slow, quick = job(30, 1, klass=BATCH), job(6, 1)
    world.engine.add(slow)
    world.step()
    world.engine.add(quick)
    world.step()
    assert world.scheduled[-1] == [(quick.request_id, 6), (slow.request_id, 2)]


def test_when_blocks_run_out_the_last_in_order_is_recomputed_later_and_gets_the_same_tokens() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=6, block_size=4))
    jobs = [job(6, 14), job(6, 14), job(6, 14)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    assert world.engine.scheduler.preemptions >= 1
    for each in jobs:
        assert world.tokens(each) == completion_of(each.prompt, 14)
    assert world.report(jobs[0]).preemptions == 0, "the first in order is never pushed out"
    assert sum(world.report(each).recomputed_tokens for each in jobs) > 0


def test_an_interactive_newcomer_pushes_out_batch_but_never_its_own_class() -> None:
    model = limits(num_blocks=8, block_size=4)
    world = World(EngineConfig(max_batch=4, step_tokens=64), model)
    first, deferred = job(8, 8), job(8, 8, klass=BATCH)
    world.engine.add(first)
    world.engine.add(deferred)
    world.step()
    newcomer, second = job(10, 2), job(12, 2)
    world.engine.add(newcomer)
    world.engine.add(second)
    world.step()
    running = {s.job.request_id for s in world.engine.scheduler.running}
    assert running == {first.request_id, newcomer.request_id}
    world.run()
    assert world.report(deferred).preemptions == 1
    assert world.report(first).preemptions == world.report(second).preemptions == 0
    for each in (first, deferred, newcomer, second):
        assert world.tokens(each) == completion_of(each.prompt, each.sampling.max_tokens)


def test_who_was_pushed_out_and_finds_room_at_once_gets_its_rows_once() -> None:
    """Two prompts still behind are pushed out, the last and the one whose blocks are needed; the last fits again."""
    world = World(EngineConfig(max_batch=4, step_tokens=8), limits(num_blocks=16, block_size=4, context_length=64))
    large, small = job(32, 2, klass=BATCH), job(10, 2, klass=BATCH)
    world.engine.add(large)
    for _ in range(3):
        world.step()
    world.engine.add(small)
    world.step()  # seven rows of the large one's last chunk, one of the small one
    newcomer = job(26, 2)
    world.engine.add(newcomer)
    while world.engine.has_work:
        world.step()
        rows = sum(count for _, count in world.scheduled[-1])
        assert rows == 8 or not any(s.missing > 1 for s in world.engine.scheduler.running)
    for each in (large, small, newcomer):
        assert world.tokens(each) == completion_of(each.prompt, 2)


def test_batch_is_not_pushed_out_when_that_would_not_make_room() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=8, block_size=4))
    first, deferred, newcomer = job(16, 4), job(4, 4, klass=BATCH), job(20, 2)
    world.engine.add(first)
    world.engine.add(deferred)
    world.step()
    world.engine.add(newcomer)
    world.run()
    assert world.report(deferred).preemptions == 0


def test_a_newcomer_leaves_a_block_for_each_running_sequence_to_grow_into() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=8, block_size=4))
    first, second, newcomer = job(8, 2), job(8, 2), job(12, 2)
    world.engine.add(first)
    world.engine.add(second)
    world.engine.add(newcomer)  # three blocks and one for each of two: five, and four are free
    world.step()
    assert world.engine.scheduler.kv.free == 4
    assert len(world.engine.scheduler.running) == 2
    world.run()
    assert world.engine.scheduler.preemptions == 0
    assert len(world.tokens(newcomer)) == 2


def test_a_request_that_fills_the_whole_memory_runs_beside_others_to_its_end() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=16), limits(num_blocks=8, block_size=4))
    jobs = [job(3, 3), job(20, 12), job(3, 9), job(31, 1), job(5, 5, klass=BATCH)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    for each in jobs:
        assert world.tokens(each) == completion_of(each.prompt, each.sampling.max_tokens)


def test_random_loads_on_a_tight_memory_always_end_with_the_right_tokens() -> None:
    preemptions = 0
    for seed in range(30):
        noise = random.Random(seed)
        config = EngineConfig(max_batch=noise.randint(1, 6), step_tokens=noise.randint(6, 24))
        world = World(config, limits(num_blocks=noise.randint(8, 14), block_size=4))
        jobs = [
            job(noise.randint(1, 20), noise.randint(1, 12), klass=noise.choice(list(JobClass)))
            for _ in range(noise.randint(1, 25))
        ]
        for each in jobs:
            world.engine.add(each)
            if noise.random() < 0.5:
                world.step()
        world.run()
        preemptions += world.engine.scheduler.preemptions
        for each in jobs:
            assert world.tokens(each) == completion_of(each.prompt, each.sampling.max_tokens)
    assert preemptions > 30


def test_a_batch_that_does_not_fit_into_a_step_is_refused_at_the_root() -> None:
    with pytest.raises(ConfigError, match="STEP_TOKENS"):
        EngineConfig(max_batch=9, step_tokens=8)


def test_ten_thousand_waiting_cost_no_more_than_ten() -> None:
    """Counted in looks at sequences, not in time."""
    looks = {}
    for waiting in (10, 10_000):
        scheduler = Scheduler(EngineConfig(max_batch=4, step_tokens=8), limits())
        for number in range(waiting):
            each = job(8, 4)
            scheduler.add(
                Sequence(
                    job=each,
                    arrival=number,
                    tokens=each.prompt,
                    prompt=8,
                    given=8,
                    received_at=0.0,
                    received_ns=0,
                    inbox_ns=0,
                )
            )
        scheduler.schedule(1)
        counted = _Counting()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sequence, "order", counted.wrap(Sequence.order))
            scheduler.schedule(2)
        looks[waiting] = counted.calls
    assert looks[10_000] == looks[10]


class _Counting:
    def __init__(self) -> None:
        self.calls = 0

    def wrap(self, inner):
        def outer(sequence):
            self.calls += 1
            return inner(sequence)

        return outer
