"""Identifiers say when they were made, sort by it, and never repeat."""

import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing import ids
from billing.ids import uuid7, uuid7_floor, uuid7_time

MOMENTS = st.integers(0, 200_000_000_000_000_000).map(
    lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
)


def test_ids_of_several_threads_are_unique_and_grow_within_each():
    found: list[list[uuid.UUID]] = [[] for _ in range(4)]

    def mint(mine: list[uuid.UUID]) -> None:
        mine.extend(uuid7() for _ in range(5000))

    threads = [threading.Thread(target=mint, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({i for mine in found for i in mine}) == 20_000
    assert all(mine == sorted(mine) for mine in found)
    assert {(i.version, i.variant) for mine in found for i in mine} == {(7, uuid.RFC_4122)}


def test_ids_grow_though_the_clock_steps_back_and_the_counter_overflows(monkeypatch):
    clock = ids._Clock()
    monkeypatch.setattr(ids.time, "time_ns", lambda: 5_000_000_000)
    first = clock.next()
    monkeypatch.setattr(ids.time, "time_ns", lambda: 1_000_000_000)
    second = clock.next()
    assert second > first
    clock._last = (5000, (1 << 74) - 1)
    assert clock.next()[0] == 5001


@given(MOMENTS)
def test_the_floor_is_the_least_id_of_its_millisecond(moment):
    floor = uuid7_floor(moment)
    assert (floor.version, floor.variant) == (7, uuid.RFC_4122)
    assert uuid7_time(floor) <= moment < uuid7_time(floor) + timedelta(milliseconds=1)
    assert ids._build(floor.int >> 80, 0) == floor < ids._build(floor.int >> 80, 1)


def test_a_naive_moment_and_another_version_are_refused():
    with pytest.raises(ValueError, match="aware"):
        uuid7_floor(datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None))
    with pytest.raises(ValueError, match="1970"):
        uuid7_floor(datetime(1969, 1, 1, tzinfo=UTC))
    with pytest.raises(ValueError, match="version 7"):
        uuid7_time(uuid.uuid4())
