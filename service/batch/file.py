"""A batch as a file: OpenAI's lines of input in, OpenAI's lines of output out.

Input:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": […]}}
Output: {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}},
         "error": null}
Format: platform.openai.com/docs/api-reference/batch ("The request input object", "The request output object"). Unlike
OpenAI's, one file of output holds the lines that failed, too, in the order of the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from service.wire.errors import ApiError
from service.wire.parameters import Parameters, parse
from service.wire.requests import ChatRequest, CompletionRequest

MAX_LINES: Final = 50_000  # OpenAI's own bound
CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"


class BatchFileError(Exception):
    """The file cannot be run. The message is one line, names the line of the file and repeats no text of it."""


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # in the batch: 1, 2, 3 …; empty lines of the file do not count
    custom_id: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BatchFile:
    """All lines go to one endpoint and one model."""

    endpoint: str
    model: str
    lines: list[Line]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Output(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: Response | None
    error: LineError | None = None


def read_batch(file: Iterable[bytes]) -> BatchFile:
    """Every line of the file, valid as far as its own words tell. Raises BatchFileError at the first that is not."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    kinds: set[tuple[str, str]] = set()
    for at, text in _filled(file):
        line = _decode(text, at)
        if line.custom_id in seen:
            raise BatchFileError(f"Line {at}: 'custom_id' is the same as in line {seen[line.custom_id]}.")
        seen[line.custom_id] = at
        kinds.add((line.url, _check(line, at)))
        if len(kinds) > 1:
            raise BatchFileError(f"Line {at}: 'url' and 'body.model' must be the same in all lines: split the file.")
        if len(lines) == MAX_LINES:
            raise BatchFileError(f"Line {at}: a batch has at most {MAX_LINES} lines: split the file.")
        lines.append(Line(len(lines) + 1, line.custom_id, bytes(line.body)))
    if not lines:
        raise BatchFileError("The file has no lines.")
    ((endpoint, model),) = kinds
    return BatchFile(endpoint, model, lines)


def read_body(endpoint: str, body: bytes) -> ChatRequest | CompletionRequest:
    """Raises ApiError."""
    return parse(body, ChatRequest) if endpoint == CHAT else parse(body, CompletionRequest)


def write_output(custom_id: str, request_id: UUID, status: int, body: bytes) -> bytes:
    response = Response(status_code=status, request_id=str(request_id), body=msgspec.Raw(body))
    return msgspec.json.encode(Output(id=f"batch_req_{request_id.hex}", custom_id=custom_id, response=response))


def _filled(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for at, text in enumerate(file, start=1):
        if text.strip():
            yield at, text.removeprefix(b"\xef\xbb\xbf") if at == 1 else text


def _decode(text: bytes, at: int) -> _Input:
    try:
        return msgspec.json.decode(text, type=_Input)
    except msgspec.ValidationError as error:
        raise BatchFileError(f"Line {at}: {_without_values(str(error))}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BatchFileError(f"Line {at}: not a JSON object (RFC 8259, UTF-8, one a line).") from None


def _check(line: _Input, at: int) -> str:
    """The line's model."""
    try:
        request = read_body(line.url, bytes(line.body))
        _refuse_stream(request, at)
        if isinstance(request, ChatRequest):
            request.conversation()
        else:
            request.one_prompt()
    except ApiError as error:
        raise BatchFileError(f"Line {at}: body: {error.body.error.message}") from None
    return request.model


def _refuse_stream(request: Parameters, at: int) -> None:
    if request.streams:
        raise BatchFileError(f"Line {at}: body: 'stream' is not possible in a batch.")


def _without_values(message: str) -> str:
    """Msgspec quotes the value where it names an enumeration: say what may stand there instead."""
    if message.startswith("Invalid enum value"):
        if "$.url" in message:
            return f"'url' must be {CHAT} or {COMPLETION}"
        return "'method' must be POST"
    return message.replace("`", "'")
