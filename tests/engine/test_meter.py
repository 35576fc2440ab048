import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.meter import unaccounted_ns
from engine.protocol import AbortReason, AttemptReport, Interval, Job, JobClass, Outcome
from engine.timeline import Span, Timeline
from tests.engine.world import TENANT_A, TENANT_B, Clock, World, job, limits


def test_in_a_shared_run_a_prompt_of_a_thousand_costs_five_times_one_of_twenty() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=256), limits(num_blocks=300, context_length=1100))
    long, short = job(1000, 8), job(20, 8)
    world.engine.add(long)
    world.engine.add(short)
    world.run()
    assert world.report(long).used_ns >= 5 * world.report(short).used_ns


def test_a_timeline_is_in_exactly_one_span_and_loses_only_what_lies_between_the_stamps() -> None:
    clock = Clock()
    timeline = Timeline(Span.LOADING, clock)
    started = timeline.cut_ns
    clock.ns += 100
    timeline.enter(Span.IDLE)
    clock.ns += 50
    assert timeline.enter(Span.BUSY) == 51
    clock.ns += 7
    totals = timeline.cut()
    assert totals == {Span.LOADING: 101, Span.IDLE: 51, Span.BUSY: 8, Span.OVERHEAD: 0}
    assert timeline.cut_ns - started - sum(totals.values()) == 2, "two switches, a nanosecond each"
    clock.ns += 5
    assert timeline.cut()[Span.BUSY] == 6


def test_a_step_is_booked_whole_device_time_to_attempts_the_rest_of_the_call_to_overhead() -> None:
    world = World()
    asked = job(5, 1)
    world.cut()
    world.runner.duration_ns = lambda _: 1000
    inner = world.runner.execute

    def slow_host(plan):
        world.clock.ns += 70
        return inner(plan)

    world.runner.execute = slow_host
    world.engine.add(asked)
    world.run()
    interval = world.cut()
    assert (world.report(asked).used_ns, interval.busy_ns) == (1000, 1000)
    assert interval.overhead_ns >= 70
    assert 0 <= unaccounted_ns(interval) <= 4


def test_a_device_clock_that_runs_ahead_cannot_book_more_than_the_call_took() -> None:
    world = World()
    world.runner.execute = _lying(world.runner.execute)
    world.engine.add(job(5, 1))
    world.run()
    assert world.cut().busy_ns == world.outputs[0].held_ns


def _lying(inner):
    def execute(plan):
        result = inner(plan)
        return type(result)(drawn=result.drawn, device_ns=result.device_ns * 3, rows=result.rows)

    return execute


def test_time_that_recomputes_what_a_preemption_threw_away_is_waste_by_rows() -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=64), limits(num_blocks=6, block_size=4))
    jobs = [job(6, 14), job(6, 14)]
    for each in jobs:
        world.engine.add(each)
    world.run()
    report = world.report(jobs[1])
    assert report.preemptions == 1
    assert report.wasted_ns["preemption"] > 0
    assert world.report(jobs[0]).wasted_ns == {}
    _check_books(world, [world.cut()])


def test_what_came_after_a_stop_string_is_waste_and_what_led_to_it_is_not() -> None:
    world = World()
    asked = job(5, 20)
    world.engine.add(asked)
    used_after = []
    for _ in range(6):
        world.step()
        used_after.append(world.engine.meter.account(asked.request_id).used_ns)
    world.engine.abort(asked.request_id, 1, AbortReason.STOP_STRING, keep=4)
    world.run()
    report = world.report(asked)
    assert report.outcome is Outcome.COMPLETED
    assert report.used_ns == used_after[3]
    assert report.wasted_ns == {"stop_overshoot": used_after[5] - used_after[3]}
    _check_books(world, [world.cut()])


@pytest.mark.parametrize(("keep", "wasted_steps"), [(None, 0), (6, 0), (99, 0), (0, 6)])
def test_a_stop_string_abort_wastes_nothing_beyond_what_it_says(keep: int | None, wasted_steps: int) -> None:
    world = World()
    asked = job(5, 20)
    world.engine.add(asked)
    for _ in range(6):
        world.step()
    world.engine.abort(asked.request_id, 1, AbortReason.STOP_STRING, keep=keep)
    world.run()
    wasted = world.report(asked).wasted_ns.get("stop_overshoot", 0)
    assert wasted == (sum(output.result.device_ns for output in world.outputs[:wasted_steps]))


def test_keep_counts_tokens_of_the_whole_completion_resumed_ones_included() -> None:
    world = World()
    asked = job(5, 20, attempt=2, generated=[7, 8, 9])
    world.engine.add(asked)
    for _ in range(3):
        world.step()
    used = world.engine.meter.account(asked.request_id).used_after[1]
    world.engine.abort(asked.request_id, 2, AbortReason.STOP_STRING, keep=5)
    world.run()
    assert world.report(asked).used_ns == used


@pytest.mark.parametrize(
    ("reason", "outcome", "cause"),
    [
        (AbortReason.CLIENT_GONE, Outcome.CANCELLED, None),
        (AbortReason.SUPERSEDED, Outcome.SUPERSEDED, "superseded"),
        (AbortReason.OWNER_LOST, Outcome.CANCELLED, "lost"),
        (AbortReason.OWNER_FAILED, Outcome.FAILED, "failed"),
    ],
)
def test_an_attempt_that_served_nobody_is_waste_as_a_whole(reason, outcome, cause) -> None:
    world = World()
    asked = job(5, 20)
    world.engine.add(asked)
    for _ in range(3):
        world.step()
    spent = world.engine.meter.account(asked.request_id).used_ns
    before = world.cut()
    world.engine.abort(asked.request_id, 1, reason)
    world.run()
    report = world.report(asked)
    assert report.outcome is outcome
    assert (report.used_ns, report.wasted_ns) == ((0, {cause: spent}) if cause else (spent, {}))
    closing = world.cut()
    if cause:
        assert (closing.busy_ns, closing.waste_ns) == (-spent, spent), "the closing interval books the move"
    _check_books(world, [before, closing])


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(0, 12), st.integers(0, 12), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from(AbortReason), st.integers(0, 12)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("stall"), st.integers(2, 1000)),
        st.tuples(st.just("cut")),
        st.tuples(st.just("wait"), st.integers(1, 10_000)),
        st.tuples(st.just("lose owner"), st.integers(0, 2)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(actions, st.integers(8, 14), st.booleans())
def test_the_books_close_on_every_cut_whatever_happens(plan: list[tuple], num_blocks: int, fitted: bool) -> None:
    world = World(EngineConfig(max_batch=4, step_tokens=8), limits(num_blocks=num_blocks))
    jobs = _taught(world) if fitted else []
    for action in plan:
        match action:
            case ("add", prompt, tokens, resumed, other):
                known = [5] * min(resumed, tokens)
                attempt = 1 + bool(known)
                klass = JobClass.BATCH if other else JobClass.INTERACTIVE
                tenant, owner = (TENANT_B, "api-1") if other else (TENANT_A, f"api-{prompt % 3}")
                jobs.append(
                    job(prompt, tokens, generated=known, attempt=attempt, klass=klass, tenant=tenant, owner=owner)
                )
                world.engine.add(jobs[-1])
            case ("abort", which, reason, keep) if jobs:
                target = jobs[which % len(jobs)]
                world.engine.abort(target.request_id, target.attempt, reason, keep=keep)
            case ("step", count):
                for _ in range(count):
                    world.step()
            case ("fail",):
                world.runner.raises = [RuntimeError("device")]
                world.step()
                world.runner.raises = []
            case ("stall", factor):
                _step_of(world, factor)
            case ("cut",):
                world.cut()
            case ("wait", ns):
                world.clock.ns += ns
            case ("lose owner", which):
                world.engine.abort_owner(f"api-{which}")
    world.run()
    world.cut(last=True)
    _check_books(world, world.intervals)
    assert {report.request_id for report in world.reports} == {each.request_id for each in jobs}
    assert len(world.reports) == len(jobs)


def _taught(world: World) -> list[Job]:
    """Steps until the model of their time is fitted, and knows a single decode."""
    jobs = [job(5, 20) for _ in range(4)]
    for each in jobs:
        world.engine.add(each)
        world.run()
    assert world.engine.meter.step_time.fitted
    return jobs


def _step_of(world: World, factor: int) -> int:
    """A step that takes so many times its time; returns what it took more."""
    usual = world.runner.duration_ns
    world.runner.duration_ns = lambda plan: factor * usual(plan)
    output = world.step()
    world.runner.duration_ns = usual
    return (factor - 1) * usual(output.plan) if output.plan else 0


def test_a_stall_is_overhead_and_no_share_of_anybody() -> None:
    world = World()
    _taught(world)
    asked = job(5, 8)
    world.engine.add(asked)
    for _ in range(3):
        world.step()
    before, used = world.cut(), world.engine.meter.account(asked.request_id).used_ns
    excess = _step_of(world, 50)
    assert world.engine.meter.account(asked.request_id).used_ns - used == pytest.approx(1100, rel=0.05)
    interval = world.cut()
    assert interval.overhead_ns == pytest.approx(excess, rel=0.05)
    assert interval.busy_ns == pytest.approx(1100, rel=0.05)
    world.run()
    _check_books(world, [before, interval, world.cut()])


def test_a_step_that_is_merely_slow_is_shared_out_whole() -> None:
    world = World()
    _taught(world)
    asked = job(5, 1)
    world.engine.add(asked)
    world.cut()
    excess = _step_of(world, 2)
    assert world.report(asked).used_ns == world.cut().busy_ns == 2 * excess


def _check_books(world: World, intervals: list[Interval]) -> None:
    """Identity 1 on every cut and identity 2 over all, each from two independently written sources."""
    open_ns = 0
    for interval in intervals:
        closed = [report for report in world.reports if report.interval == interval.number]
        assert interval.busy_ns == sum(report.used_ns for report in closed) + interval.open_ns - open_ns
        open_ns = interval.open_ns
        assert unaccounted_ns(interval) >= 0
    assert open_ns == 0
    assert all(after.start_ns == before.end_ns for before, after in itertools.pairwise(intervals))
    assert [i.number for i in intervals] == list(range(intervals[0].number, intervals[-1].number + 1))
    wasted = sum(sum(report.wasted_ns.values()) for report in world.reports)
    assert sum(i.waste_ns for i in intervals) == wasted
    for kind in ("prompt_tokens", "recomputed_tokens", "generated_tokens"):
        assert sum(getattr(i, kind) for i in intervals) == sum(getattr(r, kind) for r in world.reports)
    assert sum(i.steps for i in intervals) == sum(o.result is not None for o in world.outputs)


def test_steps_that_hold_two_tenants_are_counted() -> None:
    world = World()
    world.engine.add(job(3, 4))
    world.step()
    world.engine.add(job(3, 2, tenant=TENANT_B))
    world.run()
    interval = world.cut()
    assert (interval.steps, interval.mixed_tenant_steps) == (4, 2)


def test_every_report_names_the_interval_in_which_it_closed() -> None:
    world = World()
    first, second = job(3, 1), job(3, 2)
    world.engine.add(first)
    world.engine.add(second)
    world.step()
    world.cut()
    world.run()
    assert [report.interval for report in (world.report(first), world.report(second))] == [1, 2]
    assert isinstance(world.report(first), AttemptReport)
