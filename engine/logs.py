"""Structured logs of the worker process: JSON lines on stderr. No token id, no text of a user, no secret."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO, cast

import structlog


class Lines:
    """Standard error, where a line that cannot be written is dropped.

    Logs often lie on the very disk that is full: who says so in a log must not die of it.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


LINES: TextIO = cast("TextIO", Lines())  # all that a logger needs of one


def configure_logs(**context: str) -> None:
    """``context`` stands in every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(LINES),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
