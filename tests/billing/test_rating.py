"""Money is exact: no digit is lost in a product, and parts sum to the whole."""

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from billing.rating import COST_UNIT, Price, add, cost_of, price_of, share_out, subtract

AMOUNTS = st.decimals(min_value=0, max_value=999_999_999, places=18)
COUNTS = st.integers(0, 1 << 31)
NANOSECONDS = st.integers(0, 10**17)


def price(**amounts) -> Price:
    blank = {"input": Decimal(0), "cached_input": None, "output": Decimal(0), "request": Decimal(0)}
    return Price(id=1, currency="USD", **{**blank, "device_second": Decimal(0), **amounts})


def test_the_hand_calculation():
    found = price_of(
        price(input=Decimal("1.4e-6"), cached_input=Decimal("0.26e-6"), output=Decimal("4.4e-6")),
        prompt=27_147,
        cached=27_146,
        completion=351,
        device_ns=0,
    )
    assert found == Decimal("0.00860376")


PRICES = st.builds(
    price,
    input=AMOUNTS,
    cached_input=st.none() | AMOUNTS,
    output=AMOUNTS,
    request=AMOUNTS,
    device_second=AMOUNTS,
)


@given(PRICES, st.tuples(COUNTS, COUNTS, COUNTS), NANOSECONDS)
def test_a_price_is_the_exact_sum_of_products(p, counts, ns):
    uncached, cached, completion = counts
    found = price_of(p, prompt=uncached + cached, cached=cached, completion=completion, device_ns=ns)
    wanted = (
        uncached * Fraction(p.input)
        + cached * Fraction(p.input if p.cached_input is None else p.cached_input)
        + completion * Fraction(p.output)
        + Fraction(p.request)
        + Fraction(ns, 10**9) * Fraction(p.device_second)
    )
    assert Fraction(found) == wanted


@given(NANOSECONDS, AMOUNTS)
def test_a_cost_is_rounded_once_and_half_to_even(ns, hourly):
    exact = ns * Fraction(hourly) / 3_600_000_000_000
    assert Fraction(cost_of(ns, hourly)) == Fraction(round(exact * 10**18), 10**18), "Python's round is half to even"


def test_half_a_unit_goes_to_the_even_neighbour():
    assert cost_of(36, Decimal("0.00000005")) == Decimal("0.5e-18").quantize(COST_UNIT) == 0
    assert cost_of(108, Decimal("0.00000005")) == Decimal("2e-18")


@given(st.integers(0, 10**30), st.lists(AMOUNTS, min_size=1, max_size=8).filter(any))
def test_shares_sum_to_the_whole_and_differ_from_their_ideal_by_less_than_a_unit(units, weights):
    total = Decimal(units).scaleb(-18)
    parts = share_out(total, weights)
    assert sum(map(Fraction, parts)) == Fraction(total)
    for part, weight in zip(parts, weights, strict=True):
        ideal = Fraction(total) * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(Fraction(part) - ideal) < Fraction(1, 10**18)


@given(st.lists(st.decimals(min_value=-(10**12), max_value=10**12, places=27), max_size=20))
def test_sums_keep_every_digit(amounts):
    assert Fraction(add(amounts)) == sum(map(Fraction, amounts))
    if amounts:
        assert Fraction(subtract(amounts[0], amounts[-1])) == Fraction(amounts[0]) - Fraction(amounts[-1])
