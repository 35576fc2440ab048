"""Log-probabilities as OpenAI sends them: one shape for chat, an older one for completions.

Both tell of the same tokens: those whose text the answer shows (``service.completion``). Bytes are null where a token
has no text of its own, such as the end of a turn among the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from service.logprobs import Token, Told


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Lists of one length. A token that is not among the likeliest stands beside them in ``top_logprobs``."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(told: Sequence[Told]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat(one) for one in told])


def text_logprobs(told: Sequence[Told]) -> TextLogprobs:
    return TextLogprobs(
        tokens=[_name(one.drawn) for one in told],
        token_logprobs=[one.drawn.logprob for one in told],
        top_logprobs=[_best(one) for one in told],
        text_offset=[one.offset for one in told],
    )


def _chat(told: Told) -> ChatLogprob:
    top = [TopLogprob(token=one.name, logprob=one.logprob, bytes=_bytes(one)) for one in told.best]
    drawn = told.drawn
    return ChatLogprob(token=drawn.name, logprob=drawn.logprob, bytes=_bytes(drawn), top_logprobs=top)


def _best(told: Told) -> dict[str, float]:
    """Two tokens may have one name; then the likelier one is told of."""
    found: dict[str, float] = {}
    for one in (*told.best, told.drawn):
        found.setdefault(_name(one), one.logprob)
    return found


def _bytes(token: Token) -> list[int] | None:
    return None if token.bytes is None else list(token.bytes)


def _name(token: Token) -> str:
    """Here nothing else says that a token is no text by itself."""
    if token.bytes is None:
        return token.name
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
