import itertools
import math
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import shares as module
from engine.plan import Chunk
from engine.protocol import Sampling
from engine.shares import largest_remainder, of_rows, shapley, shares
from engine.work import KNOTS, SIZE, attended, by_rule, load, quantities
from tests.engine.world import limits


def chunk(rows: int, start: int = 0, *, draws: bool = True) -> Chunk:
    return Chunk(
        request_id=UUID(int=1),
        choice=0,
        tokens=[1] * rows,
        start=start,
        blocks=(0,),
        given=start + rows,
        watermark=0,
        draws=draws,
        position=0,
        sampling=Sampling(max_tokens=1),
    )


RULE = by_rule(limits(), fixed_rows=16)
loads = st.builds(lambda *a: load(chunk(*a)), st.integers(1, 4096), st.integers(0, 100_000))
small = st.builds(lambda *a: load(chunk(*a)), st.one_of(st.just(1), st.integers(1, 200)), st.integers(0, 3000))
costs = st.one_of(st.just(0.0), st.floats(1e-3, 1e9))
coefficients = st.lists(costs, min_size=SIZE, max_size=SIZE)
slopes = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), min_size=len(KNOTS), max_size=len(KNOTS))


def worth(step: list, costs: list[float]) -> float:
    return sum(c * q for c, q in zip(costs, quantities(step), strict=True)) if step else 0.0


def by_definition(players: list, costs: list[float]) -> list[float]:
    """The mean over all orders of what each adds to those before it."""
    values = [0.0] * len(players)
    for order in itertools.permutations(range(len(players))):
        for place, who in enumerate(order):
            before = [players[i] for i in order[:place]]
            values[who] += worth([*before, players[who]], costs) - worth(before, costs)
    return [value / math.factorial(len(players)) for value in values]


@settings(deadline=None)
@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**20), min_size=1, max_size=40).filter(any))
def test_parts_add_up_and_each_is_within_one_of_its_proportion(total: int, weights: list[int]) -> None:
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    assert all(abs(part * whole - total * weight) < whole for part, weight in zip(parts, weights, strict=True))


@settings(deadline=None)
@given(st.integers(0, 10**12), st.lists(loads, min_size=1, max_size=40), coefficients)
def test_shares_add_up_to_the_step_and_are_never_negative(step_ns: int, step: list, costs: list[float]) -> None:
    parts = shares(step_ns, step, costs)
    assert sum(parts) == step_ns
    assert min(parts) >= 0


@settings(deadline=None)
@given(st.lists(small, min_size=1, max_size=5), coefficients)
def test_each_share_is_the_mean_over_all_orders_of_what_a_sequence_adds(step: list, costs: list[float]) -> None:
    rounding = 1e-9 * worth(step, costs)
    assert shapley(step, costs) == pytest.approx(by_definition(step, costs), rel=1e-6, abs=rounding)


@settings(deadline=None)
@given(st.lists(small, min_size=1, max_size=60), coefficients)
def test_values_add_up_to_what_the_model_says_of_the_step(step: list, costs: list[float]) -> None:
    assert sum(shapley(step, costs)) == pytest.approx(worth(step, costs), rel=1e-9, abs=1e-6)


@settings(deadline=None)
@given(st.lists(small, min_size=2, max_size=60), coefficients, st.randoms())
def test_equals_pay_alike_and_the_order_in_the_plan_does_not_matter(step: list, costs: list[float], noise) -> None:
    step = [*step, step[0]]
    values = shapley(step, costs)
    assert values[0] == values[-1]
    places = list(range(len(step)))
    noise.shuffle(places)
    shuffled = shapley([step[place] for place in places], costs)
    assert [shuffled[places.index(i)] for i in range(len(step))] == pytest.approx(values, rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=30), slopes)
def test_who_brings_more_rows_never_pays_less(rows: list[int], slopes: list[float]) -> None:
    values = [value for _, value in sorted(of_rows(rows, slopes).items())]
    assert all(less <= more * (1 + 1e-9) + 1e-9 for less, more in itertools.pairwise(values))


def test_the_closed_form_for_many_sizes_is_near_the_exact_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a curve that bends as those measured on a CPU do; the part beside it is as large as on one."""
    slopes, fixed = [2e6, 5e6, 4e6, 3e6, 3e6], 40e6
    for rows in ([1] * 6 + [40], [1] * 9 + [20, 30], [1, 1, 1, 3, 8, 13, 40], [1, 2, 4, 8, 16, 32]):
        exact = of_rows(rows, slopes)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CASES", 0)
            fluid = of_rows(rows, slopes)
        assert fluid != exact
        for size in set(rows):
            assert fluid[size] + fixed / len(rows) == pytest.approx(exact[size] + fixed / len(rows), rel=0.2)


def test_two_hundred_sequences_and_as_many_sizes_take_no_more_cases() -> None:
    values = of_rows([*range(1, 200), *[1] * 200], [1.0, 0.0, 2.0, 1.0, 3.0])
    assert len(values) == 199


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 300))
def test_attended_pairs_are_counted_exactly(start: int, rows: int) -> None:
    assert attended(chunk(rows, start)) == sum(position + 1 for position in range(start, start + rows))


def split(*chunks: Chunk, step_ns: int = 1_000_000_000) -> list[int]:
    """By the rule that holds before anything was measured."""
    return shares(step_ns, [load(each) for each in chunks], RULE)


def test_a_long_context_costs_more_than_a_short_one() -> None:
    near, far = split(chunk(1, 10), chunk(1, 10_000))
    assert far > near


def test_who_draws_pays_for_the_head() -> None:
    draws, waits = split(chunk(8), chunk(8, draws=False))
    assert draws > waits


def test_in_one_step_a_prompt_of_a_thousand_costs_many_times_one_of_twenty() -> None:
    short, long = split(chunk(20), chunk(1000))
    assert long >= 5 * short


def test_with_a_model_that_knows_nothing_all_pay_alike() -> None:
    assert shares(9, [load(chunk(3)), load(chunk(50)), load(chunk(1, 900))], [0.0] * SIZE) == [3, 3, 3]
