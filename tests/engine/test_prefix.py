"""What an earlier sequence computed is taken up by a later one: in tokens, in counts and in the books."""

import random

import pytest

from engine.config import EngineConfig
from engine.protocol import AbortReason, FinishReason, Job, JobClass, Outcome
from tests.engine.owner import check_identities
from tests.engine.world import TENANT_A, TENANT_B, World, completion_of, job, limits, prompt_of

BATCH = JobClass.BATCH
SHARED = prompt_of(512, 1)


def roomy(**changes: object) -> World:
    config = EngineConfig(**({"max_batch": 4, "step_tokens": 128} | changes))
    return World(config, limits(num_blocks=200, block_size=16, context_length=2048))


def rows_of(world: World, asked: Job) -> int:
    return sum(len(chunk.tokens) for plan in world.runner.plans for chunk in plan.chunks if _is(chunk, asked))


def _is(chunk, asked: Job) -> bool:
    return chunk.request_id == asked.request_id


def run_one(world: World, asked: Job) -> Job:
    world.engine.add(asked)
    world.run()
    assert world.tokens(asked) == completion_of(asked.prompt, asked.sampling.max_tokens)[: len(world.tokens(asked))]
    assert world.last_event(asked).finish is FinishReason.LENGTH
    report = world.report(asked)
    given = len(asked.prompt) + len(asked.generated[0] if asked.generated else [])
    assert report.prompt_tokens + report.cached_tokens == given
    return asked


@pytest.mark.parametrize(("own", "computed"), [(0, 16), (1, 1), (16, 16), (17, 17)])
def test_a_second_request_with_a_long_shared_prefix_computes_at_most_a_block_and_its_own(own, computed) -> None:
    world = roomy()
    first = run_one(world, job([*SHARED, 1, 2, 3], 1))
    assert rows_of(world, first) == 515
    second = run_one(world, job([*SHARED, *prompt_of(own, 7)], 1))
    assert rows_of(world, second) == computed
    assert world.report(second).cached_tokens == 512 + own - computed
    assert world.report(second).prompt_tokens == computed
    assert world.last_event(second).cached_tokens == 512 + own - computed
    check_identities([world.cut()], world.reports)


def test_another_tenant_finds_nothing_unless_both_have_one_salt() -> None:
    world = roomy()
    run_one(world, job([*SHARED, 1], 1, tenant=TENANT_A))
    stranger = run_one(world, job([*SHARED, 1], 1, tenant=TENANT_B))
    assert (rows_of(world, stranger), world.report(stranger).cached_tokens) == (513, 0)
    run_one(world, job([*SHARED, 1], 1, tenant=TENANT_A, cache_salt="all"))
    friend = run_one(world, job([*SHARED, 1], 1, tenant=TENANT_B, cache_salt="all"))
    assert (rows_of(world, friend), world.report(friend).cached_tokens) == (1, 512)
    forger = run_one(world, job([*SHARED, 1], 1, tenant=TENANT_B, cache_salt=f"tenant:{TENANT_A}"))
    assert world.report(forger).cached_tokens == 0


def test_switched_off_everything_is_computed_again() -> None:
    world = roomy(prefix_cache=False)
    run_one(world, job(SHARED, 1))
    second = run_one(world, job(SHARED, 1))
    assert (rows_of(world, second), world.report(second).cached_tokens) == (512, 0)


def test_the_next_turn_of_a_conversation_takes_up_the_answer_too() -> None:
    world = roomy()
    question = prompt_of(40)
    first = run_one(world, job(question, 60))
    answer = world.tokens(first)
    second = run_one(world, job([*question, *answer, *prompt_of(10)], 2))
    assert world.report(second).cached_tokens == 96  # of 99 whose KV is there, whole blocks of 16


def test_a_prefix_is_found_while_its_first_owner_still_runs() -> None:
    world = roomy()
    first, second = job([*SHARED, 1], 30), job([*SHARED, 2], 30)
    world.engine.add(first)
    for _ in range(6):
        world.step()
    world.engine.add(second)
    world.run()
    assert world.report(second).cached_tokens == 512
    for each in (first, second):
        assert world.tokens(each) == completion_of(each.prompt, 30)


def test_a_resumed_completion_counts_as_cached_prompt_only_what_is_prompt() -> None:
    world = roomy()
    prompt = prompt_of(24)
    whole = world.tokens(run_one(world, job(prompt, 60)))
    resumed = run_one(world, job(prompt, 60, attempt=2, generated=whole[:40]))
    assert world.report(resumed).cached_tokens == 48
    assert world.last_event(resumed).cached_tokens == 24


def test_what_a_preempted_sequence_finds_again_is_not_recomputed() -> None:
    world = roomy(max_batch=1)
    slow, quick = job(70, 30, klass=BATCH), job(20, 2)
    world.engine.add(slow)
    for _ in range(12):
        world.step()
    world.engine.add(quick)
    world.run()
    report = world.report(slow)
    assert world.tokens(slow) == completion_of(slow.prompt, 30)
    assert (report.preemptions, report.prompt_tokens, report.cached_tokens) == (1, 70, 0)
    assert report.recomputed_tokens == (70 + 12 - 1) % 16
    check_identities([world.cut()], world.reports)


def test_what_others_computed_meanwhile_is_cached_and_not_what_it_had_itself() -> None:
    """A prompt is pushed out after its first chunk, and comes back when another has computed all of it."""
    world = roomy(max_batch=1, step_tokens=40)
    slow = job([*SHARED[:200], 1], 2, klass=BATCH)
    quick = job([*SHARED[:200], 2], 2)
    world.engine.add(slow)
    world.step()
    world.engine.add(quick)
    world.run()
    report = world.report(slow)
    assert report.preemptions == 1
    assert world.report(quick).cached_tokens == 32
    assert (report.prompt_tokens, report.recomputed_tokens, report.cached_tokens) == (40 + 201 - 192, 0, 192 - 40)
    assert world.last_event(slow).cached_tokens == 192 - 40
    check_identities([world.cut()], world.reports)


def test_rows_that_came_from_the_cache_and_were_lost_are_recomputed_and_stay_cached_once() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=16), limits(num_blocks=8, block_size=4, context_length=64))
    run_one(world, job(prompt_of(13, 1), 1))
    slow = job([*prompt_of(13, 1), 5], 10, klass=BATCH)
    world.engine.add(slow)
    world.step()
    assert [s.cached for s in world.engine.scheduler.running] == [12]
    run_one(world, job(30, 2))  # takes all blocks but one
    report = world.report(slow)
    assert (report.preemptions, report.cached_tokens, report.prompt_tokens) == (1, 12, 2)
    assert report.recomputed_tokens > 12
    assert world.tokens(slow) == completion_of(slow.prompt, 10)
    check_identities([world.cut()], world.reports)


def test_a_step_that_raised_leaves_nothing_to_be_found() -> None:
    world = roomy()
    first = job(100, 3)
    world.engine.add(first)
    world.runner.raises = [RuntimeError("device")]
    world.run()
    assert world.report(first).outcome is Outcome.FAILED
    second = run_one(world, job(first.prompt, 3))
    assert world.report(second).cached_tokens == 0


def test_a_full_memory_of_cached_blocks_is_no_less_room() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=16), limits(num_blocks=8, block_size=4, context_length=64))
    for _ in range(5):
        run_one(world, job(24, 8))
        assert world.engine.scheduler.kv.usage == 0
    assert world.engine.scheduler.preemptions == 0
    assert world.engine.scheduler.kv.cached == 7, "the last token of a completion is never computed"


def test_hits_are_counted_in_tokens_of_first_admissions() -> None:
    world = roomy()
    run_one(world, job(SHARED, 1))
    run_one(world, job([*SHARED, 1], 1))
    scheduler = world.engine.scheduler
    assert (scheduler.looked_up_tokens, scheduler.found_tokens) == (512 + 513, 512)


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_operations_lose_no_block_no_token_and_no_nanosecond(seed: int) -> None:
    """Arrivals that begin alike, resumed ones, steps, aborts, failures, cuts; integrity after each step."""
    noise = random.Random(seed)
    world = World(EngineConfig(max_batch=5, step_tokens=24), limits(num_blocks=20, block_size=4))
    stems = [prompt_of(24, number) for number in range(4)]
    jobs: list[Job] = []
    for _ in range(2_500):
        match noise.choices(("add", "step", "abort", "fail", "cut"), (30, 60, 6, 1, 3))[0]:
            case "add" if len(world.engine.scheduler.waiting) < 12:
                jobs.append(_random_job(noise, stems))
                world.engine.add(jobs[-1])
            case "step" if world.engine.has_work:
                world.step()
            case "abort" if jobs:
                reason, target = noise.choice(list(AbortReason)), noise.choice(jobs[-10:])
                world.engine.abort(target.request_id, target.attempt, reason, keep=noise.randint(0, 5))
                world.engine.check_integrity()
            case "fail" if world.engine.has_work:
                world.runner.raises = [RuntimeError("device")]
                world.step()
                world.runner.raises = []
            case "cut":
                world.cut()
    world.run()
    world.cut(last=True)
    check_identities(world.intervals, world.reports)
    reports = {report.request_id: report for report in world.reports}
    assert len(world.reports) == len(reports) == len(jobs)
    for each in jobs:
        whole = completion_of(each.prompt, each.sampling.max_tokens)
        assert world.tokens(each) == whole[: len(world.tokens(each))]
        report = reports[each.request_id]
        if report.steps and len(world.tokens(each)) == each.sampling.max_tokens:
            known = each.generated[0] if each.generated else []
            assert report.prompt_tokens + report.cached_tokens == len(each.prompt) + len(known)
    finished = [each for each in jobs if reports[each.request_id].outcome is Outcome.COMPLETED]
    assert len(finished) > 200
    assert sum(report.cached_tokens > 0 for report in world.reports) > 100
    assert sum(report.preemptions for report in world.reports) > 20
    assert sum(report.recomputed_tokens for report in world.reports) > 0
    assert world.engine.scheduler.kv.free == 20


def _random_job(noise: random.Random, stems: list[list[int]]) -> Job:
    prompt = noise.choice(stems)[: noise.randint(1, 24)] + prompt_of(noise.randint(0, 6), noise.randrange(1000))
    length = noise.randint(1, 20)
    known = completion_of(prompt, noise.randrange(length)) if noise.random() < 0.2 else []
    return job(
        prompt,
        length,
        attempt=1 + bool(known),
        generated=known or None,
        klass=noise.choice(list(JobClass)),
        tenant=noise.choice((TENANT_A, TENANT_B)),
        cache_salt=noise.choice(("", "", "all")),
        owner=f"api-{noise.randrange(3)}",
    )
