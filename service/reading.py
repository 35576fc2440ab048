"""From a typed request to what the engine takes: token ids and sampling, for both owners of requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from engine.protocol import Sampling
from service.order import seed_of
from service.text import TemplateRefusedError, TextTooLongError
from service.wire import errors
from service.wire.parameters import Parameters
from service.wire.requests import ChatRequest, CompletionRequest
from service.workers import Model

_IN_THREAD: Final = 4_000  # characters, some 5 ms: tokenising longer prompts would hold up the other requests
_PER_MESSAGE: Final = 40  # characters' worth of rendering
# Few, so that long prompts wait for each other and for nobody else; not asyncio's own, which keys are looked up in.
_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)  # one way to write each, so that no token comes twice


async def prompt_of(model: Model, data: ChatRequest | CompletionRequest) -> list[int]:
    """Token ids, at least one. Raises ApiError."""
    try:
        prompt = await (_chat(model, data) if isinstance(data, ChatRequest) else _text(model, data))
    except TextTooLongError:
        raise errors.far_too_long(_longest(model), param=_where(data)) from None
    if not prompt:
        raise errors.invalid("The prompt is empty.", param=_where(data))
    return prompt


def sampling_of(model: Model, data: Parameters, *, prompt: int, wanted: int | None) -> Sampling:
    """``prompt`` and ``wanted`` count tokens; None is the model's default, as far as there is room. Raises ApiError."""
    longest = _longest(model)
    if prompt + (wanted or 1) > longest:
        raise errors.too_long(prompt, wanted or 1, longest, param=_where(data))
    max_tokens = wanted or min(model.default_max_tokens, longest - prompt)
    if (data.min_tokens or 0) > max_tokens:
        raise errors.invalid("'min_tokens' may not be more than the tokens asked for.", param="min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=data.min_tokens or 0,
        temperature=1.0 if data.temperature is None else data.temperature,
        top_p=1.0 if data.top_p is None else data.top_p,
        top_k=max(0, data.top_k or 0),
        min_p=data.min_p or 0.0,
        seed=seed_of(data.seed),
        ignore_eos=bool(data.ignore_eos),
        stop_token_ids=_known(data.stop_token_ids or (), model, "stop_token_ids"),
        repetition_penalty=1.0 if data.repetition_penalty is None else data.repetition_penalty,
        presence_penalty=data.presence_penalty or 0.0,
        frequency_penalty=data.frequency_penalty or 0.0,
        logit_bias=_bias(data.logit_bias or {}, model),
        logprobs=data.told_logprobs,
    )


def _longest(model: Model) -> int:
    """Tokens of prompt and completion together."""
    return min(model.context_length, model.kv_tokens)


def _where(data: Parameters) -> str:
    return "messages" if isinstance(data, ChatRequest) else "prompt"


def _bias(given: Mapping[str, float], model: Model) -> tuple[tuple[int, float], ...]:
    """OpenAI writes token ids as the keys of an object. A bias of 0 is none."""
    if not all(_ID.fullmatch(key) for key in given):
        raise errors.invalid("The keys of 'logit_bias' must be token ids in decimal digits.", param="logit_bias")
    tokens = _known([int(key) for key in given], model, "logit_bias")
    return tuple((token, value) for token, value in zip(tokens, given.values(), strict=True) if value)


def _known(tokens: Sequence[int], model: Model, param: str) -> tuple[int, ...]:
    if not all(0 <= token < model.vocab_size for token in tokens):
        raise errors.invalid(f"Token ids must be between 0 and {model.vocab_size - 1}.", param=param)
    return tuple(tokens)


async def _chat(model: Model, data: ChatRequest) -> list[int]:
    if not model.text.chats:
        raise errors.invalid("This model has no chat template. Use /v1/completions.", param="model")
    most = _longest(model)
    if len(data.messages) > most:  # a message is a token or more
        raise TextTooLongError
    messages = data.conversation()
    characters = sum(len(message["content"]) for message in messages)
    if not model.text.may_fit(characters, most):
        raise TextTooLongError
    try:
        return await _apart(
            partial(model.text.encode_chat, messages, most=most), characters + _PER_MESSAGE * len(messages)
        )
    except TemplateRefusedError:
        raise errors.invalid(
            "The model's chat template does not take these messages. Check the order of their roles.", param="messages"
        ) from None


async def _text(model: Model, data: CompletionRequest) -> list[int]:
    most = _longest(model)
    if isinstance(data.prompt, list) and len(data.prompt) > most:
        raise TextTooLongError
    prompt = data.one_prompt()
    if isinstance(prompt, str):
        return await _apart(partial(model.text.encode, prompt, most=most), len(prompt))
    if len(prompt) > most:
        raise TextTooLongError
    return list(_known(prompt, model, "prompt"))


async def _apart(work: Callable[[], list[int]], characters: int) -> list[int]:
    """Short work here and now, long work beside the event loop."""
    if characters <= _IN_THREAD:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
