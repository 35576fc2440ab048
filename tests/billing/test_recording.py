"""Records are booked once, whatever their order, and price and cost follow exactly."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from billing.database import DatabaseRefused, transaction
from billing.ids import uuid7
from billing.recording import record
from billing.records import LOST
from billing.rollup import quarter_of
from tests.billing.conftest import NOW, attempt, id_at, interval, origin, seen, settlement

JOURNAL = ("requests", "attempts", "device_intervals", "devices", "awaiting_settlement", "awaiting_report")


def rows(connection: Connection, sql: str, **values):
    return [dict(row) for row in connection.execute(text(sql), values).mappings()]


def row(connection: Connection, request_id):
    (found,) = rows(connection, "SELECT * FROM requests WHERE id = :id", id=request_id)
    return found


def journal(connection: Connection) -> dict[str, list[dict]]:
    """All that the books say, but for when it was written down."""
    found = {table: rows(connection, f"SELECT * FROM {table}") for table in JOURNAL}
    for table in found.values():
        for entry in table:
            entry.pop("recorded_at", None)
        table.sort(key=repr)
    return found


def test_the_price_of_a_request_is_exact_to_the_last_digit(rated):
    done = settlement(
        prompt_tokens=27_147, cached_tokens=27_146, generated_tokens=351, delivered_tokens=351, billed_tokens=351
    )
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=[attempt(done.request_id, used_ns=1_234_567_891)])
        found = row(books, done.request_id)
    assert found["price"] == Decimal("0.00860376")
    assert found["cost"] == Decimal("0.000123456789100000")
    assert found["device_seconds"] == Decimal("1.234567891")
    assert found["tpot_seconds"] == Decimal("0.009000001")
    assert not found["pending"]


def test_the_report_may_come_before_or_after_its_settlement(rated):
    a, b = settlement(), settlement()
    with transaction(rated) as books:
        record(books, settlements=[a])
        waiting = row(books, a.request_id)
        assert (waiting["pending"], waiting["cost"], waiting["price"]) == (True, None, Decimal("0.0000588"))
    with transaction(rated) as books:
        record(books, attempts=[attempt(a.request_id), attempt(b.request_id)])
    with transaction(rated) as books:
        record(books, settlements=[b])
        first, second = row(books, a.request_id), row(books, b.request_id)
        assert first.pop("id") != second.pop("id")
        assert first == second
        assert first["cost"] == Decimal("0.000001")
        assert rows(books, "SELECT * FROM awaiting_report") == rows(books, "SELECT * FROM awaiting_settlement") == []


def test_everything_that_did_not_serve_is_waste_beside_the_cost(rated):
    done = settlement(winning_attempt=2, attempts=(seen(1), seen(2)))
    lost = attempt(done.request_id, 1, outcome="superseded", used_ns=3_000_000, wasted_ns={"superseded": 4_000_000})
    won = attempt(done.request_id, 2, wasted_ns={"stop_overshoot": 1_000_000})
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=[lost, won])
        found = row(books, done.request_id)
    assert (found["device_seconds"], found["waste_seconds"]) == (Decimal("0.010"), Decimal("0.008"))
    assert (found["cost"], found["attempts"]) == (Decimal("0.000001"), 2)


def test_an_attempt_counts_from_when_its_owner_saw_it(rated):
    done = settlement(winning_attempt=2, attempts=(seen(1), seen(2)))
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=[attempt(done.request_id, 2)])
        assert (row(books, done.request_id)["attempts"], row(books, done.request_id)["pending"]) == (2, False)


def test_a_failed_request_is_charged_and_costed_nothing_and_its_time_is_waste(rated):
    failed = settlement(status="failed", billed_tokens=0, winning_attempt=None)
    with transaction(rated) as books:
        record(books, settlements=[failed], attempts=[attempt(failed.request_id)])
        found = row(books, failed.request_id)
    assert (found["price"], found["price_id"], found["cost"], found["pending"]) == (0, None, 0, False)
    assert (found["device_seconds"], found["waste_seconds"]) == (0, Decimal("0.010"))


def test_a_report_replaces_an_attempt_booked_as_lost_but_never_the_other_way_round(rated):
    done = settlement()
    lost = attempt(done.request_id, outcome=LOST, origin=None, interval=None, used_ns=5_000_000)
    with transaction(rated) as books:
        record(books, settlements=[done], attempts=[lost])
        assert row(books, done.request_id)["device_seconds"] == Decimal("0.005")
        record(books, attempts=[attempt(done.request_id)])
        assert row(books, done.request_id)["device_seconds"] == Decimal("0.010")
        record(books, attempts=[lost])
        found = row(books, done.request_id)
    assert (found["device_seconds"], found["attempts"]) == (Decimal("0.010"), 1)


def test_the_owners_word_replaces_the_sweepers_but_never_the_other_way_round(rated):
    owned = settlement()
    early = NOW - timedelta(hours=1)
    swept = settlement(owned.request_id, status="failed", billed_tokens=0, swept=True, finished_at=early)
    with transaction(rated) as books:
        record(books, settlements=[swept])
        books.execute(text("DELETE FROM dirty_buckets"))
        record(books, settlements=[owned])
        marked = set(books.scalars(text("SELECT bucket FROM dirty_buckets")))
        record(books, settlements=[swept])
        assert (row(books, owned.request_id)["status"], row(books, owned.request_id)["swept"]) == ("completed", False)
    assert marked == {quarter_of(early), quarter_of(NOW)}, "the quarter it left is rolled up again too"


def test_of_two_settlements_by_owners_the_first_stays(rated):
    first = settlement()
    with transaction(rated) as books:
        record(books, settlements=[first, settlement(first.request_id, status="cancelled")])
        record(books, settlements=[settlement(first.request_id, status="failed", billed_tokens=0)])
        assert row(books, first.request_id)["status"] == "completed"


@pytest.mark.parametrize("distance", [timedelta(0), timedelta(milliseconds=-1)])
def test_a_request_at_the_edge_of_a_month_has_one_row_however_often_it_comes(rated, distance):
    edge = datetime(2026, 3, 1, tzinfo=UTC) + distance
    done = settlement(id_at(edge), origin=origin(created_at=edge), finished_at=edge + timedelta(seconds=1))
    for _ in range(2):
        with transaction(rated) as books:
            record(books, settlements=[done, done], attempts=[attempt(done.request_id)] * 2)
    with transaction(rated) as books:
        assert books.scalar(text("SELECT count(*) FROM requests")) == 1
        assert books.scalar(text("SELECT count(*) FROM attempts")) == 1
        home = books.scalar(text("SELECT CAST(tableoid AS regclass)::text FROM requests"))
    assert home == f"requests_{edge:%Y_%m}"


@pytest.mark.parametrize("moment", [datetime(1999, 1, 1, tzinfo=UTC), NOW + timedelta(days=60)])
def test_an_id_from_another_age_is_refused_without_a_partition(rated, moment):
    with pytest.raises(ValueError, match="no such time"), transaction(rated) as books:
        record(books, settlements=[settlement(id_at(moment))])


@pytest.mark.parametrize(
    "poison",
    [
        {"error_code": "a\0b"},
        {"prompt_tokens": 1 << 40},
        {"billed_tokens": 8},
        {"status": "unheard of"},
        {"cached_tokens": 21},
    ],
)
def test_what_postgres_refuses_leaves_nothing_behind(rated, poison):
    good, bad = settlement(), settlement(**poison)
    with pytest.raises(DatabaseRefused), transaction(rated) as books:
        record(books, settlements=[good, bad], attempts=[attempt(good.request_id)])
    with transaction(rated) as books:
        assert books.scalar(text("SELECT count(*) FROM requests")) == 0


SCENES = st.lists(
    st.fixed_dictionaries(
        {
            "status": st.sampled_from(["completed", "cancelled", "failed"]),
            "won": st.integers(0, 2),
            "seen": st.sets(st.integers(1, 3), max_size=3),
            "reported": st.sets(st.integers(1, 3), max_size=3),
            "settled": st.booleans(),
        }
    ),
    min_size=1,
    max_size=4,
)


def records_of(scenes):
    found = []
    for scene in scenes:
        request_id = uuid7()
        if scene["settled"]:
            found.append(
                settlement(
                    request_id,
                    status=scene["status"],
                    winning_attempt=scene["won"] or None,
                    attempts=tuple(seen(n) for n in sorted(scene["seen"])),
                )
            )
        found += [attempt(request_id, n, used_ns=n * 7, wasted_ns={"preemption": n}) for n in scene["reported"]]
    return found + [interval(n) for n in range(1, 4)]


def book(connection, batch):
    kinds = {"Settlement": "settlements", "Attempt": "attempts", "Interval": "intervals"}
    sorted_out = {name: [r for r in batch if type(r).__name__ == kind] for kind, name in kinds.items()}
    record(connection, **sorted_out)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenes=SCENES, data=st.data())
def test_any_order_any_split_and_any_repetition_gives_the_same_books(rated, scenes, data):
    records = records_of(scenes)
    repeated = records + data.draw(st.lists(st.sampled_from(records), max_size=4))
    shuffled = data.draw(st.permutations(repeated))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shuffled)), max_size=4)))
    with rated.connect() as connection:
        with connection.begin() as straight:
            book(connection, records)
            expected = journal(connection)
            straight.rollback()
        with connection.begin() as crooked:
            for start, end in zip([0, *cuts], [*cuts, len(shuffled)], strict=True):
                book(connection, shuffled[start:end])
            found = journal(connection)
            crooked.rollback()
    assert found == expected


@pytest.mark.parametrize("first", ["attempts", "settlements"])
def test_two_recorders_with_one_half_each_at_the_same_time_close_the_request(rated, first):
    done = settlement()
    halves = {"attempts": [attempt(done.request_id)], "settlements": [done]}
    mine, theirs = {first: halves.pop(first)}, halves

    def other_recorder():
        with transaction(rated) as books:
            record(books, **theirs)

    with ThreadPoolExecutor(1) as pool:
        with rated.connect() as slow, slow.begin():
            record(slow, **mine)
            other = pool.submit(other_recorder)
            with contextlib.suppress(TimeoutError):
                other.result(timeout=0.5)  # it waits for its turn
        other.result(timeout=20)
    with transaction(rated) as books:
        assert row(books, done.request_id)["cost"] == Decimal("0.000001")
        assert rows(books, "SELECT * FROM awaiting_report") == rows(books, "SELECT * FROM awaiting_settlement") == []
