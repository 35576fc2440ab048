"""Traces of the worker. No span holds a token id, a text of a user or a secret.

An attempt becomes one span, a child of its owner's (Job.traceparent), with its stages as children. All are made when it
has ended, from the stamps in its report, so that steps pay nothing for them. Only the attempt's span has the ``gen_ai``
attributes: whoever counts generations by them must not find one twice.

Imported only where an OTLP endpoint is set: the SDK takes a while to import.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engine.core import Ended
from engine.names import PROVIDER, Attribute, SpanName, operation_of
from engine.protocol import AttemptReport, Job, Outcome

_GOOD = {Outcome.COMPLETED, Outcome.CANCELLED, Outcome.SUPERSEDED}


class Tracing:
    """Turns ended attempts into spans."""

    def __init__(self, worker: str, processor: SpanProcessor | None = None) -> None:
        """``processor``: None exports over OTLP, as the OTEL_EXPORTER_OTLP_* variables say."""
        resource = Resource.create({"service.name": "pennyweight-engine", "service.instance.id": worker})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._provider.get_tracer("pennyweight.engine")

    def attempt(self, ended: Ended) -> None:
        job, report = ended.job, ended.report
        end_ns = int(report.finished_at * 1e9)
        decode_ns = end_ns - report.decode_ns
        prefill_ns = decode_ns - report.prefill_ns
        queue_ns = prefill_ns - report.queue_ns
        operation = operation_of(job.origin.endpoint)
        parent = TraceContextTextMapPropagator().extract({"traceparent": job.traceparent})
        span = self._tracer.start_span(
            f"{operation} {job.origin.model}",
            parent,
            SpanKind.CONSUMER,
            {**_asked(job), **_done(ended), Attribute.OPERATION: operation},
            start_time=queue_ns,
        )
        self._stage(span, SpanName.QUEUE, queue_ns, prefill_ns)
        if report.steps:
            self._stage(span, SpanName.PREFILL, prefill_ns, decode_ns)
            self._stage(span, SpanName.DECODE, decode_ns, end_ns)
        if report.outcome not in _GOOD:
            span.set_attribute(Attribute.ERROR_TYPE, report.error or report.outcome)
            span.set_status(Status(StatusCode.ERROR, report.error))
        span.end(end_ns)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _stage(self, parent: Span, name: SpanName, start_ns: int, end_ns: int) -> None:
        context = set_span_in_context(parent)
        self._tracer.start_span(name, context, SpanKind.INTERNAL, start_time=start_ns).end(end_ns)


def _asked(job: Job) -> dict[str, AttributeValue]:
    origin, sampling = job.origin, job.sampling
    return {
        Attribute.PROVIDER: PROVIDER,
        Attribute.REQUEST_MODEL: origin.model,
        Attribute.RESPONSE_MODEL: origin.model,
        Attribute.RESPONSE_ID: str(job.request_id),
        Attribute.REQUEST_MAX_TOKENS: sampling.max_tokens,
        Attribute.REQUEST_TEMPERATURE: sampling.temperature,
        Attribute.REQUEST_TOP_P: sampling.top_p,
        Attribute.REQUEST_TOP_K: sampling.top_k,
        Attribute.REQUEST_STREAM: origin.stream,
        Attribute.REQUEST_ID: str(job.request_id),
        Attribute.ATTEMPT: job.attempt,
        Attribute.TENANT: str(origin.tenant_id),
        Attribute.DEPLOYMENT: origin.deployment,
        Attribute.REVISION: origin.revision,
        Attribute.OWNER: origin.boot_id,
    }


def _done(ended: Ended) -> dict[str, AttributeValue]:
    report = ended.report
    return {
        **_measured(report),
        Attribute.OUTCOME: report.outcome,
        Attribute.RESPONSE_FINISH_REASONS: [ended.reason],
        Attribute.USAGE_INPUT_TOKENS: len(ended.job.prompt),
        Attribute.USAGE_CACHED_TOKENS: report.cached_tokens,
        Attribute.USAGE_OUTPUT_TOKENS: report.generated_tokens,
    }


def _measured(report: AttemptReport) -> dict[str, AttributeValue]:
    wasted_ns = sum(report.wasted_ns.values())
    return {
        Attribute.WORKER: report.worker,
        Attribute.DEVICE: report.device,
        Attribute.DEVICE_NS: report.used_ns + wasted_ns,
        Attribute.USED_NS: report.used_ns,
        Attribute.WASTED_NS: wasted_ns,
        Attribute.QUEUE_NS: report.queue_ns,
        Attribute.KV_BLOCK_NS: report.kv_block_ns,
        Attribute.STEPS: report.steps,
        Attribute.PREEMPTIONS: report.preemptions,
        Attribute.PEAK_BATCH: report.peak_batch,
    }
