"""The other end of a worker's streams, driven by hand: what an owner and the recorder see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import redis

from engine.keys import DATA, RECORDS, WORKERS, events_key, inbox_key, lease_key
from engine.protocol import (
    Abort,
    AttemptReport,
    Event,
    FinishReason,
    Interval,
    Job,
    WorkerCard,
    pack,
    unpack_card,
    unpack_events,
    unpack_record,
)

T = TypeVar("T")


def eventually(what: Callable[[], T], within: float = 30.0) -> T:
    """The first truthy answer of ``what``."""
    deadline = time.monotonic() + within
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r} after {within} s"
        time.sleep(0.02)
    return answer


class Owner:
    """Boot id "api-1", as in the jobs of tests.engine.world."""

    boot = "api-1"

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, protocol=2)
        self._events: list[Event] = []
        self._last = b"0-0"

    def send(self, worker: str, *messages: Job | Abort) -> None:
        self.redis.set(lease_key(self.boot), "owner")
        for message in messages:
            self.redis.xadd(inbox_key(worker), {DATA: pack(message)})

    def forget_events(self) -> None:
        """After Redis has lost them."""
        self._last = b"0-0"

    def events(self) -> list[Event]:
        for _, entries in self.redis.xread({events_key(self.boot): self._last}):
            for self._last, fields in entries:
                self._events += unpack_events(fields[DATA]).events
        return self._events

    def of(self, sent: Job) -> list[Event]:
        return [e for e in self.events() if (e.request_id, e.attempt) == (sent.request_id, sent.attempt)]

    def finished(self, sent: Job) -> FinishReason | None:
        events = self.of(sent)
        return events[-1].finish if events else None

    def tokens(self, sent: Job) -> list[int]:
        """The completion so far, resumed tokens included; what comes twice is dropped, a gap is a failure."""
        ids = list(sent.generated[0]) if sent.generated else []
        for event in self.of(sent):
            assert event.index <= len(ids), "tokens are missing"
            ids[event.index :] = event.ids or ids[event.index :]
        return ids

    def records(self) -> list[AttemptReport | Interval]:
        return [unpack_record(fields[DATA]) for _, fields in self.redis.xrange(RECORDS)]

    def reports(self) -> list[AttemptReport]:
        """One per attempt: what was sent twice is one."""
        reports = [record for record in self.records() if isinstance(record, AttemptReport)]
        return list({(r.request_id, r.attempt): r for r in reports}.values())

    def report(self, sent: Job) -> AttemptReport:
        def find() -> AttemptReport | None:
            found = [r for r in self.reports() if (r.request_id, r.attempt) == (sent.request_id, sent.attempt)]
            return found[0] if found else None

        return eventually(find)

    def intervals(self, worker: str) -> list[Interval]:
        of_worker = [r for r in self.records() if isinstance(r, Interval) and r.worker == worker]
        return list({interval.number: interval for interval in of_worker}.values())

    def cards(self) -> list[WorkerCard]:
        return [unpack_card(data) for data in self.redis.hgetall(WORKERS).values()]


def check_identities(intervals: list[Interval], reports: Iterable[AttemptReport]) -> None:
    """Identity 1 on every cut and identity 2 over all of one worker: intervals on one side, reports on the other."""
    reports = [report for report in reports if report.worker == intervals[0].worker]
    assert [interval.number for interval in intervals] == list(range(1, len(intervals) + 1))
    open_ns, end_ns = 0, intervals[0].start_ns
    for interval in intervals:
        closed = sum(report.used_ns for report in reports if report.interval == interval.number)
        assert interval.busy_ns == closed + interval.open_ns - open_ns
        assert interval.start_ns == end_ns
        open_ns, end_ns = interval.open_ns, interval.end_ns
    assert open_ns == 0
    assert sum(i.waste_ns for i in intervals) == sum(sum(report.wasted_ns.values()) for report in reports)
    for kind in ("prompt_tokens", "recomputed_tokens", "generated_tokens"):
        assert sum(getattr(i, kind) for i in intervals) == sum(getattr(report, kind) for report in reports), kind
