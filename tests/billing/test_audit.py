"""The audit finds nothing in books that close, and the residual where one number was changed."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from billing.audit import audit
from billing.ids import uuid7
from billing.recording import record
from tests.billing.conftest import NOW, attempt, interval, origin, settlement

SECOND = 1_000_000_000
SPAN = (NOW - timedelta(days=1), NOW + timedelta(days=1))


@pytest.fixture
def closed(books):
    """A boot with three intervals: one attempt closes in each of the first two, and a third is open at the end."""
    rows = {"prompt_tokens": 20, "generated_tokens": 7}
    record(
        books,
        intervals=[
            interval(1, open_ns=SECOND, prompt_tokens=40, generated_tokens=9),
            interval(2, prompt_tokens=0, generated_tokens=5),
            interval(3, open_ns=4 * SECOND, prompt_tokens=11, generated_tokens=3),
        ],
        attempts=[
            attempt(uuid7(), used_ns=3 * SECOND, interval=1, **rows),
            attempt(uuid7(), used_ns=5 * SECOND, interval=2, **rows),
        ],
        settlements=[settlement(origin=origin(boot_seq=n)) for n in (1, 2, 3)],
    )
    return books


def breaches(books, **options) -> dict[str, str]:
    options.setdefault("too_old", NOW + timedelta(minutes=1))
    found = audit(books, *SPAN, **options)
    assert {finding.identity for finding in found} == {"1 wall clock", "1 busy time", "2 tokens", "4 admissions"}
    return {finding.identity: finding.residual for finding in found if not finding.closes}


def test_books_that_close_leave_no_residual(closed):
    assert breaches(closed) == {}
    assert any("unaccounted 0 ns" in finding.residual for finding in audit(closed, *SPAN, too_old=NOW))


@pytest.mark.parametrize(
    ("change", "identity"),
    [
        ("UPDATE device_intervals SET idle_ns = idle_ns - 40000000 WHERE number = 1", "1 wall clock"),
        ("UPDATE device_intervals SET busy_ns = busy_ns + 1, idle_ns = idle_ns - 1 WHERE number = 1", "1 busy time"),
        ("UPDATE attempts SET used_ns = used_ns - 1 WHERE interval = 2", "1 busy time"),
        ("UPDATE device_intervals SET generated_tokens = generated_tokens + 1 WHERE number = 2", "2 tokens"),
        ("UPDATE device_intervals SET drafted_tokens = drafted_tokens + 1 WHERE number = 1", "2 tokens"),
        ("UPDATE attempts SET recomputed_tokens = 1 WHERE interval = 1", "2 tokens"),
        ("DELETE FROM requests WHERE boot_seq = 2", "4 admissions"),
        ("UPDATE requests SET boot_seq = 3 WHERE boot_seq = 2", "4 admissions"),
    ],
)
def test_one_wrong_number_is_found(closed, change, identity):
    closed.execute(text(change))
    assert identity in breaches(closed)


def test_a_missing_interval_is_found(closed):
    closed.execute(text("DELETE FROM device_intervals WHERE number = 2"))
    assert "intervals are missing" in breaches(closed)["1 wall clock"]


def test_what_still_runs_is_no_breach(closed):
    record(closed, settlements=[settlement(origin=origin(boot_seq=9))])
    assert breaches(closed, too_old=NOW - timedelta(minutes=1)) == {}
    (owner,) = (f for f in audit(closed, *SPAN, too_old=NOW - timedelta(minutes=1)) if f.identity == "4 admissions")
    assert owner.compared == "numbers 1 to 9 against 4 numbered rows and 0 swept ones"
    assert owner.residual == "0 missing, 0 repeated, 5 may still run"
    assert breaches(closed) == {"4 admissions": "5 missing, 0 repeated"}


def test_a_number_given_long_after_its_request_came_does_not_make_those_before_it_overdue(closed):
    record(closed, settlements=[settlement(origin=origin(boot_seq=9))])
    closed.execute(text("UPDATE requests SET created_at = created_at - interval '1 h' WHERE boot_seq = 9"))
    assert breaches(closed, too_old=NOW - timedelta(minutes=1)) == {}


def test_a_swept_request_stands_for_the_number_that_nobody_knows(closed):
    closed.execute(text("UPDATE requests SET boot_seq = NULL, swept = true WHERE boot_seq = 2"))
    assert breaches(closed) == {}
