"""What the device is kept for at each moment: exactly one open span, each with its own start and stop stamp."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

Clock = Callable[[], int]  # monotonic nanoseconds


class Span(Enum):
    BUSY = auto()  # a step runs
    IDLE = auto()  # nothing to do
    LOADING = auto()  # the model is not there yet
    OVERHEAD = auto()  # scheduling, messages, waiting for Redis


class Timeline:
    """Sums spans by kind. What lies between a stop and the next start is nobody's: the interval's ``unaccounted``."""

    def __init__(self, span: Span, clock: Clock = time.monotonic_ns) -> None:
        self.clock = clock
        self._totals = dict.fromkeys(Span, 0)
        self._open = span
        self._started_ns = clock()
        self.cut_ns = self._started_ns

    def enter(self, span: Span) -> int:
        """Stop the open span and start another. Returns the nanoseconds of the one stopped, since the last cut."""
        stop_ns, start_ns = self.clock(), self.clock()
        length = stop_ns - self._started_ns
        self._totals[self._open] += length
        self._open, self._started_ns = span, start_ns
        return length

    def cut(self) -> dict[Span, int]:
        """The sums since the last cut, at ``cut_ns``. The open span is stopped there and goes on from there."""
        now_ns = self.clock()
        self._totals[self._open] += now_ns - self._started_ns
        self._started_ns = self.cut_ns = now_ns
        totals, self._totals = self._totals, dict.fromkeys(Span, 0)
        return totals
