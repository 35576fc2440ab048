"""Bodies of the two endpoints that generate text."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from service.text import Message
from service.wire.errors import invalid, unsupported
from service.wire.parameters import Count, Parameters

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


# Without gc: a hundred thousand of them in one body would set the collector off again and again; JSON has no cycles.
class ContentPart(msgspec.Struct, kw_only=True, gc=False):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None  # a label, without effect
    # What a client sends back of an earlier answer of ours: always null or empty there
    refusal: object = None
    annotations: object = None
    audio: object = None
    function_call: object = None
    tool_calls: object = None
    tool_call_id: object = None


class ChatRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    audio: object = None
    function_call: object = None
    functions: object = None
    modalities: object = None
    moderation: object = None
    parallel_tool_calls: object = None
    prediction: object = None
    prompt_cache_options: object = None
    reasoning_effort: object = None
    response_format: object = None
    service_tier: object = None
    store: object = None
    tool_choice: object = None
    tools: object = None
    verbosity: object = None
    web_search_options: object = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[Message]:
        """Roles and texts as a chat template takes them. Raises ApiError."""
        return [_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


class CompletionRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: object = None
    echo: object = None
    suffix: object = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        return self.logprobs

    def one_prompt(self) -> str | list[int]:
        """The text, or the token ids. Raises ApiError."""
        given = self.prompt
        if isinstance(given, str):
            return given
        if len(given) == 1 and not isinstance(given[0], int):
            return given[0]
        ids = [token for token in given if isinstance(token, int)]
        if len(ids) == len(given):
            return ids
        if all(isinstance(one, str) for one in given) or all(isinstance(one, list) for one in given):
            raise unsupported("prompt", "may hold one prompt only on this server: send one request for each.")
        raise invalid("'prompt' must be a text or a list of token ids.", param="prompt")


def _message(message: ChatMessage, path: str) -> Message:
    if message.role in {"tool", "function"}:
        raise unsupported(f"{path}.role", "may not be 'tool' or 'function': tools are not supported by this server.")
    for field in ("audio", "function_call", "tool_calls", "tool_call_id"):
        if getattr(message, field):
            raise unsupported(f"{path}.{field}")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _content(message.content, f"{path}.content")}


def _content(content: str | list[ContentPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"'{path}' must be a text or a list of text parts.", param=path)
    for i, part in enumerate(content):
        if part.type != "text":
            raise unsupported(f"{path}[{i}].type", "may only be 'text' on this server.")
        if part.text is None:
            raise invalid(f"Missing required parameter: '{path}[{i}].text'.", param=f"{path}[{i}].text")
    return "\n".join(part.text or "" for part in content)
