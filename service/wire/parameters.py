"""What a request may say. Supported parameters are typed and bounded; the rest of OpenAI's are refused by name.

A parameter that would change nothing at the value it has (``n=1``, ``tools=[]``, ``echo=false``) is accepted, because
clients send them; so are those that only label a request.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from service.wire.errors import ApiError, invalid, unsupported

Stop = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

MAX_STOPS: Final = 4
MAX_STOP_IDS: Final = 128
MAX_BIASES: Final = 1024
_S = TypeVar("_S", bound=msgspec.Struct)

# Values, beside null, at which a parameter changes nothing.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. ``object`` fields are OpenAI's that this server accepts at neutral values only."""

    model: Annotated[str, Meta(min_length=1)]
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: Stop | list[Stop] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None  # token id: what its logit gets
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI, as vLLM names them
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_IDS)] | None = None
    # Labels, without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # At neutral values only
    n: object = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def told_logprobs(self) -> int | None:
        """How many of the most likely tokens to tell of, beside each of the answer; None: nothing is told."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def parse(body: bytes, kind: type[_S]) -> _S:
    """A request that can be served as far as its own words tell. Raises ApiError (400)."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid("The request body is not valid JSON (RFC 8259, UTF-8).", code="invalid_json") from None
    if isinstance(request, Parameters):
        _check(request)
    return request


def _check(request: Parameters) -> None:
    _refuse_what_is_not_neutral(request)
    if len(request.stops) > MAX_STOPS:
        raise invalid(f"'stop' may hold at most {MAX_STOPS} strings.", param="stop")
    if len(request.logit_bias or ()) > MAX_BIASES:
        raise invalid(f"'logit_bias' may hold at most {MAX_BIASES} tokens.", param="logit_bias")
    if request.stream_options is not None and not request.streams:
        raise invalid("'stream_options' is only allowed together with 'stream'.", param="stream_options")


def _refuse_what_is_not_neutral(request: Parameters) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == other and _kind(value) == _kind(other) for other in neutral):
            raise unsupported(name)


def _kind(value: object) -> type:
    """JSON knows one kind of number, and ``False == 0`` only in Python."""
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


# What stands before either may be the user's, even something that looks like a path: only the very end is msgspec's.
_PATH: Final = re.compile(r" - at `\$\.?([A-Za-z0-9_.\[\]]*)`\Z")
_FIELD: Final = re.compile(r" field `([A-Za-z_][A-Za-z0-9_]{0,63})`\Z")
_UNKNOWN: Final = re.compile(
    r"Object contains unknown field `([A-Za-z_][A-Za-z0-9_]{0,63})`(?: - at `\$\.?([A-Za-z0-9_.\[\]]*)`)?"
)


def _explain(text: str) -> ApiError:
    """Msgspec's message without what it may quote from the body."""
    if text.startswith("Object contains unknown field"):
        return _unknown(text)
    found = _PATH.search(text)
    path = found[1].removesuffix("[...]") if found else ""
    what = text[: found.start()] if found else text
    field = _FIELD.search(what)
    param = ".".join(part for part in (path, field[1] if field else "") if part) or None
    if what.startswith("Object missing required field"):
        return invalid(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if what.startswith("Expected"):
        return invalid(f"Invalid value for '{param or 'body'}': {_lower(what)}.", param=param, code="invalid_value")
    return invalid(f"Invalid value for '{param or 'body'}'.", param=param, code="invalid_value")


def _unknown(text: str) -> ApiError:
    named = _UNKNOWN.fullmatch(text)
    if named is None:
        return invalid("The request holds an unknown parameter.", code="unknown_parameter")
    param = f"{named[2]}.{named[1]}" if named[2] else named[1]
    return invalid(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")


def _lower(text: str) -> str:
    return text[0].lower() + text[1:].replace("`", "")
