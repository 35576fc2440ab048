"""Errors as OpenAI sends them: ``{"error": {"message", "type", "param", "code"}}``, all four always there.

    400 invalid_request_error   a body that cannot be served; ``param`` names the part
    401 invalid_api_key         403 insufficient_permissions
    404 model_not_found         and unknown paths
    405, 408, 413, 415, 431     as HTTP means them
    429 rate_limit_exceeded     type "requests" or "tokens"; with retry-after where waiting helps
    500, 503, 504               server_error: we cannot; with retry-after where it helps

No message repeats a text of the user or a secret, with one exception that OpenAI makes too: the name of an unknown
parameter, if it looks like one (an identifier of at most 64 characters). Errors are logged and counted by their code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

SECONDS_TO_RETRY: Final = 1.0


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A failure that the client is told. ``cause`` is the word under which it is counted."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,  # noqa: A002  # the name on the wire
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(code or type)  # not the message: tracebacks stay short
        self.status = status
        self.body = ErrorBody(ErrorDetail(message=message, type=type, param=param, code=code))
        self.headers = dict(headers or {})
        self.cause = cause or code or type
        self.refused = True  # False: it was admitted and then failed, so it is a row and not a refusal


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def unsupported(param: str, why: str = "is not supported by this server.") -> ApiError:
    return invalid(f"'{param}' {why}", param=param, code="unsupported_parameter")


def too_long(prompt: int, wanted: int, context: int, *, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context} tokens. However, you requested {prompt + wanted} tokens "
        f"({prompt} in the prompt, {wanted} in the completion). Please shorten the prompt or ask for fewer tokens.",
        param=param,
        code="context_length_exceeded",
    )


def far_too_long(context: int, *, param: str) -> ApiError:
    """For what is refused by its size alone, so nobody knows its tokens."""
    return invalid(
        f"This model's maximum context length is {context} tokens. However, your prompt is far longer than that. "
        "Please shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def slow_body(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"The request body did not arrive within {seconds:g} seconds. Please send the request again.",
        type="invalid_request_error",
        code="request_timeout",
        headers={"connection": "close"},  # the rest of it may still come
    )


def large_head(most: int) -> ApiError:
    return ApiError(
        431,
        f"The request's URL and headers are larger than {most} bytes.",
        type="invalid_request_error",
        code="headers_too_large",
    )


def no_http() -> ApiError:
    return invalid("The request is not valid HTTP/1.1.", code="invalid_http")


def no_key() -> ApiError:
    return _unauthorized(
        "You didn't provide an API key. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'."
    )


def wrong_key() -> ApiError:
    return _unauthorized("Incorrect API key provided: it is unknown, revoked or expired. Ask your operator for one.")


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        type="invalid_request_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def forbidden(scope: str) -> ApiError:
    return ApiError(
        403,
        f"This API key may not do this: it lacks the scope '{scope}'.",
        type="invalid_request_error",
        code="insufficient_permissions",
    )


def no_model() -> ApiError:
    return ApiError(
        404,
        "The requested model does not exist or you do not have access to it. GET /v1/models lists those that do.",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def unavailable(message: str, code: str, *, retry_s: float | None = SECONDS_TO_RETRY, status: int = 503) -> ApiError:
    return ApiError(status, message, type="server_error", code=code, headers=retry_after(retry_s))


def internal() -> ApiError:
    return ApiError(
        500,
        "The server had an error while processing your request. It was not charged; you may retry it.",
        type="server_error",
        code="internal_error",
    )


def retry_after(seconds: float | None) -> dict[str, str]:
    """Whole seconds, rounded up, and milliseconds for OpenAI's clients. Nothing when waiting does not help."""
    if seconds is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}
