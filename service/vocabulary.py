r"""The bytes that single tokens stand for, and how a token is written where its bytes are no text by themselves.

As OpenAI does: what is not UTF-8 (a token that is a part of a character) is written as escapes, ``\xf0\x9f``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Looks into a tokenizer; asks nothing of it before a token is wanted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        parts = {part["type"]: part for part in _parts(decoder)}
        self._byte_level = "ByteLevel" in parts
        self._byte_fallback = "ByteFallback" in parts
        self._spaces = _spaces(parts)

    def bytes_of(self, token: int) -> bytes | None:
        """None: the token has no text, because it is a special one or none at all."""
        if added := self._added.get(token):
            return None if added.special else added.content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        if self._byte_level and all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        if self._byte_fallback and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        return str(piece).replace(self._spaces, " ").encode() if self._spaces else str(piece).encode()

    def name_of(self, token: int) -> str:
        """The token as it is written; a special one by its name."""
        text = self.bytes_of(token)
        if text is None:
            return str(self._tokenizer.id_to_token(token) or "")
        return text.decode(errors="backslashreplace")


def _parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    elif decoder:
        yield decoder


def _spaces(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands for a space in the names of this vocabulary; "": a space itself."""
    if metaspace := parts.get("Metaspace"):
        return str(metaspace["replacement"])
    replace = parts.get("Replace")
    return str(replace["pattern"].get("String", "")) if replace and replace["content"] == " " else ""


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2, ``bytes_to_unicode``)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF: Final = _byte_letters()
