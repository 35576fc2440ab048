"""What is asked of the engine, by whom and on which terms: a valid request, ready for admission.

Both owners make one: the gateway from an HTTP request, the batch runner from a line of its file.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from billing.ids import uuid7
from engine.protocol import Job, JobClass, Origin, Sampling
from service.admission import Scope
from service.completion import Completion
from service.workers import Model

_SEEDS: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request. ``sampling.seed`` is always set (see ``seed_of``), so that a later attempt draws the same."""

    tenant_id: UUID
    api_key_id: UUID
    scopes: tuple[Scope, ...]
    model: Model
    endpoint: str
    stream: bool
    prompt: list[int]
    sampling: Sampling
    timeout_s: float  # from now until the deadline
    stop: tuple[str, ...] = ()
    klass: JobClass = JobClass.INTERACTIVE
    weight: float = 1.0
    cache_salt: str = ""  # as settings.cache_salt
    batch_id: UUID | None = None
    trace_id: str = ""
    traceparent: str = ""
    request_id: UUID = field(default_factory=uuid7)
    created_at: float = field(default_factory=time.time)
    started_ns: int = field(default_factory=time.monotonic_ns)

    def origin(self, boot: str) -> Origin:
        return Origin(
            tenant_id=self.tenant_id,
            api_key_id=self.api_key_id,
            model=self.model.name,
            deployment=self.model.deployment,
            revision=self.model.revision,
            endpoint=self.endpoint,
            stream=self.stream,
            boot_id=boot,
            created_at=self.created_at,
            deadline=self.created_at + self.timeout_s,
            batch_id=self.batch_id,
            trace_id=self.trace_id,
        )

    def job(self, origin: Origin) -> Job:
        """The first attempt."""
        return Job(
            request_id=self.request_id,
            attempt=1,
            origin=origin,
            prompt=self.prompt,
            sampling=self.sampling,
            klass=self.klass,
            weight=self.weight,
            cache_salt=self.cache_salt,
            traceparent=self.traceparent,
        )

    def completion(self) -> Completion:
        """What it is answered with, before the first token."""
        sampling = self.sampling
        ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.model.eos_token_ids)}
        return Completion(self.model.text, self.stop, min_tokens=sampling.min_tokens, ending=ending)


def seed_of(asked: int | None) -> int:
    """The client's seed as the engine takes it, else a random one."""
    return secrets.randbelow(_SEEDS) if asked is None else asked % _SEEDS
