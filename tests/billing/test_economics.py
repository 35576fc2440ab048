"""Unit economics close: loaded costs sum to the device time, groups to the total, and what is missing is said."""

from datetime import timedelta
from decimal import Decimal
from uuid import UUID

from billing import economics
from billing.database import transaction
from billing.prices import set_price
from billing.rates import set_device_rate
from billing.recording import record
from billing.refusals import Refusal, add, by_cause
from billing.rollup import QUARTER, roll_up
from tests.billing.conftest import AMOUNTS, KIND, MODEL, NOW, TENANT, attempt, interval, origin, settlement

SPAN = (NOW - timedelta(hours=1), NOW + timedelta(hours=1))
OTHER = UUID(int=TENANT.int + 1)


def report(books) -> economics.Report:
    while roll_up(books):
        pass
    return economics.report(books, *SPAN)


def serve(books, *, used_ns: int, **changes) -> None:
    done = settlement(origin=origin(**changes))
    record(books, settlements=[done], attempts=[attempt(done.request_id, used_ns=used_ns)])


def rate(books, **options) -> None:
    set_device_rate(books, Decimal("0.36"), device_kind=KIND, actor="test", **options)


def test_loaded_costs_sum_to_the_device_time_and_groups_to_the_total(books):
    set_price(books, MODEL, AMOUNTS, actor="test")
    set_price(books, "big", AMOUNTS, actor="test")
    rate(books)
    serve(books, used_ns=1_000_000_007)
    serve(books, used_ns=2_000_000_003, tenant_id=OTHER)
    serve(books, used_ns=3, model="big")
    record(books, intervals=[interval(n) for n in range(1, 4)])
    found = report(books)
    assert found.device_time.costs.total == Decimal("0.003"), "30 s at 0.36 an hour"
    assert found.total.loaded_cost == Decimal("0.003")
    assert found.unallocated == 0
    assert found.total.cost == Decimal("0.0003000000013"), "3.000000013 s"
    for groups in (found.tenants, found.models, found.lines):
        for field in ("requests", "revenue", "cost", "loaded_cost", "completion_tokens"):
            assert sum(getattr(line, field) for line in groups) == getattr(found.total, field)
    assert found.device_time.utilisation == Decimal("0.4")
    assert found.device_time.spans.wall == 30_000_000_000
    assert found.in_progress == found.device_time.costs.busy - found.total.cost
    assert found.total.loaded_margin == found.total.revenue - found.total.loaded_cost
    assert found.total.per_million_tokens(found.total.cost) == found.total.cost * 1_000_000 / 81


def test_device_time_that_no_usage_carries_is_unallocated(books):
    rate(books)
    record(books, intervals=[interval(1)])
    found = report(books)
    assert (found.total.requests, found.total.loaded_cost, found.unallocated) == (0, 0, Decimal("0.001"))
    assert found.total.per_million_tokens(Decimal(1)) is None


def test_what_is_not_in_the_sums_is_counted(books):
    serve(books, used_ns=5)
    record(books, settlements=[settlement()], intervals=[interval(1)])
    found = report(books)
    assert (found.total.unpriced, found.total.uncosted, found.total.pending) == (2, 1, 1)
    assert (found.total.revenue, found.total.cost) == (0, 0)
    assert found.device_time.uncosted_ns == 10_000_000_000
    record(books, settlements=[settlement()])
    assert economics.report(books, *SPAN).dirty == 1


def test_only_what_was_charged_or_costed_by_an_example_rests_on_it(books):
    set_price(books, MODEL, AMOUNTS, example=True, actor="test")
    set_price(books, "own", AMOUNTS, actor="test")
    rate(books, example=True)
    assert (report(books).example_prices, report(books).example_rates) == ([], []), "nothing was"
    serve(books, used_ns=5)
    serve(books, used_ns=5, model="own")
    record(books, intervals=[interval(1), interval(1, device="host-b/gpu", device_kind="gpu")])
    set_device_rate(books, Decimal("3.6"), device_kind="gpu", actor="test")
    found = report(books)
    assert (found.example_prices, found.example_rates) == ([MODEL], [KIND])
    assert (found.total.example_priced, found.total.requests) == (1, 2)
    assert found.total.example_revenue * 2 == found.total.revenue > 0
    assert (found.device_time.example_cost, found.device_time.costs.total) == (Decimal("0.001"), Decimal("0.011"))
    later = (NOW + timedelta(hours=2), NOW + timedelta(hours=3))
    assert economics.report(books, *later).example_prices == []


def test_a_range_is_widened_to_quarters_and_says_so(books):
    found = economics.report(books, NOW + timedelta(seconds=1), NOW + timedelta(seconds=2))
    assert found.start <= NOW + timedelta(seconds=1) < NOW + timedelta(seconds=2) <= found.end
    assert found.end - found.start == QUARTER


def test_refusals_add_up_over_processes_and_by_cause(rated):
    known, unknown = Refusal(NOW, TENANT, None, "rate_limit"), Refusal(NOW, None, None, "invalid_key")
    for counts in ({known: 2, unknown: 1}, {unknown: 4, known: 1}):
        with transaction(rated) as books:
            add(books, counts)
    with transaction(rated) as books:
        add(books, {})
        assert [(c.cause, c.refusals) for c in by_cause(books, *SPAN)] == [("invalid_key", 5), ("rate_limit", 3)]
        assert [(c.cause, c.refusals) for c in by_cause(books, *SPAN, tenant_id=TENANT)] == [("rate_limit", 3)]
