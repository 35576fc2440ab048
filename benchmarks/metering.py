"""What the meter itself costs: the same requests with it and without it, in turns.

Without it means an engine that counts tokens and books each step whole to its first sequence. Both the time outside of
the executor's call and the whole run are compared: the first is where the meter works, and is hardly noisy; the second
would show what it does to the rest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.attribution import engine_of, fresh, job
from engine.config import EngineConfig
from engine.core import Engine
from engine.meter import Meter
from engine.plan import ModelLimits, Runner, StepPlan, StepResult

_REQUESTS = ((48, 16),) * 8
_RESAMPLES = 2000


class Unmetered(Meter):
    def book(self, plan: StepPlan, result: StepResult, limits: ModelLimits, held_ns: int) -> None:  # noqa: ARG002
        self._share_out(plan, [held_ns, *[0] * (len(plan.chunks) - 1)])
        for chunk in plan.chunks:
            self._accounts[chunk.request_id].count(chunk, len(plan.chunks))
        self._tally.count(result.rows, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    wall_ns: int
    outside_ns: int  # of the executor's calls
    steps: int


def timed(engine: Engine) -> Timing:
    for lengths in _REQUESTS:
        engine.add(job(fresh(lengths)))
    started, held_ns, steps = time.perf_counter_ns(), 0, 0
    while engine.has_work:
        output = engine.step()
        held_ns += output.held_ns
        steps += output.plan is not None
    wall_ns = time.perf_counter_ns() - started
    return Timing(wall_ns, wall_ns - held_ns, steps)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and 95 % of the means of resamples lie between the other two."""
    noise = random.Random(0)
    means = sorted(fmean(noise.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return fmean(values), means[_RESAMPLES * 25 // 1000], means[_RESAMPLES * 975 // 1000]


def report(runner: Runner, *, pairs: int) -> None:
    config = EngineConfig(max_batch=len(_REQUESTS))
    metered, unmetered = engine_of(runner, config), engine_of(runner, config, Unmetered)
    for engine in (metered, unmetered):
        for _ in range(3):  # the model is fitted from the 64th step on
            timed(engine)
    outside, whole, per_step = [], [], []
    for number in range(pairs):
        turns = (metered, unmetered) if number % 2 else (unmetered, metered)
        times = {engine: timed(engine) for engine in turns}
        on, off = times[metered], times[unmetered]
        outside.append((on.outside_ns - off.outside_ns) / off.wall_ns)
        whole.append(on.wall_ns / off.wall_ns - 1)
        per_step.append((on.outside_ns - off.outside_ns) / on.steps / 1e3)
    print(f"\nThe meter's own cost: {len(_REQUESTS)} requests at once, {pairs} pairs on and off, 95 % interval")
    for what, values in (("its own work, of the run", outside), ("the whole run, on against off", whole)):
        mean, low, high = interval(values)
        print(f"  {what:32} {mean:+8.3%}  [{low:+.3%}, {high:+.3%}]")
    mean, low, high = interval(per_step)
    print(f"  {'its own work, a step':32} {mean:+7.1f} µs  [{low:+.1f}, {high:+.1f}]")
