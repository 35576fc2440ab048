"""What the worker counts for Prometheus. Names are in ``engine.names``; this file says what each one is.

    gauges      sequences running and waiting, share of KV blocks held
    steps       number, with two tenants or more, failed, seconds and rows of each
    tokens      computed of prompts, computed again, generated; looked up and found in the prefix cache
    attempts    by outcome; queue, prefill, decode, inference, end to end, time to first token, time per token
    device      seconds by category: in steps, idle, loading, overhead; of those in steps, wasted by cause
    meter       steps that stalled and the seconds they lost (part of overhead); how well the model of step times
                foretells: R² and mean error of the last hundred steps or so, and its pace, measured over expected,
                which drifts from 1 when the machine is not what it was

Seconds in steps count what later proves waste: a counter cannot go back. Durations come from one process's monotonic
clock and end when the worker knows, not when a client reads. Works in prometheus-client's multi-process mode.
"""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from engine.core import Ended, Engine, StepOutput
from engine.names import ENGINE_LABEL, MODEL_LABEL, Metric
from engine.protocol import Interval, Outcome
from engine.step_time import StepTime

_LABELS: Final = (MODEL_LABEL, ENGINE_LABEL)
# Bounds of vLLM, so that its dashboards' "share below x" tiles work.
_TTFT: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_TIME: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# From a small GPU decode step to a long prompt on a laptop.
_STEP: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Declares on ``registry`` and observes what the engine puts out. One per process."""

    def __init__(self, model: str, engine: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._values = (model, engine)
        self._last_token: dict[UUID, float] = {}
        self._preempted = 0
        self._looked_up = self._found = 0
        self._declare_state()
        self._declare_steps()
        self._declare_meter()
        self._declare_attempts()

    def step(self, output: StepOutput, engine: Engine) -> None:
        """After each step, also of one that ran nothing."""
        self._gauges(engine)
        if output.plan is not None:
            self._steps(output)
        if engine.meter.step_time:
            self._model(engine.meter.step_time)
        for ended in output.ended:
            self._attempt(ended)

    def interval(self, interval: Interval) -> None:
        seconds = {
            "busy": interval.busy_ns + interval.waste_ns,
            "idle": interval.idle_ns,
            "loading": interval.loading_ns,
            "overhead": interval.overhead_ns,
        }
        for category, ns in seconds.items():
            self._device_seconds.labels(*self._values, category).inc(ns / 1e9)
        self._mixed_steps.inc(interval.mixed_tenant_steps)

    def _declare_state(self) -> None:
        self._running = self._gauge(Metric.RUNNING, "Sequences with KV")
        self._waiting = self._gauge(Metric.WAITING, "Sequences that wait for blocks or a place in the batch")
        self._kv_usage = self._gauge(Metric.KV_USAGE, "Share of the KV blocks that are held, 1 is all")
        self._device_seconds = self._counter(Metric.DEVICE_SECONDS, "Device time by category", "category")
        self._wasted = self._counter(Metric.WASTED_SECONDS, "Device time in steps that served nobody", "cause")

    def _declare_steps(self) -> None:
        self._step_count = self._counter(Metric.STEPS, "Steps run").labels(*self._values)
        self._mixed_steps = self._counter(Metric.MIXED_TENANT_STEPS, "Steps with two tenants").labels(*self._values)
        self._failed_steps = self._counter(Metric.FAILED_STEPS, "Steps that raised").labels(*self._values)
        self._preemptions = self._counter(Metric.PREEMPTIONS, "Sequences that lost their KV").labels(*self._values)
        self._queries = self._counter(Metric.PREFIX_QUERIES, "Tokens sought in the prefix cache").labels(*self._values)
        self._hits = self._counter(Metric.PREFIX_HITS, "Tokens found in it").labels(*self._values)
        self._prompt = self._counter(Metric.PROMPT_TOKENS, "Prompt tokens computed").labels(*self._values)
        self._recomputed = self._counter(Metric.RECOMPUTED_TOKENS, "Tokens computed again").labels(*self._values)
        self._generated = self._counter(Metric.GENERATION_TOKENS, "Tokens generated").labels(*self._values)
        self._step_seconds = self._histogram(Metric.STEP_SECONDS, "Time of a step", _STEP)
        self._step_rows = self._histogram(Metric.STEP_TOKENS, "Rows of a step", _ROWS)
        self._itl = self._histogram(Metric.ITL, "Time between two tokens of a sequence", _TOKEN_TIME)

    def _declare_meter(self) -> None:
        self._stalled = self._counter(Metric.STALLED_STEPS, "Steps far over the model").labels(*self._values)
        self._stall_seconds = self._counter(Metric.STALL_SECONDS, "What they took beyond it").labels(*self._values)
        self._stalls_seen = (0, 0)
        self._r2 = self._gauge(Metric.STEP_MODEL_R2, "Share of step times' variance that the model explains")
        self._error = self._gauge(Metric.STEP_MODEL_ERROR, "Mean of |measured / expected - 1| of a step")
        self._pace = self._gauge(Metric.STEP_MODEL_PACE, "Measured / expected of a step, median of the last")

    def _declare_attempts(self) -> None:
        self._success = self._counter(Metric.SUCCESS, "Completed attempts by finish reason", "finished_reason")
        self._outcomes = self._counter(Metric.ATTEMPTS, "Attempts by outcome and error code", "outcome", "error")
        self._kv_seconds = self._counter(Metric.KV_BLOCK_SECONDS, "KV blocks held × seconds").labels(*self._values)
        self._ttft = self._histogram(Metric.TTFT, "Enqueued until first token", _TTFT)
        self._tpot = self._histogram(Metric.TPOT, "Mean time per token after the first", _TOKEN_TIME)
        self._e2e = self._histogram(Metric.E2E, "Enqueued until the end", _LATENCY)
        self._queue = self._histogram(Metric.QUEUE, "Enqueued until first scheduled", _LATENCY)
        self._prefill = self._histogram(Metric.PREFILL, "First scheduled until first token", _LATENCY)
        self._decode = self._histogram(Metric.DECODE, "First token until the end", _LATENCY)
        self._inference = self._histogram(Metric.INFERENCE, "First scheduled until the end", _LATENCY)
        self._prompt_length = self._histogram(Metric.REQUEST_PROMPT_TOKENS, "Prompt tokens of an attempt", _TOKENS)
        self._length = self._histogram(Metric.REQUEST_GENERATION_TOKENS, "Tokens an attempt generated", _TOKENS)
        self._max_tokens = self._histogram(Metric.REQUEST_MAX_TOKENS, "max_tokens of an attempt", _TOKENS)

    def _gauge(self, name: Metric, text: str) -> Gauge:
        gauge = Gauge(name, text, _LABELS, registry=self._registry, multiprocess_mode="livemostrecent")
        return gauge.labels(*self._values)

    def _counter(self, name: Metric, text: str, *more: str) -> Counter:
        return Counter(name, text, (*_LABELS, *more), registry=self._registry)

    def _histogram(self, name: Metric, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self._registry, buckets=bounds).labels(*self._values)

    def _gauges(self, engine: Engine) -> None:
        self._running.set(len(engine.scheduler.running))
        self._waiting.set(len(engine.scheduler.waiting))
        self._kv_usage.set(engine.scheduler.kv.usage)
        scheduler = engine.scheduler
        self._preemptions.inc(scheduler.preemptions - self._preempted)
        self._queries.inc(scheduler.looked_up_tokens - self._looked_up)
        self._hits.inc(scheduler.found_tokens - self._found)
        self._preempted = scheduler.preemptions
        self._looked_up, self._found = scheduler.looked_up_tokens, scheduler.found_tokens

    def _steps(self, output: StepOutput) -> None:
        assert output.plan is not None
        self._step_seconds.observe(output.held_ns / 1e9)
        self._step_rows.observe(sum(len(chunk.tokens) for chunk in output.plan.chunks))
        if output.result is None:
            self._failed_steps.inc()
            return
        self._step_count.inc()
        self._prompt.inc(output.result.rows.prompt)
        self._recomputed.inc(output.result.rows.recomputed)
        self._generated.inc(output.result.rows.generated)
        now = time.monotonic()
        for chunk in output.plan.chunks:
            if chunk.draws:
                if before := self._last_token.get(chunk.request_id):
                    self._itl.observe(now - before)
                self._last_token[chunk.request_id] = now

    def _model(self, model: StepTime) -> None:
        stalls, stall_ns = self._stalls_seen
        self._stalled.inc(model.stalls - stalls)
        self._stall_seconds.inc((model.stall_ns - stall_ns) / 1e9)
        self._stalls_seen = (model.stalls, model.stall_ns)
        if model.fitted:
            self._r2.set(model.quality.r2)
            self._error.set(model.quality.error)
            self._pace.set(model.pace)

    def _attempt(self, ended: Ended) -> None:
        report = ended.report
        self._last_token.pop(report.request_id, None)
        self._outcomes.labels(*self._values, report.outcome, report.error).inc()
        self._kv_seconds.inc(report.kv_block_ns / 1e9)
        for cause, ns in report.wasted_ns.items():
            self._wasted.labels(*self._values, cause).inc(ns / 1e9)
        if report.outcome is Outcome.COMPLETED:
            self._success.labels(*self._values, ended.reason).inc()
            self._durations(ended)

    def _durations(self, ended: Ended) -> None:
        report = ended.report
        inference_ns = report.prefill_ns + report.decode_ns
        self._queue.observe(report.queue_ns / 1e9)
        self._prefill.observe(report.prefill_ns / 1e9)
        self._decode.observe(report.decode_ns / 1e9)
        self._inference.observe(inference_ns / 1e9)
        self._ttft.observe((report.queue_ns + report.prefill_ns) / 1e9)
        self._e2e.observe((report.queue_ns + inference_ns) / 1e9)
        if report.generated_tokens > 1:
            self._tpot.observe(report.decode_ns / (report.generated_tokens - 1) / 1e9)
        self._prompt_length.observe(len(ended.job.prompt))
        self._length.observe(report.generated_tokens)
        self._max_tokens.observe(ended.job.sampling.max_tokens)
