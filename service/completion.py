"""A completion as it grows: ids in; text out, up to the first stop string, with the tokens that it stands for.

A token is *shown* with the piece that completes its text; a character that falls on several tokens shows them together.
Not shown are the token that ended the completion, and those whose text a stop string cut off or into: what is told of
tokens is told of those shown, each once. So their bytes, in order, are the text, as far as it ends with a whole token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from engine.protocol import Logprob
from service.logprobs import Told, told
from service.text import StopStrings, Text


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to send, and how many tokens of the completion are wholly shown once it is sent."""

    text: str
    tokens: int
    told: tuple[Told, ...] = ()  # of the tokens that it shows, where that was asked for


def joined(pieces: Iterable[Piece]) -> Piece:
    """All of them in one."""
    parts = [Piece("", 0), *pieces]
    told_of = tuple(one for piece in parts for one in piece.told)
    return Piece("".join(piece.text for piece in parts), parts[-1].tokens, told_of)


class Completion:
    """One choice of one request. Pure: it neither waits nor sends."""

    def __init__(self, text: Text, stops: Sequence[str], *, min_tokens: int = 0, ending: Collection[int] = ()) -> None:
        """``ending``: tokens that the worker ends a completion with. They have no text, like stop strings."""
        self.ids: list[int] = []
        self.kept: int | None = None  # tokens up to and including the one that completed a stop string
        self._vocabulary = text.vocabulary
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._ending = ending
        self._ready = ""
        self._decoded = 0  # characters, whether shown or held back
        self._shown = 0  # characters
        self._tokens = 0
        self._ends: deque[tuple[int, int]] = deque()  # (characters, tokens) where a token's text is complete
        self._untold: deque[tuple[int, Told]] = deque()  # (number of the token from 1, what there is to tell of it)
        self._told: list[Told] = []  # to take

    def push(self, ids: Sequence[int], logprobs: Sequence[Logprob] | None = None) -> bool:
        """Add generated ids. True when they complete a stop string; later ids only count as generated."""
        for token, logprob in zip(ids, repeat(None, len(ids)) if logprobs is None else logprobs, strict=True):
            self.ids.append(token)
            if self.kept is None:
                if logprob is not None and token not in self._ending:
                    offset = self._decoded
                    self._untold.append((len(self.ids), told(self._vocabulary, token, logprob, offset=offset)))
                self._decode(token)
        return self.kept is not None

    def finish(self) -> None:
        """No more ids will come: what was held back as the possible start of a stop string is text."""
        if self.kept is None:
            self._show(self._stops.flush())

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready or self._told)

    def take(self) -> Piece | None:
        """All text that is ready and was not taken, with what there is to tell of its tokens; None: nothing is."""
        if not self.ready:
            return None
        piece = Piece(self._ready, self._tokens, tuple(self._told))
        self._ready, self._told = "", []
        return piece

    def _decode(self, token: int) -> None:
        text = "" if token in self._ending else self._detokenizer.push(token)
        self._decoded += len(text)
        if self._detokenizer.whole:
            self._ends.append((self._decoded, len(self.ids)))
        if len(self.ids) < self._min_tokens:
            self._show(text)
            return
        shown, stopped = self._stops.push(text)
        self._show(shown)
        if stopped:
            self.kept = len(self.ids)

    def _show(self, text: str) -> None:
        self._ready += text
        self._shown += len(text)
        while self._ends and self._ends[0][0] <= self._shown:
            self._tokens = self._ends.popleft()[1]
        while self._untold and self._untold[0][0] <= self._tokens:
            self._told.append(self._untold.popleft()[1])
