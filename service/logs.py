"""Logs: JSON lines to stderr, one at the end of each request. No line holds a text of users or a secret."""

from __future__ import annotations

import logging
import sys

import structlog

from engine.logs import LINES
from engine.protocol import Settlement

log = structlog.get_logger()


def configure() -> None:
    """Ours and, from warnings on, the libraries': without their messages' arguments, which may quote anything."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _short_exceptions,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(LINES),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Forward()], level=logging.WARNING, force=True)


def request_end(record: Settlement, attempts: int) -> None:
    origin = record.origin
    log.info(
        "request",
        request_id=str(record.request_id),
        tenant_id=str(origin.tenant_id),
        api_key_id=str(origin.api_key_id),
        model=origin.model,
        endpoint=origin.endpoint,
        stream=origin.stream,
        status=record.status,
        finish_reason=record.finish_reason,
        error_code=record.error_code,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        generated_tokens=record.generated_tokens,
        delivered_tokens=record.delivered_tokens,
        billed_tokens=record.billed_tokens,
        queue_ms=_ms(record.queue_ns),
        ttft_ms=_ms(record.ttft_ns),
        total_ms=_ms(record.total_ns),
        attempts=attempts,
        trace_id=origin.trace_id,
    )


class _Forward(logging.Handler):
    """A library's record as one of ours: who, how bad, and the unformatted message."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        log.log(record.levelno, "library", library=record.name, template=str(record.msg)[:200], error=error)


def _short_exceptions(_: object, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Where an exception came from, frame by frame, without its message: messages quote what they choke on."""
    info = line.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info
    if isinstance(error, BaseException):
        line["traceback"] = _frames(error)
    return line


def _frames(error: BaseException) -> list[str]:
    frames, at = [], error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        frames.append(f"{code.co_filename}:{at.tb_lineno} {code.co_name}")
        at = at.tb_next
    return frames


def _ms(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / 1e6, 3)
