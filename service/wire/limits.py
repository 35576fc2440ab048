"""What a client is told of its limits: the x-ratelimit headers, and the error when one is reached.

Of key and tenant, the one with less left is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.admission import Cause, Refused, Scope, Usage
from service.wire.errors import ApiError, retry_after, unavailable

_PER_MINUTE = {Cause.REQUESTS: "requests per minute (RPM)", Cause.TOKENS: "tokens per minute (TPM)"}


def rate_headers(scopes: Sequence[Scope], used: Sequence[Usage]) -> dict[str, str]:
    requests = _headers("requests", scopes, used, lambda scope: scope.rpm, lambda usage: usage.requests)
    return requests | _headers("tokens", scopes, used, lambda scope: scope.tpm, lambda usage: usage.tokens)


def denied(refused: Refused, scopes: Sequence[Scope]) -> ApiError:
    """The error of an admission that was refused."""
    headers = rate_headers(scopes, refused.used)
    retry_s = refused.retry_ms / 1000 if refused.retry_ms else None
    if refused.cause is Cause.OVERLOADED:
        error = unavailable("The model is overloaded with other requests. Please retry later.", "overloaded")
    elif refused.cause is Cause.NO_WORKER:
        error = unavailable("No worker serves this model at the moment. Please retry later.", "no_worker")
    elif refused.cause is Cause.FORGOTTEN:
        error = unavailable("The server could not admit the request in time. Please retry.", "admission_unknown")
    else:
        error = _rate_limited(refused, scopes[refused.scope], retry_s)
    error.headers = {**headers, **error.headers}
    return error


def _rate_limited(refused: Refused, scope: Scope, retry_s: float | None) -> ApiError:
    who = scope.name.partition(":")[0]
    limit = {Cause.REQUESTS: scope.rpm, Cause.TOKENS: scope.tpm, Cause.CONCURRENCY: scope.concurrency}[refused.cause]
    what = _PER_MINUTE.get(refused.cause, "requests at once")
    if retry_s is None:
        advice = "This request alone is larger than the limit: shorten the prompt or lower max_tokens."
    else:
        advice = f"Please try again in {go_duration(refused.retry_ms)}."
    return ApiError(
        429,
        f"Rate limit reached for this {who}: {limit} {what}. {advice}",
        type="tokens" if refused.cause is Cause.TOKENS else "requests",
        code="rate_limit_exceeded",
        headers=retry_after(retry_s) if retry_s is not None else {"x-should-retry": "false"},
        cause=f"{who}_{refused.cause}",
    )


def _headers(
    kind: str,
    scopes: Sequence[Scope],
    used: Sequence[Usage],
    limit_of: Callable[[Scope], int | None],
    used_of: Callable[[Usage], int],
) -> dict[str, str]:
    pairs = zip(scopes, used, strict=True)
    limited = [(limit, usage) for scope, usage in pairs if (limit := limit_of(scope)) is not None]
    if not limited:
        return {}
    limit, usage = min(limited, key=lambda pair: pair[0] - used_of(pair[1]))
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(0, limit - used_of(usage))),
        f"x-ratelimit-reset-{kind}": go_duration(usage.reset_ms),
    }


def go_duration(milliseconds: int) -> str:
    """As Go writes durations, which OpenAI's headers use: 12ms, 1.5s, 6m0s."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
