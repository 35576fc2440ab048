"""The bench of the meter, in a world in which a step takes exactly what the model says it can take."""

from dataclasses import dataclass, replace
from statistics import median

import pytest

from benchmarks import attribution
from engine.config import EngineConfig
from engine.plan import ModelLimits, Rows, StepPlan, StepResult
from engine.work import load
from tests.engine.test_step_time import true_ns
from tests.engine.world import Clock, limits


@dataclass
class TimedRunner:
    clock: Clock
    limits: ModelLimits

    def execute(self, plan: StepPlan) -> StepResult:
        device_ns = true_ns([load(chunk) for chunk in plan.chunks])
        self.clock.ns += device_ns
        return StepResult(drawn=[1 if c.draws else None for c in plan.chunks], device_ns=device_ns, rows=Rows())


@pytest.fixture(scope="module")
def measured() -> dict[str, list[attribution.Repeat]]:
    clock = Clock()
    runner = TimedRunner(clock, replace(limits(num_blocks=1000, context_length=1100), vocab_size=49_152))
    engine = attribution.engine_of(runner, EngineConfig(max_batch=8), clock=clock)
    attribution.measure(engine, attribution.SETS, repeats=1)
    return attribution.measure(engine, attribution.SETS, repeats=2)


def test_true_values_are_those_of_the_definition() -> None:
    """A part that all share, one that each brings, and one that two need together."""
    brings = [1.0, 2.0, 3.0, 4.0]
    game = {who: 12 + sum(brings[i] for i in who) + 10 * ({0, 1} <= who) for who in attribution.subsets()}
    assert attribution.shapley(game) == pytest.approx([3 + 1 + 5, 3 + 2 + 5, 3 + 3, 3 + 4])


def test_without_noise_the_meter_is_near_the_truth_and_the_baselines_are_not(measured) -> None:
    found = {
        name: median(error for repeats in measured.values() for error in attribution.errors(repeats, says))
        for name, says in attribution.SAYS.items()
    }
    assert found["noise"] == 0
    assert found["meter"] < 0.04, "what is left: a step is shared out by itself, a run of steps is not their sum"
    assert found["meter"] < min(found["by tokens"], found["by wall"]) / 3


def test_the_totals_of_tenants_are_nearer_still(measured) -> None:
    hours = sorted(attribution.tenant_hours(measured, "meter"))
    assert len(hours) == 4**4
    assert median(hours) < 0.02
