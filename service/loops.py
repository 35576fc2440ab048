"""An owner's loops: started again when they fail, and ended for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

import structlog

log = structlog.get_logger()

_PAUSE_S: Final = 0.2  # after a failure


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until they have ended: a timeout that ends at the same moment can swallow a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PAUSE_S)


async def for_ever(loop: Callable[[], Coroutine[None, None, None]]) -> None:
    """An owner whose loop ends is dead without knowing it: log what ended it and start it again."""
    while True:
        try:
            await loop()
        except Exception as error:
            log.exception("a loop of the owner failed", loop=loop.__name__, error=type(error).__name__)
            await asyncio.sleep(_PAUSE_S)
