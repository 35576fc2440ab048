import json
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from engine.metrics import Metrics
from engine.protocol import AbortReason
from engine.telemetry import Tracing
from tests.engine.world import World, job

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_of(world: World) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing("w1", SimpleSpanProcessor(exporter))
    for output in world.outputs:
        for ended in output.ended:
            tracing.attempt(ended)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_an_attempt_is_one_span_in_its_owners_trace_with_its_stages_inside() -> None:
    world = World()
    asked = job(20, 6, traceparent=f"00-{TRACE}-{PARENT}-01")
    world.engine.add(asked, inbox_ns=5_000)
    world.run()
    spans = spans_of(world)
    assert set(spans) == {"text_completion m", "queue", "prefill", "decode"}
    attempt, report = spans["text_completion m"], world.report(asked)
    assert f"{attempt.context.trace_id:032x}" == TRACE
    assert f"{attempt.parent.span_id:016x}" == PARENT
    for stage in ("queue", "prefill", "decode"):
        assert spans[stage].parent.span_id == attempt.context.span_id
    assert spans["queue"].start_time == attempt.start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == attempt.end_time
    assert attempt.end_time - attempt.start_time == report.queue_ns + report.prefill_ns + report.decode_ns
    attributes = attempt.attributes
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.provider.name"] == "pennyweight"
    assert attributes["gen_ai.usage.input_tokens"] == 20
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["pennyweight.device_ns"] == report.used_ns
    assert attempt.status.status_code is not StatusCode.ERROR


def test_only_the_attempts_span_can_be_taken_for_a_generation() -> None:
    world = World()
    world.engine.add(job(20, 6))
    world.run()
    for name, span in spans_of(world).items():
        has = any(key.startswith("gen_ai.") for key in span.attributes)
        assert has == (name == "text_completion m")


def test_an_attempt_that_failed_is_an_error_and_one_that_was_cancelled_is_not() -> None:
    world = World()
    refused = job([], 6)
    world.engine.add(refused)
    world.run()
    span = spans_of(world)["text_completion m"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "empty_prompt"

    world = World()
    left = job(5, 20)
    world.engine.add(left)
    world.step()
    world.engine.abort(left.request_id, 1, AbortReason.CLIENT_GONE)
    world.run()
    assert spans_of(world)["text_completion m"].status.status_code is not StatusCode.ERROR


def test_no_span_holds_a_token_of_a_user() -> None:
    world = World()
    secret = [91, 92, 93, 94, 95]
    world.engine.add(job(secret, 3, stop_token_ids=(96,)))
    world.run()
    values = [value for span in spans_of(world).values() for value in span.attributes.values()]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    assert not {*secret, 96} & set(flat)


MULTIPROCESS = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from engine.metrics import Metrics
from tests.engine.world import World, job
metrics = Metrics("m", sys.argv[1])
world = World()
world.engine.add(job(20, 5))
while world.engine.has_work:
    metrics.step(world.step(), world.engine)
metrics.interval(world.cut())
"""
COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_metrics_of_several_processes_add_up(tmp_path: Path) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": ""}
    for name in ("a", "b", "b"):
        subprocess.run([sys.executable, "-c", MULTIPROCESS, name], env=environment, check=True)
    done = subprocess.run([sys.executable, "-c", COLLECT], env=environment, check=True, capture_output=True, text=True)
    assert 'vllm:generation_tokens_total{engine="a",model_name="m"} 5.0' in done.stdout
    assert 'vllm:generation_tokens_total{engine="b",model_name="m"} 10.0' in done.stdout
    assert 'pennyweight_engine_steps_total{engine="b",model_name="m"} 14.0' in done.stdout


def test_how_well_step_times_are_foretold_is_shown_once_the_model_is_fitted() -> None:
    registry = CollectorRegistry()
    metrics, world = Metrics("m", "w", registry), World()

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"pennyweight_engine_{name}", {"model_name": "m", "engine": "w"})

    def run(count: int) -> None:
        for _ in range(count):
            world.engine.add(job(5, 20))
            while world.engine.has_work:
                metrics.step(world.step(), world.engine)

    run(1)
    assert value("step_model_pace") == 0
    run(4)
    assert value("step_model_pace") == pytest.approx(1, abs=0.01)
    assert value("step_model_r2") > 0.9
    assert value("step_model_error") < 0.1
    world.runner.duration_ns = lambda _: 1_000_000
    world.engine.add(job(5, 20))
    for _ in range(3):
        metrics.step(world.step(), world.engine)
    assert value("stalled_steps_total") == 2, "of steps with a prompt too few have been seen"
    assert value("stall_seconds_total") == pytest.approx(2e-3, rel=0.01)


def test_a_log_line_is_one_json_object_on_stderr() -> None:
    command = "import structlog, engine.logs as l; l.configure_logs(); structlog.get_logger().info('x', a=1)"
    done = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    line = json.loads(done.stderr)
    assert (line["event"], line["a"], line["level"]) == ("x", 1, "info")


def test_traces_leave_only_where_an_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.worker import tracing_where_wanted

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert tracing_where_wanted("w1") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing = tracing_where_wanted("w1")
    assert tracing is not None
    tracing.close()


def test_a_stop_string_is_a_stop_whoever_found_it() -> None:
    world = World()
    asked = job(5, 20)
    world.engine.add(asked)
    world.step()
    world.engine.abort(asked.request_id, 1, AbortReason.STOP_STRING, keep=1)
    world.run()
    assert spans_of(world)["text_completion m"].attributes["gen_ai.response.finish_reasons"] == ("stop",)
