import random

import pytest

from engine.shares import shapley
from engine.step_time import STALL, StepTime
from engine.work import SIZE, Load, by_rule, load, quantities
from tests.engine.test_shares import chunk
from tests.engine.world import limits

RULE = by_rule(limits(), fixed_rows=16)
# As measured of SmolLM2 on two cores, in ns: reading the weights, rows (bent), draws, context, pairs, gathered, chunks.
TRUTH = [30e6, 2e6, 4e6, 2.5e6, 2e6, 2e6, 1e6, 9e3, 1e3, 20e3, 3e6]


def true_ns(step: list[Load], pace: float = 1.0) -> int:
    return round(pace * sum(c * q for c, q in zip(TRUTH, quantities(step), strict=True)))


def some_step(noise: random.Random) -> list[Load]:
    step = [load(chunk(1, noise.randrange(2000))) for _ in range(noise.randrange(17))]
    for _ in range(noise.choice((0, 0, 1, 2)) or not step):
        start = noise.choice((0, noise.randrange(1500)))
        step.append(load(chunk(noise.randrange(2, 60), start, draws=noise.random() < 0.5)))
    return step


def decode(noise: random.Random) -> list[Load]:
    return [load(chunk(1, noise.randrange(50, 400))) for _ in range(noise.randrange(1, 17))]


def taught(steps: int = 1500, noise_share: float = 0.0, seed: int = 1) -> tuple[StepTime, random.Random]:
    model, noise = StepTime(RULE), random.Random(seed)
    for number in range(steps):
        step = some_step(noise) if number % 2 else decode(noise)
        model.learn(step, round(true_ns(step) * (1 + abs(noise.gauss(0, noise_share)))))
    return model, noise


def error(model: StepTime, noise: random.Random, make=some_step, pace: float = 1.0) -> float:
    """Mean over steps that the model has not seen."""
    steps = [make(noise) for _ in range(200)]
    return sum(abs(model.expected(step) / true_ns(step, pace) - 1) for step in steps) / len(steps)


def test_what_has_no_noise_is_learnt_to_the_percent() -> None:
    model, noise = taught()
    assert error(model, noise) < 0.01
    assert model.quality.r2 > 0.999
    assert model.pace == pytest.approx(1, abs=0.01)
    assert model.stalls == 0


def test_noise_of_a_fifth_leaves_shares_of_the_time_right() -> None:
    """All times are above the true ones, as on a busy machine: what counts is their proportion."""
    model, noise = taught(noise_share=0.2)
    assert error(model, noise, pace=1.16) < 0.06
    assert 0.05 < model.quality.error < 0.2


def test_coefficients_are_never_negative_and_so_the_time_grows_with_every_quantity() -> None:
    noise = random.Random(3)
    model = StepTime(RULE)
    for _ in range(600):  # times that have nothing to do with the steps
        model.learn(some_step(noise), noise.randrange(1, 10**9))
        assert min(model.coefficients) >= 0


def test_until_there_is_data_the_rule_holds() -> None:
    model, noise = StepTime(RULE), random.Random(0)
    for _ in range(63):
        step = some_step(noise)
        model.learn(step, true_ns(step))
        assert not model.fitted
        assert model.coefficients == RULE
    model.learn(step, true_ns(step))
    assert model.fitted


def test_what_was_never_seen_apart_is_settled_by_the_rule() -> None:
    """One sequence at a time, always at the same place: fixed part and rows can't be told apart, prompts never came."""
    model, step = StepTime(RULE), [load(chunk(1, 100))]
    for _ in range(200):
        model.learn(step, 50_000_000)
    scale = 50_000_000 / sum(c * q for c, q in zip(RULE, quantities(step), strict=True))
    assert model.expected(step) == pytest.approx(50_000_000, rel=1e-3)
    assert model.coefficients == pytest.approx([scale * value for value in RULE], rel=0.01)


def test_a_night_of_decoding_does_not_erase_what_is_known_of_prompts() -> None:
    model, noise = taught()
    for _ in range(5000):
        step = decode(noise)
        model.learn(step, true_ns(step))
    assert error(model, noise) < 0.02


def test_a_machine_that_has_become_slower_is_learnt_anew_and_shares_stay_right_meanwhile() -> None:
    model, noise = taught()
    for number in range(2000):
        step = some_step(noise) if number % 2 else decode(noise)
        model.learn(step, true_ns(step, pace=1.7))
        if number % 100 == 50:
            true = shapley(step, TRUTH)
            parts = shapley(step, model.coefficients)
            assert [p / sum(parts) for p in parts] == pytest.approx([t / sum(true) for t in true], rel=0.1)
    assert error(model, noise, pace=1.7) < 0.2, "of 0.41 at first"
    assert 1 < model.pace < 1.2, "and what is still missing shows"
    assert model.stalls == 0


def test_a_step_far_over_the_model_is_a_stall_of_just_the_excess() -> None:
    model, noise = taught()
    step = decode(noise)
    usual = true_ns(step)
    assert model.learn(step, round(0.9 * STALL * usual)) == 0
    assert model.learn(step, 20 * usual) == pytest.approx(19 * usual, rel=0.02)
    assert (model.stalls, model.stall_ns) == (1, pytest.approx(19 * usual, rel=0.02))


def test_stalls_do_not_spoil_what_was_learnt() -> None:
    model, noise = taught()
    for number in range(1000):
        step = some_step(noise)
        model.learn(step, true_ns(step, pace=1000 if number % 20 == 0 else 1))
    assert 30 <= model.stalls <= 50, "of kinds that are not known yet nothing can be said"
    assert error(model, noise) < 0.05


def test_when_steps_go_on_being_slow_they_are_no_stalls_any_more() -> None:
    model, noise = taught()
    stalled = []
    for _ in range(200):
        step = decode(noise)
        stalled.append(model.learn(step, true_ns(step, pace=6)) > 0)
    assert stalled[0]
    assert not any(stalled[16:])


def test_of_a_kind_of_step_that_is_new_nothing_is_called_a_stall() -> None:
    model, noise = StepTime(RULE), random.Random(4)
    for _ in range(300):
        step = [load(chunk(1, noise.randrange(50, 60)))]
        model.learn(step, true_ns(step))
    prompt = [load(chunk(128, 1900))]
    assert model.learn(prompt, 100 * round(model.expected(prompt))) == 0


def test_it_keeps_a_bounded_number_of_kinds_and_numbers() -> None:
    model, _ = taught(4000)
    assert len(model._kinds) < 150
    assert all(len(kind.gram) == SIZE * (SIZE + 1) // 2 for kind in model._kinds.values())
