"""One trace per request: the server's span, the admission and the stream below it, and the engine's by traceparent.

Spans are exported over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set, as OpenTelemetry's variables say; otherwise none
is made and an incoming trace is only passed on. No attribute holds a text of users or a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engine.names import PROVIDER, Attribute, operation_of
from engine.protocol import Settlement, Status
from service.generation import Generation

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Tracing:
    """The traces of one process, open ones by request id."""

    def __init__(self, instance: str, processor: SpanProcessor | None = None) -> None:
        """``processor`` takes the place of the OTLP exporter."""
        self._open: dict[UUID, Span] = {}
        self._provider: TracerProvider | None = None
        if processor is None and os.environ.get(ENDPOINT):
            processor = BatchSpanProcessor(OTLPSpanExporter())
        if processor is not None:
            resource = Resource.create({"service.name": "pennyweight-service", "service.instance.id": instance})
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(processor)

    def begin(self, request_id: UUID, endpoint: str, model: str, incoming: str) -> str:
        """Open the server's span; ``incoming`` is the client's traceparent or "". Returns that of its children."""
        if self._provider is None:
            return incoming if _TRACEPARENT.fullmatch(incoming) else ""
        operation = operation_of(endpoint)
        span = self._provider.get_tracer("pennyweight.service").start_span(
            f"{operation} {model}",
            _PROPAGATOR.extract({"traceparent": incoming}),
            SpanKind.SERVER,
            {
                Attribute.OPERATION: operation,
                Attribute.PROVIDER: PROVIDER,
                Attribute.REQUEST_MODEL: model,
                Attribute.REQUEST_ID: str(request_id),
            },
        )
        self._open[request_id] = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def refuse(self, request_id: UUID, cause: str) -> None:
        """End the span of a request that was not admitted."""
        if span := self._open.pop(request_id, None):
            span.set_attribute(Attribute.ERROR_TYPE, cause)
            span.set_status(StatusCode.ERROR, cause)
            span.end()

    def settle(self, generation: Generation, record: Settlement) -> None:
        """End the span of a settled request and write down its stages."""
        span = self._open.pop(record.request_id, None)
        if span is None or self._provider is None:
            return
        start_ns = int(record.origin.created_at * 1e9)
        end_ns = start_ns + record.total_ns
        admitted_ns = start_ns + (generation.admitted_ns or generation.order.started_ns) - generation.order.started_ns
        self._stage(span, "admission", start_ns, admitted_ns)
        self._stage(span, "stream", admitted_ns, end_ns)
        span.set_attributes(_attributes(generation, record))
        if record.status is Status.FAILED:
            span.set_attribute(Attribute.ERROR_TYPE, record.error_code)
            span.set_status(StatusCode.ERROR, record.error_code)
        span.end(end_ns)

    def close(self) -> None:
        """Export what is left; waits for the exporter."""
        if self._provider is not None:
            self._provider.shutdown()

    def _stage(self, parent: Span, name: str, start_ns: int, end_ns: int) -> None:
        assert self._provider is not None
        tracer = self._provider.get_tracer("pennyweight.service")
        tracer.start_span(name, set_span_in_context(parent), SpanKind.INTERNAL, start_time=start_ns).end(end_ns)


def trace_id_of(traceparent: str) -> str:
    """32 hex digits, or empty."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""


def _attributes(generation: Generation, record: Settlement) -> Mapping[str, AttributeValue]:
    origin, sampling = record.origin, generation.order.sampling
    attributes: dict[str, AttributeValue] = {
        Attribute.REQUEST_MAX_TOKENS: sampling.max_tokens,
        Attribute.REQUEST_TEMPERATURE: sampling.temperature,
        Attribute.REQUEST_TOP_P: sampling.top_p,
        Attribute.REQUEST_TOP_K: sampling.top_k,
        Attribute.REQUEST_STREAM: origin.stream,
        Attribute.RESPONSE_ID: str(record.request_id),
        Attribute.RESPONSE_MODEL: origin.model,
        Attribute.RESPONSE_FINISH_REASONS: [record.finish_reason],
        Attribute.USAGE_INPUT_TOKENS: record.prompt_tokens,
        Attribute.USAGE_CACHED_TOKENS: record.cached_tokens,
        Attribute.USAGE_OUTPUT_TOKENS: record.billed_tokens,
        Attribute.TENANT: str(origin.tenant_id),
        Attribute.API_KEY: str(origin.api_key_id),
        Attribute.DEPLOYMENT: origin.deployment,
        Attribute.REVISION: origin.revision,
        Attribute.OWNER: origin.boot_id,
        Attribute.WORKER: generation.worker,
    }
    if record.ttft_ns is not None:
        attributes[Attribute.RESPONSE_TIME_TO_FIRST_CHUNK] = record.ttft_ns / 1e9
    return attributes
