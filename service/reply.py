"""The answer to a client: its generation, written as JSON or as server-sent events while the disconnect is watched.

A Reply is the ASGI application that Litestar runs for the request. It owns ``receive`` from the moment the body has
been read, so a client that goes away is noticed at every point, streaming or not. Errors before the first byte are
raised and become an HTTP status; later ones become an event, after which the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from engine.protocol import ErrorCode, Status
from service.completion import joined
from service.desk import DeniedError, UnavailableError
from service.dispatch import Dispatch
from service.generation import Generation
from service.order import Order
from service.settlement import OVERDUE, Failure
from service.telemetry import Tracing
from service.wire.errors import ApiError, invalid, unavailable
from service.wire.forms import Form, event
from service.wire.limits import denied, rate_headers
from service.wire.responses import Usage, usage

if TYPE_CHECKING:
    from litestar.types import Receive, Scope, Send

PATIENCE_S: Final = 5.0  # a stream starts after so long even without a token
_GRACE_S: Final = 5.0  # after the deadline, for a client that does not read
_EVENT_STREAM: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Reply:
    """Answers one order in one form."""

    def __init__(self, order: Order, form: Form, dispatch: Dispatch, tracing: Tracing) -> None:
        self._order = order
        self._form = form
        self._dispatch = dispatch
        self._tracing = tracing

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before the first byte."""
        generation: Generation | None = None
        watch: asyncio.Task[None] | None = None
        try:
            generation = self._dispatch.open(self._order)
            watch = asyncio.create_task(_watch(receive, generation.leave))
            await generation.admitted()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._order.timeout_s + _GRACE_S):
                    await (self._stream(generation, send) if self._order.stream else self._whole(generation, send))
        except DeniedError as error:
            raise self._refuse(denied(error.refused, self._order.scopes)) from None
        except UnavailableError:
            message = "The server cannot take requests at the moment. Please retry later."
            raise self._refuse(unavailable(message, "unavailable")) from None
        finally:
            if watch is not None:
                watch.cancel()
            if generation is not None:
                generation.close()

    def _refuse(self, error: ApiError) -> ApiError:
        self._tracing.refuse(self._order.request_id, error.cause)
        return error

    async def _stream(self, generation: Generation, send: Send) -> None:
        await generation.started(PATIENCE_S)
        self._raise_failure(generation)
        await _start(send, _EVENT_STREAM | self._rates(generation))
        if opening := self._form.opening():
            await _body(send, opening, more=True)
        async for piece in generation.pieces():
            await _body(send, self._form.content(piece), more=True)
            generation.accepted(piece)
        ended = generation.ended
        if ended is None or ended.status is Status.CANCELLED:
            return
        await generation.released()
        if ended.status is Status.FAILED:
            await _body(send, event(failure(ended.error_code).body), more=False)
        else:
            await _body(send, self._form.closing(ended.finish_reason, self._usage(generation)), more=False)
        generation.complete()

    async def _whole(self, generation: Generation, send: Send) -> None:
        pieces = [piece async for piece in generation.pieces()]
        self._raise_failure(generation)
        ended = generation.ended
        if ended is None or ended.status is Status.CANCELLED:
            return
        await generation.released()
        body = self._form.whole(joined(pieces), ended.finish_reason, self._usage(generation))
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await _start(send, headers | self._rates(generation))
        await _body(send, body, more=False)
        if pieces:
            generation.accepted(pieces[-1])
        generation.complete()

    def _raise_failure(self, generation: Generation) -> None:
        ended = generation.ended
        if ended is not None and ended.status is Status.FAILED:
            error = failure(ended.error_code)
            error.headers = self._rates(generation) | error.headers
            generation.complete()  # the client gets its error
            raise error

    def _rates(self, generation: Generation) -> dict[str, str]:
        return rate_headers(self._order.scopes, generation.usage)

    def _usage(self, generation: Generation) -> Usage:
        prompt = len(self._order.prompt)
        return usage(prompt, min(generation.facts.cached_tokens, prompt), generation.billed_tokens)


def failure(code: str) -> ApiError:
    """The error of a request that was admitted and then failed. It is in the books, so it is no refusal."""
    if code in {ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED}:
        error = invalid(
            "The request is longer than the model can hold. Shorten the prompt or lower max_tokens.", code=code
        )
    elif code in OVERDUE:
        error = unavailable("The request took too long and was stopped.", code, retry_s=None, status=504)
    elif code in {Failure.WORKER_LOST, Failure.REDIS_LOST, Failure.SHUTTING_DOWN}:
        error = unavailable("The server lost what worked on this request. Nothing was charged; please retry.", code)
    else:
        message = "The server had an error while processing your request. Nothing was charged; you may retry it."
        error = unavailable(message, code, retry_s=None, status=500)
    error.refused = False
    return error


async def _watch(receive: Receive, gone: Callable[[], None]) -> None:
    """Nothing but the disconnect comes after the body."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


async def _start(send: Send, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": pairs})


async def _body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
