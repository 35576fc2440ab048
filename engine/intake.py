"""What may enter: a job that could never run is refused with a code, a repeated or overtaken one is dropped."""

from __future__ import annotations

import math
from collections import OrderedDict
from uuid import UUID

from engine.plan import ModelLimits
from engine.protocol import ErrorCode, Job, Kind, Sampling


class Fence:
    """The highest attempt seen of each request. Bounded: the longest untouched request is forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._highest: OrderedDict[UUID, int] = OrderedDict()
        self._capacity = capacity

    def passes(self, request_id: UUID, attempt: int) -> bool:
        """Whether this attempt is higher than any seen, which it then is itself. A repetition does not pass."""
        if attempt <= self._highest.get(request_id, 0):
            return False
        self.raise_to(request_id, attempt)
        return True

    def raise_to(self, request_id: UUID, attempt: int) -> None:
        """Attempts up to this one shall not pass any more."""
        self._highest[request_id] = max(attempt, self._highest.get(request_id, 0))
        self._highest.move_to_end(request_id)
        if len(self._highest) > self._capacity:
            self._highest.popitem(last=False)


def refusal(job: Job, limits: ModelLimits) -> ErrorCode | None:
    """Why this job can never run here, else None. What passes cannot make a step raise or wait for ever."""
    longest = len(job.prompt) + job.sampling.max_tokens
    sampling = job.sampling
    known = [*job.prompt, *(token for ids in job.generated for token in ids), *sampling.stop_token_ids]
    known += [token for token, _ in sampling.logit_bias]
    checks = (
        (job.origin.kind is not Kind.GENERATE, ErrorCode.UNSUPPORTED_KIND),
        (len(job.generated) > 1, ErrorCode.UNSUPPORTED_CHOICES),
        (bool(job.adapter), ErrorCode.UNSUPPORTED_ADAPTER),
        (bool(job.grammar), ErrorCode.UNSUPPORTED_GRAMMAR),
        (not job.prompt, ErrorCode.EMPTY_PROMPT),
        (not all(0 <= token < limits.vocab_size for token in known), ErrorCode.OUT_OF_VOCABULARY),
        (not _sane(job.sampling), ErrorCode.INVALID_SAMPLING),
        (longest > limits.context_length, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (longest > limits.block_size * limits.num_blocks, ErrorCode.KV_CAPACITY_EXCEEDED),
    )
    return next((code for fails, code in checks if fails), None)


def _sane(sampling: Sampling) -> bool:
    """A NaN compares false with everything and so fails here too."""
    return (
        0 <= sampling.min_tokens <= sampling.max_tokens
        and 0 <= sampling.temperature < math.inf
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
        and 0.01 <= sampling.repetition_penalty <= 100
        and all(abs(penalty) <= 2 for penalty in (sampling.presence_penalty, sampling.frequency_penalty))
        and all(abs(bias) <= 100 for _, bias in sampling.logit_bias)
        and len({token for token, _ in sampling.logit_bias}) == len(sampling.logit_bias)
        and (sampling.logprobs or 0) >= 0
    )
