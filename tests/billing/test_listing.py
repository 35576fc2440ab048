"""Requests one by one: filtered, in pages without a gap or a repetition, and with all that is known of one."""

from datetime import timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from sqlalchemy import text

from billing.database import transaction
from billing.ids import uuid7, uuid7_floor
from billing.listing import Filter, choices, get_request, list_requests
from billing.recording import record
from billing.rollup import roll_up
from tests.billing.conftest import AMOUNTS, MODEL, NOW, TENANT, attempt, id_at, origin, settlement

ALL = Filter(start=NOW - timedelta(hours=1), end=NOW + timedelta(hours=1))


def test_pages_hold_every_request_once_and_newest_first(books):
    record(books, settlements=[settlement(id_at(NOW + timedelta(seconds=n // 3))) for n in range(25)])
    pages, before = [], None
    while page := list_requests(books, ALL, before=before, limit=4):
        pages += page
        before = page[-1].id
    assert len(pages) == 25
    assert [request.id for request in pages] == sorted((request.id for request in pages), reverse=True)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 4),
        ({"tenant_id": TENANT}, 3),
        ({"model": "big"}, 1),
        ({"status": "failed"}, 1),
        ({"endpoint": "/v1/completions", "status": "completed"}, 3),
        ({"model": "none"}, 0),
        ({"start": NOW, "end": NOW}, 0),
    ],
)
def test_filters_hold_together(books, wanted, count):
    other = UUID(int=TENANT.int + 1)
    made = [
        settlement(),
        settlement(origin=origin(tenant_id=other)),
        settlement(origin=origin(model="big")),
        settlement(status="failed", billed_tokens=0),
    ]
    record(books, settlements=made)
    values = {name: getattr(ALL, name) for name in Filter.__dataclass_fields__}
    assert len(list_requests(books, Filter(**values | wanted))) == count


def test_one_request_comes_with_its_attempts_and_its_price(rated):
    done = settlement(winning_attempt=2)
    reports = [
        attempt(done.request_id, 1, outcome="superseded", used_ns=0, wasted_ns={"superseded": 7}),
        attempt(done.request_id, 2),
    ]
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=reports)
        while roll_up(books):
            pass
        found = get_request(books, done.request_id)
        assert get_request(books, uuid7()) is None
        assert choices(books, ALL.start, ALL.end) == {"model": [MODEL], "endpoint": ["/v1/completions"]}
    assert [(a.attempt, a.waste, a.hourly) for a in found.attempts] == [
        (1, {"superseded": 7}, Decimal("0.36")),
        (2, {}, Decimal("0.36")),
    ]
    assert (found.price.input, found.price.example) == (AMOUNTS.input, False)
    assert found.request.margin == found.request.price - found.request.cost
    assert not found.request.unpriced
    assert not found.request.uncosted


def test_a_page_reads_the_partitions_of_its_time_by_an_index(books):
    record(books, settlements=[settlement() for _ in range(400)])
    books.execute(text("ANALYZE requests"))
    explain = "EXPLAIN SELECT * FROM requests WHERE id >= :low AND id < :high {} ORDER BY id DESC LIMIT 50"
    span = {"low": uuid7_floor(NOW - timedelta(minutes=5)), "high": uuid7_floor(NOW + timedelta(minutes=5))}
    for condition in ("", "AND tenant_id = :tenant"):
        plan = "\n".join(books.scalars(text(explain.format(condition)), {**span, "tenant": TENANT}))
        assert "Index Scan" in plan, plan
        assert "Sort" not in plan, plan
        assert plan.count(" on requests_") <= 2, "no partition of another month"
