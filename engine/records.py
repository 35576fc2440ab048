"""Reports and intervals on their way into the spool. Kept here while the disk refuses them."""

from __future__ import annotations

from collections import deque

import structlog

from engine.protocol import Record, pack
from engine.spool import RecordProducer

log = structlog.get_logger()


class Records:
    def __init__(self, producer: RecordProducer) -> None:
        self._producer = producer
        self._unwritten: deque[bytes] = deque()

    def put(self, record: Record) -> None:
        self._unwritten.append(pack(record))
        self.write()

    def write(self) -> None:
        """Try again what the disk has refused."""
        while self._unwritten:
            try:
                self._producer.put(self._unwritten[0])
            except OSError as error:
                log.warning("records wait for the disk", waiting=len(self._unwritten), error=type(error).__name__)
                return
            self._unwritten.popleft()
