"""Structured logs of the worker process: JSON lines on stderr. No token id, no text of a user, no secret."""

from __future__ import annotations

import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
