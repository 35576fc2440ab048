"""Answers as OpenAI sends them, field by field and in its order."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from service.wire.logprobs import ChatLogprobs, TextLogprobs

Finish = Literal["stop", "length"]


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    pass


class PromptDetails(_Wire, frozen=True, kw_only=True):
    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(_Wire, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(_Wire, frozen=True, kw_only=True):
    """What was billed; ``prompt_tokens`` includes the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails()


class AssistantMessage(_Wire, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(_Wire, frozen=True, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(_Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class Delta(_Wire, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChunkChoice(_Wire, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(_Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextChoice(_Wire, frozen=True, kw_only=True):
    text: str
    index: int = 0
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class TextCompletion(_Wire, frozen=True, kw_only=True):
    """Whole, or a chunk of a stream: the older endpoint has one shape for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelObject(_Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pennyweight"


class ModelList(_Wire, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]


def usage(prompt: int, cached: int, completion: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )
