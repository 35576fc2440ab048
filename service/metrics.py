"""What the service counts for Prometheus, over all processes of the machine when PROMETHEUS_MULTIPROC_DIR is set.

    http       requests by endpoint and status; refusals by cause
    running    requests admitted and not settled
    requests   by model and final status; tokens by kind; time to first token, per token, end to end, in the queue

Names and buckets of the ``gen_ai_server_*`` histograms are OpenTelemetry's (semantic conventions for generative AI).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from engine.names import PROVIDER, operation_of
from engine.protocol import Settlement, Status

VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


class Metric(StrEnum):
    HTTP = "pennyweight_http_requests"  # endpoint, status
    REFUSALS = "pennyweight_refusals"  # cause
    RUNNING = "pennyweight_requests_running"
    REQUESTS = "pennyweight_requests"  # model, endpoint, status
    TOKENS = "pennyweight_tokens"  # model, kind
    QUEUE = "pennyweight_request_queue_seconds"
    DURATION = "gen_ai_server_request_duration_seconds"
    TTFT = "gen_ai_server_time_to_first_token_seconds"
    TPOT = "gen_ai_server_time_per_output_token_seconds"


_GEN_AI: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATION: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TPOT: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

HTTP: Final = Counter(Metric.HTTP, "Answers by endpoint and HTTP status", ("endpoint", "status"))
REFUSALS: Final = Counter(Metric.REFUSALS, "Requests that were not admitted, by cause", ("cause",))
RUNNING: Final = Gauge(Metric.RUNNING, "Admitted and not yet settled", multiprocess_mode="livesum")
REQUESTS: Final = Counter(Metric.REQUESTS, "Settled requests by final status", ("model", "endpoint", "status"))
TOKENS: Final = Counter(Metric.TOKENS, "Tokens of settled requests by kind", ("model", "kind"))
QUEUE: Final = Histogram(Metric.QUEUE, "Enqueued until first scheduled", ("model",), buckets=_TTFT)
DURATION: Final = Histogram(
    Metric.DURATION, "Request read until its last byte was sent", (*_GEN_AI, "error_type"), buckets=_DURATION
)
# Of streamed requests: one that is not streamed sends its first token with its last.
TTFT: Final = Histogram(Metric.TTFT, "Streamed request read until its first token was sent", _GEN_AI, buckets=_TTFT)
TPOT: Final = Histogram(Metric.TPOT, "Time per token after the first, streamed", _GEN_AI, buckets=_TPOT)


def observe(record: Settlement) -> None:
    origin, seconds = record.origin, 1e-9
    gen_ai = (operation_of(origin.endpoint), PROVIDER, origin.model)
    REQUESTS.labels(origin.model, origin.endpoint, record.status).inc()
    TOKENS.labels(origin.model, "prompt").inc(record.prompt_tokens)
    TOKENS.labels(origin.model, "cached").inc(record.cached_tokens)
    TOKENS.labels(origin.model, "generated").inc(record.generated_tokens)
    TOKENS.labels(origin.model, "delivered").inc(record.delivered_tokens)
    TOKENS.labels(origin.model, "billed").inc(record.billed_tokens)
    if record.queue_ns is not None:
        QUEUE.labels(origin.model).observe(record.queue_ns * seconds)
    DURATION.labels(*gen_ai, _error_type(record)).observe(record.total_ns * seconds)
    if not origin.stream:
        return
    if record.status is Status.COMPLETED and record.ttft_ns is not None:
        TTFT.labels(*gen_ai).observe(record.ttft_ns * seconds)
    if record.tpot_ns is not None:
        TPOT.labels(*gen_ai).observe(record.tpot_ns * seconds)


def page() -> bytes:
    """The text that Prometheus scrapes: of this process, or of all that share the folder."""
    if VARIABLE not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def bury(pids: Iterable[int]) -> None:
    """Processes that have died hold nothing any more; what they counted stays."""
    if VARIABLE in os.environ and Path(os.environ[VARIABLE]).is_dir():
        for pid in pids:
            mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _error_type(record: Settlement) -> str:
    return record.error_code or ("" if record.status is Status.COMPLETED else record.status)
