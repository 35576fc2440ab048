"""What a reader sees of a number is short and never says less than the number does."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard import figures

amounts = st.decimals(min_value="-1e12", max_value="1e12", places=15)


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "$0.00"),
        ("0.5", "$0.500"),
        ("0.01234", "$0.0123"),
        ("0.00001", "$0.0000100"),
        ("0.0000278125", "$0.0000278"),
        ("-0.0000278125", "−$0.0000278"),
        ("0.99999", "$1.00"),
        ("1.006", "$1.01"),
        ("1234567.891", "$1,234,567.89"),
        ("0.00000000002", "$2.00e-11"),
    ],
)
def test_money_has_two_decimals_from_one_on_and_three_digits_below(amount: str, shown: str):
    assert figures.money(Decimal(amount)) == shown


@given(amounts)
def test_an_amount_reads_as_zero_only_when_it_is_zero(amount: Decimal):
    digits = set(figures.money(amount)) & set("123456789")
    assert bool(digits) == (amount != 0)


@given(amounts)
def test_exact_money_keeps_every_digit(amount: Decimal):
    shown = figures.exact_money(amount)
    assert Decimal(shown.replace("\N{MINUS SIGN}", "-").replace("$", "").replace(",", "")) == amount
    assert "$" in shown, "money is written in one way"


def test_an_absent_number_is_a_dash_and_not_a_zero():
    shown = {
        figures.money(None),
        figures.exact_money(None),
        figures.count(None),
        figures.short_count(None),
        figures.percent(None),
        figures.duration(None),
        figures.moment(None),
    }
    assert shown == {figures.ABSENT}


def test_another_currency_is_named():
    assert figures.money(Decimal(2), "CHF") == "CHF\N{NARROW NO-BREAK SPACE}2.00"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.0000123, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.000999999, "1.00 ms"),
        (0.99951, "1.00 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (3661, "1 h 01 min"),
        (90061, "1 d 1 h"),
        (-2, "−2.00 s"),
    ],
)
def test_durations_have_about_three_digits(seconds: float, shown: str):
    assert figures.duration(seconds).replace("\N{NARROW NO-BREAK SPACE}", " ") == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(999_999, "999,999"), (1_234_567, "1.23 M"), (-1, "−1"), (2_500_000_000, "2.50 B")]
)
def test_counts_are_exact_up_to_six_digits(number: int, shown: str):
    assert figures.short_count(number) == shown.replace(" ", "\N{NARROW NO-BREAK SPACE}")


@pytest.mark.parametrize(("ratio", "shown"), [(0, "0.0%"), (0.5, "50.0%"), (0.0001, "0.01%"), (-12.5, "−1,250%")])
def test_ratios_are_percentages(ratio: float, shown: str):
    assert figures.percent(ratio) == shown


def test_a_time_of_another_day_carries_its_day():
    now = datetime(2026, 11, 30, 0, 10, tzinfo=UTC)
    assert figures.clock_time(now, now) == "00:10:00"
    assert figures.clock_time(now - timedelta(minutes=20), now) == "29 Nov 23:50:00"
