"""Jobs and aborts as they come in, and how long each waited in the stream.

The wait is the difference of two times of Redis: TIME right after the read, and the entry's id. What was read is
deleted with the next round trip; if that is lost it is read again, and the engine drops what it has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from engine.exchange import Exchange
from engine.keys import DATA, inbox_key
from engine.protocol import Inbound, unpack_inbound

log = structlog.get_logger()

_MOST: Final = 512  # entries of one read, so that a burst cannot hold up the next step


@dataclass(frozen=True, slots=True)
class Received:
    message: Inbound
    inbox_ns: int


class Inbox:
    """The stream of one worker boot, which nobody else reads."""

    def __init__(self, worker: str) -> None:
        self._key = inbox_key(worker)
        self._read: list[bytes] = []  # ids to be deleted
        self._entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        self._received: list[Received] = []

    def ask(self, exchange: Exchange, *, block_ms: int | None) -> None:
        """``block_ms``: how long to wait for a first entry; None: not at all."""
        if self._read:
            exchange.add("XDEL", self._key, *self._read, then=self._deleted)
        block = () if block_ms is None else ("BLOCK", block_ms)
        exchange.add("XREAD", "COUNT", _MOST, *block, "STREAMS", self._key, "0-0", then=self._keep)
        exchange.add("TIME", then=self._stamp)

    def take(self) -> list[Received]:
        """What has come in since the last call, in the order of the stream."""
        received, self._received = self._received, []
        return received

    def _deleted(self, _: object) -> None:
        self._read = []

    def _keep(self, reply: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]] | None) -> None:
        self._entries = reply[0][1] if reply else []
        self._read = [entry_id for entry_id, _ in self._entries]

    def _stamp(self, reply: tuple[int, int]) -> None:
        seconds, microseconds = reply
        self._received += _received(self._entries, now_ns=seconds * 10**9 + microseconds * 1000)
        self._entries = []


def _received(entries: list[tuple[bytes, dict[bytes, bytes]]], *, now_ns: int) -> Iterable[Received]:
    for entry_id, fields in entries:
        try:
            message = unpack_inbound(fields[DATA])
        except (msgspec.MsgspecError, KeyError) as error:
            log.warning("inbox entry is not a job or an abort", entry=entry_id.decode(), error=type(error).__name__)
            continue
        enqueued_ms = int(entry_id.partition(b"-")[0])
        yield Received(message, max(0, now_ns - enqueued_ms * 10**6))
