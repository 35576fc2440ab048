"""Prices and rates are appended, hold from a moment on, and never change what is booked."""

from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text

from billing.database import transaction
from billing.prices import Amounts, RateError, list_prices, set_price
from billing.rates import list_device_rates, list_devices, set_device_rate
from billing.recording import record
from billing.tenants import add_tenant
from tests.billing.conftest import AMOUNTS, DEVICE, KIND, MODEL, NOW, attempt, id_at, origin, settlement
from tests.billing.test_recording import row

DOUBLE = Amounts(input=AMOUNTS.input * 2, output=AMOUNTS.output * 2)
HOUR = timedelta(hours=1)


def booked(books, *, at=NOW, **changes):
    done = settlement(id_at(at), origin=origin(created_at=at, **changes), finished_at=at)
    record(books, settlements=[done], attempts=[attempt(done.request_id, finished_at=at)])
    return row(books, done.request_id)


def test_a_request_without_a_price_is_unpriced_until_one_is_set(books):
    unpriced = booked(books)
    assert (unpriced["price"], unpriced["price_id"], unpriced["cost"]) == (None, None, None)
    _, healed = set_price(books, MODEL, AMOUNTS, actor="test")
    assert healed == 0, "its device has no rate yet"
    assert row(books, unpriced["id"])["price"] == 20 * AMOUNTS.input + 7 * AMOUNTS.output
    _, healed = set_device_rate(books, Decimal("0.36"), device_kind=KIND, actor="test")
    assert healed == 1
    assert row(books, unpriced["id"])["cost"] == Decimal("0.000001")


def test_a_later_price_leaves_what_was_charged_alone(books):
    first, _ = set_price(books, MODEL, AMOUNTS, actor="test")
    charged = booked(books)
    second, _ = set_price(books, MODEL, DOUBLE, effective_from=NOW + HOUR, actor="test")
    before, after = booked(books, at=NOW + HOUR - timedelta(seconds=1)), booked(books, at=NOW + HOUR)
    assert (charged["price_id"], before["price_id"], after["price_id"]) == (first, first, second)
    assert after["price"] == 2 * before["price"]
    record(books, attempts=[attempt(charged["id"], 2)])
    assert row(books, charged["id"])["price_id"] == first


def test_a_tenants_own_price_comes_before_everybodys(books):
    tenant = add_tenant(books, "acme", actor="test")
    set_price(books, MODEL, AMOUNTS, actor="test")
    set_price(books, MODEL, DOUBLE, tenant_id=tenant.id, effective_from=NOW + HOUR, actor="test")
    set_price(books, MODEL, AMOUNTS, effective_from=NOW + 2 * HOUR, actor="test")
    for at in (NOW + HOUR, NOW + 2 * HOUR):
        ours, theirs = booked(books, at=at, tenant_id=tenant.id), booked(books, at=at)
        assert ours["price"] == 2 * theirs["price"]


def test_a_price_per_device_second_waits_for_the_report(books):
    set_price(books, MODEL, Amounts(input=Decimal(0), output=Decimal(0), device_second=Decimal("0.5")), actor="test")
    done = settlement()
    record(books, settlements=[done])
    waiting = row(books, done.request_id)
    assert (waiting["price"], waiting["pending"]) == (None, True)
    assert waiting["price_id"] is not None
    record(books, attempts=[attempt(done.request_id, used_ns=1)])
    assert row(books, done.request_id)["price"] == Decimal("0.0000000005")


def test_a_price_cannot_reach_back_over_one_in_force_nor_stand_beside_it(books):
    set_price(books, MODEL, AMOUNTS, actor="test")
    with pytest.raises(RateError, match="reach back"):
        set_price(books, MODEL, DOUBLE, effective_from=NOW - HOUR, actor="test")
    tenant = add_tenant(books, "acme", actor="test")
    with pytest.raises(RateError, match="reach back"):
        set_price(books, MODEL, DOUBLE, tenant_id=tenant.id, effective_from=NOW - HOUR, actor="test")
    set_price(books, MODEL, DOUBLE, effective_from=NOW + HOUR, actor="test")
    with pytest.raises(RateError, match="already is"):
        set_price(books, MODEL, DOUBLE, effective_from=NOW + HOUR, actor="test")
    set_device_rate(books, Decimal(1), device_kind=KIND, actor="test")
    with pytest.raises(RateError, match="reach back"):
        set_device_rate(books, Decimal(2), device_kind=KIND, effective_from=NOW - HOUR, actor="test")
    with pytest.raises(RateError, match="not both"):
        set_device_rate(books, Decimal(2), device_kind=KIND, device=DEVICE, actor="test")


@pytest.mark.parametrize("amount", ["-1", "1e9", "NaN", "Infinity", "1e-19"])
def test_amounts_that_would_break_the_arithmetic_are_refused(books, amount):
    with pytest.raises(RateError):
        Amounts(input=Decimal(amount), output=Decimal(0))
    with pytest.raises(RateError):
        set_device_rate(books, Decimal(amount), device_kind=KIND, actor="test")


def test_one_devices_rate_comes_before_its_kinds(books):
    set_price(books, MODEL, AMOUNTS, actor="test")
    set_device_rate(books, Decimal("0.36"), device_kind=KIND, actor="test")
    set_device_rate(books, Decimal("0.72"), device=DEVICE, effective_from=NOW + HOUR, actor="test")
    assert booked(books)["cost"] == Decimal("0.000001")
    set_device_rate(books, Decimal("0.36"), device_kind=KIND, effective_from=NOW + 2 * HOUR, actor="test")
    assert booked(books, at=NOW + HOUR)["cost"] == Decimal("0.000002")
    assert booked(books, at=NOW + 2 * HOUR)["cost"] == Decimal("0.000002")
    (device,) = list_devices(books)
    assert (device.name, device.kind, device.hourly) == (DEVICE, KIND, Decimal("0.36"))


def test_lists_say_what_is_in_force(rated):
    with transaction(rated) as books:
        set_price(books, MODEL, DOUBLE, effective_from=NOW + HOUR, actor="test")
        set_device_rate(books, Decimal(9), device_kind=KIND, effective_from=NOW + HOUR, actor="test")
        assert [(p.amounts.input, p.in_force) for p in list_prices(books)] == [
            (DOUBLE.input, False),
            (AMOUNTS.input, True),
        ]
        assert [(r.hourly, r.in_force) for r in list_device_rates(books)] == [(9, False), (Decimal("0.36"), True)]
        logged = books.scalars(text("SELECT action FROM audit_log ORDER BY id")).all()
    assert logged == ["price.set", "device-rate.set", "price.set", "device-rate.set"]
