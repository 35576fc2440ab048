"""Sums by quarter equal sums over the journal, whatever happens in between."""

import itertools
import math
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from billing import trends
from billing.database import transaction
from billing.histograms import BOUNDS, ERROR, SIZE, add, quantile
from billing.ids import uuid7
from billing.prices import set_price
from billing.rates import set_device_rate
from billing.recording import record
from billing.rollup import QUARTER, dirty, next_quarter, quarter_of, roll_up
from billing.trends import latencies, points
from tests.billing.conftest import AMOUNTS, KEY, KIND, MODEL, NOW, TENANT, attempt, interval, origin, settlement

# The same sums, straight from the journal, and written another way.
DIRECT = """
SELECT to_timestamp(floor(extract(epoch FROM finished_at) / 900) * 900) AS bucket, tenant_id, api_key_id, model,
       deployment_id, arm, endpoint, stream, status, batch_id IS NOT NULL AS batch, cost_basis,
       count(*) AS requests, sum(attempts) AS attempts, sum(prompt_tokens) AS prompt_tokens,
       sum(cached_tokens) AS cached_tokens, sum(completion_tokens) AS completion_tokens,
       sum(generated_tokens) AS generated_tokens, sum(delivered_tokens) AS delivered_tokens,
       sum(coalesce(price, 0)) AS price, sum(coalesce(cost, 0)) AS cost,
       sum(device_seconds) AS device_seconds, sum(waste_seconds) AS waste_seconds,
       sum((price IS NULL AND price_id IS NULL)::int) AS unpriced,
       sum((cost IS NULL AND NOT pending)::int) AS uncosted, sum(pending::int) AS pending,
       sum((price_id IN (SELECT id FROM prices WHERE example) AND price_id IS NOT NULL)::int) AS example_priced,
       coalesce(sum(price) FILTER (WHERE price_id IN (SELECT id FROM prices WHERE example)), 0) AS example_price
FROM requests GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
"""


def rolled_up(engine):
    while True:
        with transaction(engine) as books:
            if not roll_up(books, limit=3):
                return


def sums(engine, sql: str) -> list[dict]:
    with transaction(engine) as books:
        return sorted((dict(row) for row in books.execute(text(sql)).mappings()), key=repr)


def plain(rows: list[dict]) -> list[dict]:
    """Without histograms, and with numbers that compare whatever their type."""
    return sorted(
        (
            {k: Decimal(v).normalize() if isinstance(v, int | Decimal) and not isinstance(v, bool) else v
             for k, v in row.items() if not k.endswith("histogram")}
            for row in rows
        ),
        key=repr,
    )  # fmt: skip


def random_request(dice: random.Random):
    status = dice.choice(["completed", "completed", "cancelled", "failed"])
    finished_at = NOW + timedelta(seconds=dice.uniform(-4000, 4000))
    if dice.random() < 0.2:
        finished_at = quarter_of(finished_at)
    generated = dice.randint(0, 50)
    made = settlement(
        status=status,
        finished_at=finished_at,
        origin=origin(
            tenant_id=UUID(int=TENANT.int + dice.randint(0, 2)),
            api_key_id=UUID(int=KEY.int + dice.randint(0, 1)),
            model=dice.choice([MODEL, "unpriced", "example"]),
            stream=dice.random() < 0.5,
            batch_id=uuid7() if dice.random() < 0.2 else None,
        ),
        generated_tokens=generated,
        delivered_tokens=0,
        billed_tokens=0 if status == "failed" else generated,
        queue_ns=dice.choice([None, dice.randint(0, 10**10)]),
        ttft_ns=dice.choice([None, dice.randint(0, 10**12)]),
        tpot_ns=dice.choice([None, dice.randint(0, 10**9)]),
        total_ns=dice.randint(0, 10**13),
    )
    kind = dice.choice([KIND, "unrated"])
    report = attempt(
        made.request_id, used_ns=dice.randint(0, 10**9), wasted_ns={"preemption": dice.randint(0, 9)}, device_kind=kind
    )
    return made, [report] if dice.random() < 0.9 else []


def test_buckets_equal_direct_sums_over_the_requests(rated):
    dice = random.Random(7)
    with transaction(rated) as books:
        set_price(books, "example", AMOUNTS, example=True, actor="test")
    for _ in range(6):  # rolled up in between, so that most buckets are recomputed
        made = [random_request(dice) for _ in range(60)]
        with transaction(rated) as books:
            record(books, settlements=[s for s, _ in made], attempts=[a for _, reports in made for a in reports])
        rolled_up(rated)
    found, direct = sums(rated, "SELECT * FROM usage_15m"), sums(rated, DIRECT)
    assert plain(found) == plain(direct)
    assert len(found) > 50
    assert sum(row["example_price"] for row in found) > 0
    for column, latency in (("queue", "queue"), ("ttft", "ttft"), ("tpot", "tpot"), ("total", "total")):
        counted = sum(sum(row[f"{column}_histogram"]) for row in found)
        (wanted,) = sums(rated, f"SELECT count({latency}_seconds) AS n FROM requests")
        assert counted == wanted["n"]
    with transaction(rated) as books:
        assert dirty(books, NOW - timedelta(days=1), NOW + timedelta(days=1)) == 0


def test_a_mark_made_while_its_bucket_is_recomputed_is_not_lost(rated):
    with transaction(rated) as books:
        record(books, settlements=[settlement()])
    with rated.connect() as late, late.begin() as uncommitted:
        record(late, settlements=[settlement()])  # sees the bucket dirty already
        with transaction(rated) as books:
            assert roll_up(books) == 1, "waits for nobody"
        uncommitted.commit()
    (row,) = sums(rated, "SELECT requests FROM usage_15m")
    assert row["requests"] == 1
    rolled_up(rated)
    (row,) = sums(rated, "SELECT requests FROM usage_15m")
    assert row["requests"] == 2


def test_two_rollups_at_once_do_the_work_once(rated):
    with transaction(rated) as books:
        record(books, settlements=[settlement()])
    with rated.connect() as slow, slow.begin():
        assert roll_up(slow) == 1
        with transaction(rated) as books:
            assert roll_up(books) == 0


def test_an_interval_is_cut_at_quarters_into_parts_that_sum_to_it(rated):
    edge = quarter_of(NOW) + QUARTER
    long = interval(
        1,
        started_at=edge - timedelta(seconds=3, microseconds=1),
        end_ns=2 * 900_000_000_000 + 7_000_000_003,
        busy_ns=1_000_000_000_007,
        idle_ns=807_000_000_001,
        waste_ns=-5,  # an interval may book a transfer out of a category
        overhead_ns=0,
    )
    with transaction(rated) as books:
        record(books, intervals=[long])
    rolled_up(rated)
    found = sums(rated, "SELECT * FROM device_15m")
    found.sort(key=lambda row: row["bucket"])
    assert [row["bucket"] for row in found] == [edge - QUARTER, edge, edge + QUARTER, edge + 2 * QUARTER][: len(found)]
    for column, whole in (
        ("wall_ns", long.end_ns),
        ("busy_ns", long.busy_ns),
        ("idle_ns", long.idle_ns),
        ("waste_ns", -5),
    ):
        assert sum(row[column] for row in found) == whole
    assert found[1]["wall_ns"] == 900_000_000_000 or abs(found[1]["wall_ns"] - 900_000_000_000) < 2


def test_device_time_is_costed_at_the_rate_of_its_moment(rated):
    start = datetime.now(UTC) + timedelta(hours=1)  # a rate can't reach back
    with transaction(rated) as books:
        later = start + timedelta(seconds=25)
        set_device_rate(books, Decimal("0.72"), device_kind=KIND, effective_from=later, actor="test")
        moments = [start + timedelta(seconds=10 * n) for n in range(4)]
        record(books, intervals=[interval(n, started_at=moment) for n, moment in enumerate(moments, 1)])
    rolled_up(rated)
    found = sums(
        rated, "SELECT hourly, sum(wall_ns) AS ns FROM device_15m JOIN device_rates r ON r.id = rate_id GROUP BY 1"
    )
    assert {(row["hourly"], row["ns"]) for row in found} == {
        (Decimal("0.36"), 20_000_000_000),
        (Decimal("0.72"), 20_000_000_000),
    }


def test_device_time_without_a_rate_is_costed_once_one_is_set(engine):
    with transaction(engine) as books:
        record(books, intervals=[interval(1)])
    rolled_up(engine)
    assert [row["rate_id"] for row in sums(engine, "SELECT rate_id FROM device_15m")] == [None]
    with transaction(engine) as books:
        rate_id, _ = set_device_rate(books, Decimal("0.36"), device_kind=KIND, actor="test")
    rolled_up(engine)
    assert {row["rate_id"] for row in sums(engine, "SELECT rate_id FROM device_15m")} == {rate_id}


def test_points_cover_the_range_without_a_gap_and_hold_every_request(rated):
    with transaction(rated) as books:
        moments = [NOW + timedelta(minutes=7 * n) for n in range(-20, 20)]
        record(books, settlements=[settlement(finished_at=moment) for moment in moments])
    rolled_up(rated)
    with transaction(rated) as books:
        for length in (timedelta(hours=5), timedelta(days=3), timedelta(days=400)):
            found = points(books, NOW - length, NOW + length)
            assert sum(point.requests for point in found) == 40
            assert all(a.end == b.start for a, b in itertools.pairwise(found))
            assert found[0].start <= NOW - length < NOW + length <= found[-1].end
            assert len(found) <= 101


def latencies_of(engine, seconds, **changes):
    """As of requests that took so long."""
    with transaction(engine) as books:
        record(books, settlements=[settlement(total_ns=int(s * 1_000_000_000), **changes) for s in seconds])
    rolled_up(engine)
    with transaction(engine) as books:
        return latencies(books, NOW - QUARTER, NOW + QUARTER, model=MODEL)


def test_of_few_requests_every_quantile_is_the_time_of_one(rated):
    found = latencies_of(rated, [Decimal("7.36"), Decimal("8.62")], ttft_ns=None)
    assert found.exact
    assert [found.total.p50, found.total.p95, found.total.p99] == [Decimal("7.36"), Decimal("8.62"), Decimal("8.62")]
    assert (found.total.counted, found.ttft.counted, found.ttft.p50) == (2, 0, None)
    with transaction(rated) as books:
        nobody = latencies(books, NOW - QUARTER, NOW + QUARTER, tenant_id=uuid7())
    assert (nobody.total.counted, nobody.total.p99) == (0, None)


def test_of_many_requests_quantiles_are_read_from_the_counts_and_say_so(rated, monkeypatch):
    monkeypatch.setattr(trends, "EXACT_UP_TO", 99)
    found = latencies_of(rated, range(1, 101), ttft_ns=None)
    assert not found.exact
    assert found.total.counted == 100
    for share, shown in ((50, found.total.p50), (95, found.total.p95), (99, found.total.p99)):
        assert abs(shown / share - 1) <= ERROR


@pytest.mark.parametrize("exact_up_to", [0, 1_000])
def test_times_of_tokens_are_of_streamed_requests_only(rated, monkeypatch, exact_up_to):
    monkeypatch.setattr(trends, "EXACT_UP_TO", exact_up_to)
    latencies_of(rated, [9], ttft_ns=9_000_000_000, tpot_ns=1)
    found = latencies_of(rated, [9], ttft_ns=100_000_000, tpot_ns=20_000_000, origin=origin(stream=True))
    assert found.exact == (exact_up_to > 0)
    assert (found.queue.counted, found.ttft.counted, found.tpot.counted, found.total.counted) == (2, 1, 1, 2)
    assert abs(found.ttft.p99 / Decimal("0.1") - 1) <= ERROR
    assert abs(found.tpot.p50 / Decimal("0.02") - 1) <= ERROR


@given(st.lists(st.integers(1, 999_999), min_size=1, max_size=50), st.sampled_from(["0.5", "0.95", "1"]))
def test_a_quantile_is_within_its_error_of_the_value_it_stands_for(milliseconds, share):
    values = sorted(Decimal(ms) / 1000 for ms in milliseconds)
    counts = add([[int(n == sum(bound <= value for bound in BOUNDS)) for n in range(SIZE)] for value in values])
    wanted = values[math.ceil(len(values) * Decimal(share)) - 1]
    assert abs(quantile(counts, Decimal(share)) / wanted - 1) <= ERROR


def test_what_is_beyond_the_bounds_reads_as_the_bound():
    assert quantile([1] + [0] * (SIZE - 1), Decimal(1)) == BOUNDS[0]
    assert quantile([0] * (SIZE - 1) + [1], Decimal(1)) == BOUNDS[-1]


def test_quarters_begin_where_every_time_zone_can_cut():
    moment = datetime(2026, 3, 1, 12, 44, 59, 999_999, tzinfo=UTC)
    assert quarter_of(moment) == datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    assert next_quarter(moment) == datetime(2026, 3, 1, 12, 45, tzinfo=UTC)
    assert next_quarter(quarter_of(moment)) == quarter_of(moment)
