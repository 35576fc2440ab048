"""Admission: limits, slot, choice of worker and enqueueing in one Redis call, and the release that undoes them.

The rule, which ``admission.lua`` carries out atomically:

* A *scope* (a key, a tenant) may have a limit of requests and of tokens per 60 seconds and of requests at once. No
  60-second window holds more admissions, or more tokens reserved or used by them, than the limit. A reservation is the
  prompt and ``max_tokens``; the release puts what was billed in its place.
* Either everything is taken or nothing is: a refused call leaves no trace in any window.
* The job goes to the living candidate with the fewest outstanding tokens, if its bound leaves room. Rather to the one
  that got the last prompt with the same beginning, whose KV it may still hold, as long as that is no more than the
  prompt's length busier.
* Every call is idempotent by request id and attempt, so a lost reply is answered by asking again.
* A request holds what it holds for as long as its lease is renewed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID

import msgspec
from redis.asyncio import Redis

from engine.protocol import Job, pack

_SCRIPT: Final = (Path(__file__).parent / "admission.lua").read_bytes()
_BEGINNING: Final = 64  # tokens: shorter ones are common to many prompts that share no more
_T = TypeVar("_T")


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Who is limited and to what; None is no limit."""

    name: str  # "tenant:{id}" or "key:{id}"
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None


class Candidate(msgspec.Struct, frozen=True):
    worker: str  # boot id
    room: int  # most outstanding tokens


class Cause(StrEnum):
    """Why an admission was refused."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    OVERLOADED = "overloaded"  # workers live, none has room
    NO_WORKER = "no_worker"
    FORGOTTEN = "forgotten"  # its owner has given the request up already


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One scope after the call."""

    requests: int
    tokens: int
    running: int
    reset_ms: int  # until the windows are empty


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    used: list[Usage]  # in the order of the scopes


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    cause: Cause
    retry_ms: int  # 0: waiting does not help
    scope: int  # index, or -1 where no scope is to blame
    used: list[Usage]


class _Answer(msgspec.Struct, kw_only=True):
    used: list[Usage]
    worker: str = ""
    cause: Cause | None = None
    retry_ms: int = 0
    scope: int = -1


class Admission:
    """The script on one Redis server. Every method is one call and raises redis.RedisError when Redis is away."""

    def __init__(self, connection: Redis, lease_s: float, *, clock: Callable[[], int] | None = None) -> None:
        """``clock`` (milliseconds) replaces Redis' own, so that a test need not wait for a window to pass."""
        self._script = connection.register_script(_SCRIPT)
        self._lease_ms = int(lease_s * 1000)
        self._clock = clock

    async def admit(self, job: Job, scopes: Sequence[Scope], candidates: Sequence[Candidate]) -> Granted | Refused:
        """Take what the job needs and send it, checking limits for its first attempt only."""
        answer = await self._call(
            _Answer,
            pack(job),
            op="admit",
            id=str(job.request_id),
            attempt=job.attempt,
            lease_ms=self._lease_ms,
            scopes=scopes,
            tokens=reserved_tokens(job),
            beginning=beginning(job),
            saves=len(job.prompt),
            candidates=candidates,
            check=job.attempt == 1,
        )
        if answer.cause is None:
            return Granted(worker=answer.worker, used=answer.used)
        return Refused(cause=answer.cause, retry_ms=answer.retry_ms, scope=answer.scope, used=answer.used)

    async def release(self, request_id: UUID, *, used_tokens: int) -> bool:
        """Give back everything; ``used_tokens`` stay in the rate windows. False when nothing was held."""
        return await self._call(bool, op="release", id=str(request_id), used=used_tokens)

    async def renew(self, running: Iterable[UUID]) -> list[UUID]:
        """Renew the leases of running requests and let old ones expire. Returns those whose lease was gone."""
        ids = [str(request_id) for request_id in running]
        return [UUID(i) for i in await self._call(list[str], op="renew", ids=ids, lease_ms=self._lease_ms)]

    async def forget(self, request_id: UUID) -> str:
        """Undo an admission of unknown outcome, and forbid it. Returns the worker that got the job, or ""."""
        return await self._call(str, op="forget", id=str(request_id))

    async def _call(self, answer: type[_T], payload: bytes = b"", **call: object) -> _T:
        if self._clock is not None:
            call["now"] = self._clock()
        reply = await self._script(args=[msgspec.msgpack.encode(call), payload])
        return msgspec.msgpack.decode(reply, type=answer, strict=False)


def reserved_tokens(job: Job) -> int:
    """The worst case, which limits and a worker's load count until the request is settled."""
    return len(job.prompt) + job.sampling.max_tokens


def beginning(job: Job) -> str:
    """A name for how a prompt begins: the same for jobs that may find each other's cached KV. "" for a short one."""
    if len(job.prompt) < _BEGINNING:
        return ""
    whose = f"{job.origin.revision}:{job.cache_salt}:{'' if job.cache_salt else job.origin.tenant_id}"
    return hashlib.sha256(whose.encode() + array("q", job.prompt[:_BEGINNING]).tobytes()).hexdigest()
