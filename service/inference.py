"""OpenAI's routes: from an HTTP request to an order, refusing by name what cannot be served.

key → body → model → token ids → order → Reply
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from litestar import Request, get, post
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, JSONBody
from litestar.types import ASGIApp
from redis.exceptions import RedisError

from billing.keys import Principal, Scope
from service import bodies
from service.auth import KeysUnavailableError, refused, scopes_of
from service.front import Connection, Front, begin, principal_of, remember, request_id, started
from service.order import Order
from service.reading import prompt_of, sampling_of
from service.reply import Reply
from service.telemetry import trace_id_of
from service.wire import errors
from service.wire.forms import ChatForm, Form, TextForm
from service.wire.parameters import Parameters, parse
from service.wire.requests import ChatRequest, CompletionRequest
from service.wire.responses import ChatCompletion, ModelList, ModelObject, TextCompletion
from service.workers import Model

HttpRequest = Request[Any, Any, Any]  # Litestar's type parameters carry nothing of ours

_JSON: Final = "application/json"
_ERRORS: Final = {
    status: ResponseSpec(errors.ErrorBody, generate_examples=False, description="OpenAI's error body")
    for status in (400, 401, 404, 413, 415, 429, 503)
}


class WireRequest(HttpRequest):
    """Reads a body, within a time, as the type that its handler declares, with OpenAI's errors.

    The request's clock starts anew when the body is there: an upload is the client's time.
    """

    async def body(self) -> bytes:
        body = await bodies.read(self, super().body, self.app.state.front.settings.body_timeout_s)
        begin(self.scope)
        return body

    async def json(self) -> Any:  # noqa: ANN401  # Litestar's signature
        if self.content_type[0] != _JSON:
            raise errors.ApiError(
                415,
                "The content type must be 'application/json'.",
                type="invalid_request_error",
                code="unsupported_media_type",
            )
        kind = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        return parse(await self.body(), kind)


async def authenticate(front: Front, connection: Connection, scope: Scope) -> Principal:
    """The principal of the request's key. Raises ApiError."""
    begin(connection.scope)
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise errors.no_key()
    try:
        principal = await front.keys.principal(secret.strip())
    except KeysUnavailableError:
        message = "The server cannot check API keys at the moment. Please retry later."
        raise errors.unavailable(message, "keys_unavailable") from None
    if principal is None:
        raise errors.wrong_key()
    remember(connection.scope, principal)
    if refused(principal):
        raise errors.wrong_key()
    if scope not in principal.scopes:
        raise errors.forbidden(scope)
    return principal


def routes(front: Front) -> list[HTTPRouteHandler]:
    async def needs_key(connection: Connection, _: BaseRouteHandler) -> None:
        await authenticate(front, connection, Scope.INFERENCE)

    @get("/v1/models", guards=[needs_key], tags=["Models"], summary="List models", responses=_ERRORS)
    async def list_models() -> ModelList:
        return ModelList(data=[_model(model) for model in front.dispatch.workers.models()])

    @get("/v1/models/{name:path}", guards=[needs_key], tags=["Models"], summary="Retrieve a model", responses=_ERRORS)
    async def retrieve_model(name: FromPath[str]) -> ModelObject:
        return _model(await _find(front, name.removeprefix("/")))

    @post(
        "/v1/chat/completions",
        guards=[needs_key],
        status_code=200,
        tags=["Chat"],
        summary="Create a chat completion",
        responses=_ERRORS | {200: ResponseSpec(ChatCompletion, generate_examples=False)},
    )
    async def chat_completions(data: JSONBody[ChatRequest], request: HttpRequest) -> ASGIApp:
        model = await _find(front, data.model)
        prompt = await prompt_of(model, data)
        order = _order(front, request, model, data, prompt)
        return Reply(order, _form(ChatForm, order, data), front.dispatch, front.tracing)

    @post(
        "/v1/completions",
        guards=[needs_key],
        status_code=200,
        tags=["Completions"],
        summary="Create a completion",
        responses=_ERRORS | {200: ResponseSpec(TextCompletion, generate_examples=False)},
    )
    async def completions(data: JSONBody[CompletionRequest], request: HttpRequest) -> ASGIApp:
        model = await _find(front, data.model)
        prompt = await prompt_of(model, data)
        order = _order(front, request, model, data, prompt)
        return Reply(order, _form(TextForm, order, data), front.dispatch, front.tracing)

    return [list_models, retrieve_model, chat_completions, completions]


def _model(model: Model) -> ModelObject:
    return ModelObject(id=model.name, created=int(model.since))


async def _find(front: Front, name: str) -> Model:
    with contextlib.suppress(RedisError):
        await front.dispatch.workers.find(name)
    model = front.dispatch.workers.model(name)
    if model is not None:
        return model
    if not front.dispatch.reachable():
        raise errors.unavailable("The server cannot take requests at the moment. Please retry later.", "unavailable")
    if not front.dispatch.workers.models():
        raise errors.unavailable("No worker has registered a model yet. Please retry later.", "no_worker")
    raise errors.no_model()


def _order(
    front: Front, request: HttpRequest, model: Model, data: ChatRequest | CompletionRequest, prompt: list[int]
) -> Order:
    principal = principal_of(request.scope)
    assert principal is not None
    if principal.tenant_id is None:
        raise errors.forbidden(Scope.INFERENCE)  # the operator's own key is nobody's bill
    created_at, started_ns = started(request.scope)
    identity = request_id(request.scope)
    sampling = sampling_of(model, data, prompt=len(prompt), wanted=data.wanted_tokens)
    endpoint = request.scope["path_template"]
    traceparent = front.tracing.begin(identity, endpoint, model.name, request.headers.get("traceparent", ""))
    return Order(
        tenant_id=principal.tenant_id,
        api_key_id=principal.key_id,
        scopes=scopes_of(principal),
        model=model,
        endpoint=endpoint,
        stream=data.streams,
        prompt=prompt,
        sampling=sampling,
        timeout_s=front.settings.request_timeout_s,
        stop=data.stops,
        weight=principal.weight,
        cache_salt=front.settings.cache_salt,
        trace_id=trace_id_of(traceparent),
        traceparent=traceparent,
        request_id=identity,
        created_at=created_at,
        started_ns=started_ns,
    )


def _form(kind: type[ChatForm | TextForm], order: Order, data: Parameters) -> Form:
    return kind(
        request_id=order.request_id,
        created=int(order.created_at),
        model=order.model.name,
        fingerprint=order.model.revision,
        includes_usage=data.includes_usage,
        tells=order.sampling.logprobs is not None,
    )
