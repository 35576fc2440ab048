"""Text to token ids and back: chat template, tokenizer, incremental detokenisation, stop strings.

A tokenizer is what its model's worker published, so an API machine needs no model files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from service.vocabulary import Vocabulary

_BROKEN: Final = "\ufffd"  # what a byte sequence that is not (yet) UTF-8 decodes to
_LONGEST_HOLD: Final = 32  # tokens that may wait for a character to complete

Message = Mapping[str, str]


class TemplateRefusedError(Exception):
    """The model's chat template does not take these messages. Carries no text of them."""


class TextTooLongError(Exception):
    """The text cannot be as few tokens as it may be. Carries nothing of it."""


class Text:
    """Tokenizer and chat template of one model revision."""

    def __init__(self, tokenizer: str, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        """``tokenizer`` is the content of a tokenizer.json. Raises ValueError when it or the template is invalid."""
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer)
            self._template = _environment().from_string(chat_template) if chat_template else None
        except jinja2.TemplateError as error:
            raise ValueError("chat template is invalid") from error
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError("tokenizer.json is invalid") from error
        self._special_tokens = dict(special_tokens)
        self.vocabulary = Vocabulary(self._tokenizer)
        self._longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)  # bytes

    @property
    def chats(self) -> bool:
        return self._template is not None

    def may_fit(self, characters: int, tokens: int) -> bool:
        """Whether so many characters could be as few tokens as that. No tokenizer is asked.

        A token stands for at most the bytes of its own name: in byte-level vocabularies each byte is a symbol of one
        byte or two, in others a token is its text. Tokenizers that drop some of a text count as if they did not.
        """
        return characters <= tokens * self._longest

    def encode(self, text: str, *, most: int) -> list[int]:
        """Raises TextTooLongError for what cannot be ``most`` tokens or fewer."""
        return self._encode(text, most=most, special=True)

    def encode_chat(self, messages: Sequence[Message], *, most: int) -> list[int]:
        """Ids of the rendered conversation, ready for the assistant's turn.

        Raises TemplateRefusedError, and TextTooLongError for what cannot be ``most`` tokens or fewer.
        """
        if self._template is None:
            raise TemplateRefusedError
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise TemplateRefusedError from error
        return self._encode(text, most=most, special=False)  # the template writes them

    def _encode(self, text: str, *, most: int, special: bool) -> list[int]:
        if not self.may_fit(len(text), most) or not self.may_fit(len(text.encode(errors="replace")), most):
            raise TextTooLongError
        # Of the tokenizer's ways to encode, this one lets go of the GIL (tokenizers 0.23; it is the fastest, too).
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)


class Detokenizer:
    """Ids of one completion to text, never showing a character before all of its bytes are there.

    ids:  [0 … anchor … start … end)   ``anchor`` to ``start`` is text that was given out and is decoded again only so
    that the first new token has its left context; ``start`` to ``end`` is what may still be incomplete.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._ids: list[int] = []
        self._anchor = 0
        self._start = 0
        self._given = 0  # characters given out of what follows ``start``

    @property
    def whole(self) -> bool:
        """Whether all that was pushed has been given out."""
        return self._start == len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        shown = self._text.decode(self._ids[self._anchor : self._start])
        whole = self._text.decode(self._ids[self._anchor :])[len(shown) :]
        complete = whole.rstrip(_BROKEN)
        fresh = complete[self._given :]
        self._given = max(self._given, len(complete))
        if whole == complete or len(self._ids) - self._start > _LONGEST_HOLD:
            self._anchor, self._start, self._given = self._start, len(self._ids), 0
        return fresh


class StopStrings:
    """Finds the first stop string in text that comes in pieces, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string is complete: then it ends before that)."""
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            shown, self._held = self._held[: min(places)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """What was held back and will not become a stop string any more."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that starts ``stop`` without completing it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Generation(jinja2.ext.Extension):
    """Templates for training mark the assistant's words with ``{% generation %}``; to render, they are just words."""

    tags: Final = {"generation"}  # type: ignore[misc]  # jinja2 declares a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders chat templates, so that the same messages give the same ids."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # prompts are not HTML
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # called by templates, with these names and this order
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002  # as above
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # templates expect the local day
