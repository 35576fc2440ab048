"""A completion as it grows: ids in; text out, up to the first stop string, with the tokens that it stands for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from service.text import StopStrings, Text


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to send, and how many tokens of the completion are wholly shown once it is sent."""

    text: str
    tokens: int


class Completion:
    """One choice of one request. Pure: it neither waits nor sends."""

    def __init__(self, text: Text, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        self.ids: list[int] = []
        self.kept: int | None = None  # tokens up to and including the one that completed a stop string
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._ready = ""
        self._decoded = 0  # characters, whether shown or held back
        self._shown = 0  # characters
        self._tokens = 0
        self._ends: deque[tuple[int, int]] = deque()  # (characters, tokens) where a token's text is complete

    def push(self, ids: Sequence[int]) -> bool:
        """Add generated ids. True when they complete a stop string; later ids only count as generated."""
        for token in ids:
            self.ids.append(token)
            if self.kept is None:
                self._decode(token)
        return self.kept is not None

    def finish(self) -> None:
        """No more ids will come: what was held back as the possible start of a stop string is text."""
        if self.kept is None:
            self._show(self._stops.flush())

    @property
    def ready(self) -> bool:
        """Whether there is text to take."""
        return bool(self._ready)

    def take(self) -> Piece | None:
        """All text that is ready and was not taken, else None."""
        if not self._ready:
            return None
        piece, self._ready = Piece(self._ready, self._tokens), ""
        return piece

    def _decode(self, token: int) -> None:
        text = self._detokenizer.push(token)
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
