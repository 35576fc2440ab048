import subprocess
import sys
from uuid import UUID

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.intake import Fence
from engine.meter import unaccounted_ns
from engine.protocol import AbortReason, ErrorCode, FinishReason, Job, Kind, Outcome
from tests.engine.world import EOS, VOCABULARY, World, completion_of, job, limits, prompt_of


def test_the_deciding_half_imports_no_torch() -> None:
    command = "import engine.core, engine.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_tokens_are_those_of_the_model_alone_whatever_else_is_in_the_batch() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=8), limits(num_blocks=10, block_size=4))
    jobs = [job(length, 9) for length in (1, 7, 13, 22, 4, 9)]
    for each in jobs:
        world.engine.add(each)
        world.step()
    world.run()
    assert world.engine.scheduler.preemptions > 0
    assert any(not c.draws for plan in world.runner.plans for c in plan.chunks), "a prompt was computed in chunks"
    for each in jobs:
        assert world.tokens(each) == completion_of(each.prompt, 9)
        assert world.last_event(each).finish is FinishReason.LENGTH
        assert world.report(each).generated_tokens == 9


def _prompt_that_ends(at_most: int) -> list[int]:
    """A prompt whose completion reaches the end of sequence after two to ``at_most`` tokens."""
    prompts = (prompt_of(6, seed) for seed in range(10_000))
    return next(p for p in prompts if 2 < len(completion_of(p, at_most, ignore_eos=False)) < at_most)


def test_the_end_of_sequence_stops_is_delivered_and_is_counted() -> None:
    world = World()
    asked = job(_prompt_that_ends(20), 20, ignore_eos=False)
    world.engine.add(asked)
    world.run()
    expected = completion_of(asked.prompt, 20, ignore_eos=False)
    assert world.tokens(asked) == expected
    assert expected[-1] == EOS
    assert world.last_event(asked).finish is FinishReason.STOP
    assert world.report(asked).generated_tokens == len(expected)


def test_ignoring_the_end_of_sequence_goes_on_to_max_tokens() -> None:
    world = World()
    asked = job(_prompt_that_ends(20), 20, ignore_eos=True)
    world.engine.add(asked)
    world.run()
    assert len(world.tokens(asked)) == 20


def test_before_min_tokens_nothing_that_would_end_the_completion_is_drawn() -> None:
    world = World()
    prompt = _prompt_that_ends(8)
    asked = job(prompt, 20, ignore_eos=False, min_tokens=10)
    world.engine.add(asked)
    world.run()
    assert world.tokens(asked) == completion_of(prompt, 20, min_tokens=10, ignore_eos=False)
    assert EOS not in world.tokens(asked)[:10]
    stop = completion_of(prompt, 2)[1]
    banned = job(prompt, 20, ignore_eos=True, min_tokens=3, stop_token_ids=(stop,))
    world.engine.add(banned)
    world.run()
    assert stop not in world.tokens(banned)[:3]


def test_a_stop_token_id_stops_and_is_delivered() -> None:
    world = World()
    prompt = prompt_of(6)
    asked = job(prompt, 20, stop_token_ids=(completion_of(prompt, 5)[4],))
    world.engine.add(asked)
    world.run()
    assert world.tokens(asked) == completion_of(prompt, 5)
    assert world.last_event(asked).finish is FinishReason.STOP


@pytest.mark.parametrize("known", range(1, 12))
def test_a_resumed_completion_goes_on_where_it_was_and_repeats_nothing(known: int) -> None:
    world = World()
    whole = completion_of(prompt_of(6), 12)
    asked = job(prompt_of(6), 12, attempt=2, generated=whole[:known])
    world.engine.add(asked)
    world.run()
    assert world.tokens(asked) == whole
    assert sum(len(event.ids) for event in world.events) == 12 - known
    assert [c.position for p in world.runner.plans for c in p.chunks if c.draws] == list(range(known, 12))
    report = world.report(asked)
    assert (report.prompt_tokens, report.generated_tokens) == (6 + known, 12 - known)


def test_a_resumed_completion_that_had_ended_finishes_without_a_step() -> None:
    world = World()
    full = job(4, 3, attempt=2, generated=[7, 8, 9])
    ended = job(4, 9, attempt=2, generated=[7, EOS], ignore_eos=False)
    stopped = job(4, 9, attempt=2, generated=[7, 30], stop_token_ids=(30,))
    nothing_asked = job(4, 0)
    for each in (full, ended, stopped, nothing_asked):
        world.engine.add(each)
    world.run()
    assert world.runner.plans == []
    reasons = [world.last_event(each).finish for each in (full, ended, stopped, nothing_asked)]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert world.last_event(full).index == 3
    assert world.report(full).used_ns == 0


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (job(60, 5), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (job(65, 1), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (job(30, 11), ErrorCode.KV_CAPACITY_EXCEEDED),
        (job([], 5), ErrorCode.EMPTY_PROMPT),
        (job([1, VOCABULARY], 5), ErrorCode.OUT_OF_VOCABULARY),
        (job([1, -1], 5), ErrorCode.OUT_OF_VOCABULARY),
        (job(5, 5, generated=[VOCABULARY]), ErrorCode.OUT_OF_VOCABULARY),
        (job(5, 5, stop_token_ids=(VOCABULARY,)), ErrorCode.OUT_OF_VOCABULARY),
        (job(5, 5, min_tokens=6), ErrorCode.INVALID_SAMPLING),
        (job(5, -1), ErrorCode.INVALID_SAMPLING),
        (job(5, 5, temperature=float("nan")), ErrorCode.INVALID_SAMPLING),
        (job(5, 5, temperature=float("inf")), ErrorCode.INVALID_SAMPLING),
        (job(5, 5, top_p=0.0), ErrorCode.INVALID_SAMPLING),
        (job(5, 5, kind=Kind.EMBED), ErrorCode.UNSUPPORTED_KIND),
        (job(5, 5, adapter="a"), ErrorCode.UNSUPPORTED_ADAPTER),
        (job(5, 5, grammar="{}"), ErrorCode.UNSUPPORTED_GRAMMAR),
    ],
)
def test_what_can_never_run_is_refused_with_a_code_and_the_others_go_on(asked: Job, code: ErrorCode) -> None:
    world = World(model=limits(num_blocks=10, block_size=4))
    other = job(5, 3, request_id=UUID(int=asked.request_id.int + (1 << 64)))
    world.engine.add(other)
    world.engine.add(asked)
    world.run()
    event, report = world.last_event(asked), world.report(asked)
    assert (event.finish, event.error, report.outcome, report.error) == ("refused", code, Outcome.REFUSED, code)
    assert (report.used_ns, report.steps) == (0, 0)
    assert len(world.tokens(other)) == 3


def test_a_job_that_fits_to_the_last_token_runs() -> None:
    world = World(model=limits(num_blocks=10, block_size=4, context_length=40))
    asked = job(30, 10)
    world.engine.add(asked)
    world.run()
    assert world.tokens(asked) == completion_of(asked.prompt, 10)


def test_a_deadline_passes_on_arrival_while_waiting_and_while_running() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    soon = world.clock.wall() + 1
    late, running, waiting = job(4, 9, deadline=soon - 2), job(4, 9, deadline=soon), job(4, 9, deadline=soon)
    running = replace(running, origin=replace(running.origin, stream=False))
    calm = job(4, 2)
    for each in (late, running, waiting, calm):
        world.engine.add(each)
    world.step()
    world.clock.ns += 2 * 10**9
    world.run()
    for each in (late, running, waiting):
        report = world.report(each)
        assert (report.outcome, report.error) == (Outcome.EXPIRED, ErrorCode.DEADLINE_EXCEEDED)
        assert world.last_event(each).finish is FinishReason.EXPIRED
    assert world.report(running).wasted_ns["failed"] > 0
    assert len(world.tokens(calm)) == 2


def test_what_a_stream_was_told_before_its_deadline_served_it_and_is_no_waste() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=8))
    soon = world.clock.wall() + 1
    told, untold = job(4, 9, deadline=soon), job(12, 9, deadline=soon)
    for each in (told, untold):
        world.engine.add(each)
    world.step()
    world.clock.ns += 2 * 10**9
    world.run()
    assert (len(world.tokens(told)), len(world.tokens(untold))) == (1, 0)
    assert (world.report(told).wasted_ns, world.report(told).used_ns > 0) == ({}, True)
    assert (world.report(untold).wasted_ns["failed"] > 0, world.report(untold).used_ns) == (True, 0)


def test_a_deadline_that_is_no_number_has_passed_and_disturbs_no_other() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    soon = world.clock.wall() + 1
    strange = [job(4, 9, deadline=float("nan")) for _ in range(3)]
    timely = [job(4, 20, deadline=soon), job(4, 2)]
    for each in (*strange, *timely):
        world.engine.add(each)
    world.step()
    world.clock.ns += 2 * 10**9
    world.run()
    assert [world.report(each).outcome for each in strange] == [Outcome.EXPIRED] * 3
    assert [world.report(each).outcome for each in timely] == [Outcome.EXPIRED, Outcome.COMPLETED]


def test_an_attempt_that_has_used_its_device_seconds_expires() -> None:
    world = World()
    world.runner.duration_ns = lambda _: 10**9
    asked = job(4, 30, max_device_seconds=3.5)
    world.engine.add(asked)
    world.run()
    report = world.report(asked)
    assert (report.outcome, report.error) == (Outcome.EXPIRED, ErrorCode.DEVICE_SECONDS_EXCEEDED)
    assert report.generated_tokens == 4


def test_a_lower_or_repeated_attempt_is_dropped_and_a_higher_one_takes_over() -> None:
    world = World()
    first = job(4, 6)
    second = job(first.prompt, 6, request_id=first.request_id, attempt=2, generated=completion_of(first.prompt, 2))
    world.engine.add(first)
    world.step()
    world.step()
    world.engine.add(first)
    world.engine.add(second)
    world.engine.add(first)
    world.engine.add(second)
    world.run()
    assert world.report(first).outcome is Outcome.SUPERSEDED
    assert world.last_event(first).finish is None, "nobody waits for the end of what was superseded"
    assert world.tokens(second) == completion_of(first.prompt, 6)
    assert len(world.reports) == 2
    world.engine.add(first)
    assert not world.engine.has_work


def test_an_abort_reaches_attempts_up_to_its_own_and_those_not_yet_here() -> None:
    world = World()
    first = job(4, 6)
    world.engine.abort(first.request_id, 1, AbortReason.CLIENT_GONE)
    world.engine.add(first)
    assert not world.engine.has_work
    second = job(4, 6, request_id=first.request_id, attempt=2)
    world.engine.add(second)
    world.engine.abort(first.request_id, 1, AbortReason.CLIENT_GONE)
    world.run()
    assert world.report(second).outcome is Outcome.COMPLETED


def test_attempts_are_remembered_up_to_a_bound_and_the_longest_untouched_is_forgotten() -> None:
    fence = Fence(2)
    a, b, c = (UUID(int=i) for i in range(3))
    assert [fence.passes(x, 1) for x in (a, b, a)] == [True, True, False]
    fence.raise_to(a, 2)
    assert fence.passes(c, 1)
    assert fence.passes(a, 2) is False
    assert fence.passes(b, 1) is True, "forgotten"


def test_a_deadline_of_an_overtaken_attempt_does_not_end_the_one_that_overtook_it() -> None:
    world = World()
    soon = world.clock.wall() + 1
    first = job(4, 9, deadline=soon)
    second = job(4, 9, request_id=first.request_id, attempt=2, deadline=soon + 1000)
    world.engine.add(first)
    world.step()
    world.engine.add(second)
    world.clock.ns += 2 * 10**9
    world.run()
    assert world.report(second).outcome is Outcome.COMPLETED


def test_a_client_that_leaves_frees_its_blocks_at_once_and_pays_for_what_it_used() -> None:
    world = World()
    asked = job(20, 20)
    world.engine.add(asked)
    for _ in range(5):
        world.step()
    assert world.engine.scheduler.kv.usage > 0
    world.engine.abort(asked.request_id, 1, AbortReason.CLIENT_GONE)
    assert world.engine.scheduler.kv.usage == 0
    world.run()
    event, report = world.last_event(asked), world.report(asked)
    assert (event.finish, event.ids, event.index) == (FinishReason.CANCELLED, [], report.generated_tokens)
    assert event.device_ns == report.used_ns > 0
    assert report.wasted_ns == {}


def test_a_lost_owner_ends_its_attempts_and_nobody_elses() -> None:
    world = World()
    mine, other = job(4, 6, owner="api-1"), job(4, 6, owner="api-2")
    world.engine.add(mine)
    world.engine.add(other)
    world.step()
    assert world.engine.owners == {"api-1", "api-2"}
    world.engine.abort_owner("api-1")
    output = world.step()
    assert set(output.events) == {"api-2"}
    assert world.engine.owners == {"api-2"}
    world.run()
    assert (world.report(mine).error, world.report(other).outcome) == ("owner_lost", Outcome.COMPLETED)
    assert world.engine.owners == set()


def test_a_step_that_raises_fails_its_attempts_and_the_engine_goes_on() -> None:
    world = World(EngineConfig(max_batch=2, step_tokens=8))
    hit, waiting = [job(4, 6), job(4, 6)], job(4, 6)
    for each in (*hit, waiting):
        world.engine.add(each)
    world.step()
    world.runner.raises = [ValueError("device")]
    assert isinstance(world.step().failure, ValueError)
    world.run()
    for each in hit:
        report = world.report(each)
        assert (report.outcome, report.error, report.used_ns) == (Outcome.FAILED, ErrorCode.STEP_FAILED, 0)
        assert report.wasted_ns["failed"] > 0
        assert (world.last_event(each).finish, world.last_event(each).error) == ("failed", "step_failed")
    assert world.tokens(waiting) == completion_of(waiting.prompt, 6)


def test_what_is_left_at_the_end_of_a_drain_goes_back_to_its_owners_without_a_word() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    running, waiting = job(4, 6), job(4, 6)
    world.engine.add(running)
    world.engine.add(waiting)
    world.step()
    told = len(world.events)
    world.engine.abort_all()
    world.run()
    assert len(world.events) == told
    assert [world.report(each).outcome for each in (running, waiting)] == [Outcome.SUPERSEDED] * 2
    assert world.report(running).used_ns == world.report(waiting).used_ns == 0


def test_stages_of_a_request_are_measured_where_they_happen() -> None:
    world = World(EngineConfig(max_batch=1, step_tokens=8))
    first, second = job(4, 3), job(16, 2)
    world.engine.add(first)
    world.clock.ns += 5000
    world.engine.add(second, inbox_ns=700)
    world.run()
    waited = sum(output.held_ns for output in world.outputs[:3])
    report = world.report(second)
    assert report.queue_ns >= waited + 700
    assert world.last_event(second).queue_ns == report.queue_ns
    chunks = [output.held_ns for output in world.outputs[3:]]
    assert report.prefill_ns >= chunks[0] + chunks[1]
    assert report.decode_ns >= chunks[2]
    assert report.prefill_ns + report.decode_ns < sum(chunks) + 200
    assert (report.steps, report.peak_batch) == (3, 1)
    assert report.kv_block_ns >= 4 * sum(chunks)


def test_device_time_in_events_only_grows_and_ends_at_the_reports() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=6, block_size=4))
    jobs = [job(6, 14), job(6, 14)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    for each in jobs:
        times = [event.device_ns for event in world.events if event.request_id == each.request_id]
        assert times == sorted(times)
        report = world.report(each)
        assert times[-1] == report.used_ns + sum(report.wasted_ns.values())


def test_integrity_finds_an_attempt_that_nobody_schedules() -> None:
    world = World()
    asked = job(4, 6)
    world.engine.add(asked)
    world.step()
    world.engine.scheduler.running.clear()
    with pytest.raises(AssertionError, match="1 attempts live"):
        world.engine.check_integrity()


def test_a_second_of_steps_leaves_almost_nothing_unaccounted() -> None:
    world = World()
    for _ in range(20):
        world.engine.add(job(8, 8))
    world.run()
    interval = world.cut()
    assert unaccounted_ns(interval) == 2 * interval.steps, "one nanosecond of this clock at each switch"
