"""What nobody will close any more is closed once, and heals when its author speaks up after all."""

from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text

from billing.database import transaction
from billing.ids import uuid7
from billing.recording import record
from billing.sweeping import Swept, sweep
from tests.billing.conftest import NOW, attempt, origin, seen, settlement
from tests.billing.test_recording import journal, row, rows

GRACE = timedelta(seconds=30)
DEADLINE = timedelta(minutes=10)


def swept(engine, after: timedelta) -> Swept:
    """Sweep as if it were ``after`` from now."""
    with transaction(engine) as books:
        return sweep(books, grace=GRACE, now=NOW + after)


def test_a_request_without_a_settlement_fails_after_deadline_and_grace_at_price_0(rated):
    request_id = uuid7()
    reports = [
        attempt(request_id, 1, outcome="cancelled", origin=origin(boot_id="gone", boot_seq=None)),
        attempt(request_id, 2),
    ]
    with transaction(rated) as books:
        record(books, attempts=reports)
    assert swept(rated, DEADLINE + timedelta(seconds=20)) == Swept(requests=0, attempts=0)
    assert swept(rated, DEADLINE + timedelta(hours=1)) == Swept(requests=1, attempts=0)
    with transaction(rated) as books:
        found = row(books, request_id)
    assert (found["status"], found["price"], found["cost"], found["error_code"]) == ("failed", 0, 0, "owner_lost")
    assert (found["boot_id"], found["boot_seq"], found["swept"], found["attempts"]) == ("gone", None, True, 2)
    assert (found["device_seconds"], found["waste_seconds"]) == (0, Decimal("0.020"))
    assert found["prompt_tokens"] == 20
    assert swept(rated, timedelta(days=1)) == Swept(requests=0, attempts=0), "once"


def test_grace_counts_from_when_the_report_was_written_so_a_backlog_is_not_old(rated):
    long_ago = NOW - timedelta(hours=2)
    with transaction(rated) as books:
        record(books, attempts=[attempt(uuid7(), origin=origin(created_at=long_ago))])
    assert swept(rated, timedelta(seconds=5)) == Swept(requests=0, attempts=0)
    assert swept(rated, timedelta(hours=1)) == Swept(requests=1, attempts=0)


@pytest.mark.parametrize(
    ("winner", "device", "waste", "cost"),
    [(1, "0.005", "0", "0.0000005"), (2, "0.010", "0.005", "0.000001")],
    ids=["it served: used", "another served: waste"],
)
def test_an_attempt_without_a_report_is_booked_as_lost(rated, winner, device, waste, cost):
    done = settlement(winning_attempt=winner, attempts=(seen(1),) if winner == 1 else (seen(1), seen(2)))
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=[attempt(done.request_id, 2)] if winner == 2 else [])
    assert swept(rated, timedelta(seconds=10)) == Swept(requests=0, attempts=0)
    assert swept(rated, timedelta(hours=1)) == Swept(requests=0, attempts=1)
    with transaction(rated) as books:
        found = row(books, done.request_id)
        (lost,) = rows(books, "SELECT * FROM attempts WHERE outcome = 'lost'")
        assert rows(books, "SELECT * FROM awaiting_report") == []
    assert (found["device_seconds"], found["waste_seconds"]) == (Decimal(device), Decimal(waste))
    assert (found["cost"], found["pending"]) == (Decimal(cost), False)
    assert lost["interval"] is None
    assert swept(rated, timedelta(days=1)) == Swept(requests=0, attempts=0)


def test_sweeping_too_early_leaves_no_trace_once_the_authors_have_spoken(rated):
    late_owner, late_worker = settlement(), settlement()
    everything = {
        "settlements": [late_owner, late_worker],
        "attempts": [attempt(late_owner.request_id), attempt(late_worker.request_id)],
    }
    with rated.connect() as connection:
        with connection.begin() as straight:
            record(connection, **everything)
            expected = journal(connection)
            straight.rollback()
        with connection.begin() as swept_first:
            record(connection, settlements=[late_worker], attempts=[attempt(late_owner.request_id)])
            assert sweep(connection, grace=GRACE, now=NOW + timedelta(days=1)) == Swept(requests=1, attempts=1)
            record(connection, **everything)
            found = journal(connection)
            swept_first.rollback()
    assert found == expected


def test_a_sweep_takes_no_more_than_a_transaction_should_hold(rated, monkeypatch):
    monkeypatch.setattr("billing.sweeping._AT_ONCE", 3)
    with transaction(rated) as books:
        record(books, settlements=[settlement() for _ in range(4)], attempts=[attempt(uuid7()) for _ in range(2)])
    later = timedelta(days=1)
    assert [swept(rated, later) for _ in range(3)] == [Swept(2, 3), Swept(0, 1), Swept(0, 0)]
    with transaction(rated) as books:
        assert books.scalar(text("SELECT count(*) FROM requests")) == 6
