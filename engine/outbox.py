"""Events on their way to their owners: kept until Redis has them, told in order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from engine.exchange import Exchange
from engine.keys import DATA, events_key
from engine.protocol import Event, EventBatch, pack

# A stream's length is bounded, so that a dead owner's cannot fill Redis. A living one reads within a step or two.
_LONGEST: Final = 65_536


class Outbox:
    """One entry per step and owner."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._unsent: dict[int, tuple[str, bytes]] = {}  # stream and entry, oldest first
        self._next = 0

    def __len__(self) -> int:
        return len(self._unsent)

    def put(self, step: int, events: Mapping[str, list[Event]]) -> None:
        for owner, of_owner in events.items():
            batch = EventBatch(worker=self._worker, step=step, events=of_owner)
            self._unsent[self._next] = (events_key(owner), pack(batch))
            self._next += 1

    def ask(self, exchange: Exchange) -> None:
        for number, (key, entry) in self._unsent.items():
            then = partial(self._sent, number)
            exchange.add("XADD", key, "MAXLEN", "~", _LONGEST, "*", DATA, entry, then=then)

    def _sent(self, number: int, _: object) -> None:
        del self._unsent[number]
