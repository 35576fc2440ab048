"""uvicorn's HTTP protocol, with a bound on what comes before a body, and OpenAI's error body for what it refuses."""

from __future__ import annotations

from typing import Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.wire import errors

LARGEST_HEAD: Final = 64 << 10  # bytes of a request's line and headers


class _HeadTooLargeError(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """``_head`` counts what the parser has handed out, ``_unseen`` what it may still hold back."""

    _head = 0
    _unseen = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        before = self._in_head
        super().data_received(data)
        if before and self._in_head:
            self._unseen += len(data)
            if self._unseen > LARGEST_HEAD and not self.transport.is_closing():
                self._head = self._unseen
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head, self._unseen, self._in_head = 0, 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > LARGEST_HEAD:
            raise _HeadTooLargeError  # the parser stops, and uvicorn calls send_400_response

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's words, for which ours stand
        error = errors.large_head(LARGEST_HEAD) if self._head > LARGEST_HEAD else errors.no_http()
        body = msgspec.json.encode(error.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
