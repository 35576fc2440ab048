"""What the engine told of a token's likelihood, in words: names and bytes in place of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.protocol import Logprob
from service.vocabulary import Vocabulary

_LEAST: Final = -9999.0  # OpenAI's word for "very unlikely"; JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    bytes: bytes | None  # None: it has no text
    logprob: float


@dataclass(frozen=True, slots=True)
class Told:
    """One token of a completion."""

    drawn: Token
    best: Sequence[Token]  # the most likely ones, the likeliest first; may hold the one drawn
    offset: int  # characters of the completion before it


def told(vocabulary: Vocabulary, token: int, logprob: Logprob, *, offset: int) -> Told:
    best = zip(logprob.ids, logprob.logprobs, strict=True)
    return Told(
        drawn=_token(vocabulary, token, logprob.logprob),
        best=[_token(vocabulary, other, value) for other, value in best],
        offset=offset,
    )


def _token(vocabulary: Vocabulary, token: int, logprob: float) -> Token:
    return Token(vocabulary.name_of(token), vocabulary.bytes_of(token), max(logprob, _LEAST))
