"""The body of a request: read within a time, and drained where it is too large to be read.

A connection that closes on bytes nobody has read is reset, and the client may never see the answer that lies before
the reset. So a body that is refused for its size is read on and thrown away, up to a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from litestar import Request
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from service.wire import errors

_DRAINED_BYTES: Final = 64 << 20
_DRAINED_S: Final = 10.0


async def read(request: Request[Any, Any, Any], body: Callable[[], Awaitable[bytes]], within_s: float) -> bytes:
    """What ``body`` gives. Raises ApiError (408), and RequestEntityTooLarge as it does."""
    try:
        async with asyncio.timeout(within_s):
            return await body()
    except TimeoutError:
        raise errors.slow_body(within_s) from None
    except RequestEntityTooLarge:
        if request.headers.get("expect", "").lower() != "100-continue":  # who asks first has sent nothing yet
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(within_s, _DRAINED_S)):
                    await _drain(request)
        raise


async def _drain(request: Request[Any, Any, Any]) -> None:
    left = _DRAINED_BYTES
    while left > 0:
        message = await request.receive()
        if message["type"] != "http.request" or not message["more_body"]:
            return
        left -= len(message["body"])
