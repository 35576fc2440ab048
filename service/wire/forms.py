"""How an answer is put into words on each endpoint: chunks of a stream, or one whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from service.completion import Piece
from service.wire.logprobs import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from service.wire.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Finish,
    TextChoice,
    TextCompletion,
    Usage,
)

_encoder = msgspec.json.Encoder()


class Form(Protocol):
    """Bytes of one answer; chunks are whole server-sent events."""

    def opening(self) -> bytes: ...

    def content(self, piece: Piece) -> bytes: ...

    def closing(self, finish_reason: str, usage: Usage) -> bytes: ...

    def whole(self, answer: Piece, finish_reason: str, usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    request_id: UUID
    created: int
    model: str
    fingerprint: str
    includes_usage: bool  # the stream ends with a chunk of its own for it
    tells: bool = False  # logprobs of what it says

    def _usage(self) -> UnsetType | None:
        return None if self.includes_usage else UNSET


class ChatForm(_Base):
    """/v1/chat/completions"""

    def opening(self) -> bytes:
        return self._chunk([ChunkChoice(delta=Delta(role="assistant", content="", refusal=None))])

    def content(self, piece: Piece) -> bytes:
        return self._chunk([ChunkChoice(delta=Delta(content=piece.text), logprobs=self._told(piece))])

    def closing(self, finish_reason: str, usage: Usage) -> bytes:
        last = self._chunk([ChunkChoice(delta=Delta(), finish_reason=_finish(finish_reason))])
        return last + (self._chunk([], usage) if self.includes_usage else b"") + DONE

    def whole(self, answer: Piece, finish_reason: str, usage: Usage) -> bytes:
        choice = ChatChoice(
            message=AssistantMessage(content=answer.text),
            logprobs=self._told(answer),
            finish_reason=_finish(finish_reason),
        )
        return _encoder.encode(
            ChatCompletion(
                id=self._id(),
                created=self.created,
                model=self.model,
                choices=[choice],
                usage=usage,
                system_fingerprint=self.fingerprint,
            )
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None = UNSET) -> bytes:
        return event(
            ChatChunk(
                id=self._id(),
                created=self.created,
                model=self.model,
                system_fingerprint=self.fingerprint,
                choices=choices,
                usage=self._usage() if usage is UNSET else usage,
            )
        )

    def _told(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.told) if self.tells else None

    def _id(self) -> str:
        return f"chatcmpl-{self.request_id.hex}"


class TextForm(_Base):
    """/v1/completions"""

    def opening(self) -> bytes:
        return b""

    def content(self, piece: Piece) -> bytes:
        return event(self._object([TextChoice(text=piece.text, logprobs=self._told(piece))], self._usage()))

    def closing(self, finish_reason: str, usage: Usage) -> bytes:
        last = event(self._object([TextChoice(text="", finish_reason=_finish(finish_reason))], self._usage()))
        return last + (event(self._object([], usage)) if self.includes_usage else b"") + DONE

    def whole(self, answer: Piece, finish_reason: str, usage: Usage) -> bytes:
        choice = TextChoice(text=answer.text, logprobs=self._told(answer), finish_reason=_finish(finish_reason))
        return _encoder.encode(self._object([choice], usage))

    def _told(self, piece: Piece) -> TextLogprobs | None:
        return text_logprobs(piece.told) if self.tells else None

    def _object(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        return TextCompletion(
            id=f"cmpl-{self.request_id.hex}",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )


def event(message: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(message) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _finish(reason: str) -> Finish:
    assert reason in {"stop", "length"}, reason
    return cast("Finish", reason)
