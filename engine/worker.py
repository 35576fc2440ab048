"""The worker process: ``python -m engine.worker``.

    environment ──► name and lease ──► model and KV memory ──► card READY ──► loop until SIGTERM ──► last interval

Exit codes are in ``engine.loop.Exit``. SIGTERM and SIGINT drain; a second one stops at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

import redis
import structlog
from prometheus_client import start_http_server
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine.config import ConfigError, WorkerConfig
from engine.core import Engine
from engine.logs import configure_logs
from engine.loop import PAUSE_S, Exit, Loop, Stop
from engine.meter import Identity, Meter
from engine.metrics import Metrics
from engine.protocol import WorkerCard, WorkerState
from engine.registration import Registration
from engine.spool import RecordProducer
from engine.threads import prepare_threads
from engine.timeline import Span, Timeline

if TYPE_CHECKING:
    from engine.loading import Loaded  # imports torch
    from engine.telemetry import Tracing

log = structlog.get_logger()

_SOCKET_TIMEOUT_S = 5.0  # longer than an idle worker blocks
_RECORDS_CLOSE_S = 0.5  # to send the last records; what is not committed by then stays in the spool


class Worker:
    """Builds the parts in order and closes them in reverse."""

    def __init__(self, config: WorkerConfig, timeline: Timeline) -> None:
        self._config = config
        self._timeline = timeline
        self._boot = uuid4().hex
        self._redis = _connect(config.redis_url)
        self._registration = Registration(_loading_card(config, self._boot), lease_s=config.lease_s)
        self._producer = RecordProducer(_connect(config.redis_url), config.spool, self._boot)
        self._stop = Stop(config.drain_s)

    def run(self) -> Exit:
        """Raises ConfigError."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop.ask)
        try:
            if not self._until_redis_is_there(lambda: self._registration.take_name(self._redis)):
                return Exit.DRAINED
            loaded = self._load()
            return self._serve(loaded)
        finally:
            self._leave()

    def _load(self) -> Loaded:
        threads = prepare_threads(self._config.threads)
        from engine import loading  # noqa: PLC0415 — imports torch, which reads what was just prepared

        loaded = loading.load(self._config, threads)
        card = loading.describe(self._registration.card, loaded, self._config)
        tokenizer = loaded.model.tokenizer_json.encode()
        self._until_redis_is_there(lambda: self._registration.publish(self._redis, card, tokenizer))
        self._registration.become(WorkerState.READY)
        return loaded

    def _serve(self, loaded: Loaded) -> Exit:
        config, name = self._config, self._registration.card.name
        _serve_metrics(config.metrics_port)
        if adopted := self._producer.start(revive=lambda payload: payload):
            log.info("sends what an earlier boot could not", records=adopted)
        tracing = tracing_where_wanted(self._boot)
        identity = Identity(
            worker=self._boot, device=loaded.device, device_kind=loaded.device_kind, deployment=config.deployment
        )
        meter = Meter(identity, self._timeline, fixed_rows=loaded.engine.fixed_rows)
        self._timeline.enter(Span.OVERHEAD)
        log.info("ready", model=config.model_name, device=loaded.device, kv_tokens=self._registration.card.kv_tokens)
        try:
            return Loop(
                connection=self._redis,
                engine=Engine(loaded.runner, meter, loaded.engine),
                registration=self._registration,
                records=self._producer,
                metrics=Metrics(config.model_name, name),
                stop=self._stop,
                config=loaded.engine,
                tracing=tracing,
            ).run()
        finally:
            if tracing:
                tracing.close()

    def _until_redis_is_there(self, attempt: Callable[[], None]) -> bool:
        """Try until it works. False: asked to stop."""
        told = False
        while not self._stop.asked:
            try:
                attempt()
            except redis.RedisError as error:
                if not told:
                    log.warning("waiting for redis", error=type(error).__name__)
                told = True
                time.sleep(PAUSE_S)
            else:
                return True
        return False

    def _leave(self) -> None:
        try:
            self._registration.leave(self._redis)
        except redis.RedisError as error:
            log.warning("left without a word: the lease will lapse", error=type(error).__name__)
        self._producer.close(_RECORDS_CLOSE_S)


def _connect(url: str) -> redis.Redis:
    """The loop tries again by itself, so that it can do something else in between. Raises ConfigError."""
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:  # its text may hold the password
        raise ConfigError("PENNYWEIGHT_REDIS_URL is not a URL like redis://host:port/0 or unix:///path.") from error


def _loading_card(config: WorkerConfig, boot: str) -> WorkerCard:
    """What can be said before the model is there."""
    return WorkerCard(
        worker=boot,
        name=config.name,
        state=WorkerState.LOADING,
        device="",
        device_kind="",
        deployment=config.deployment,
        model=config.model_name,
        revision="",
        context_length=0,
        default_max_tokens=0,
        max_batch=0,
        kv_tokens=0,
        max_outstanding_tokens=0,
        eos_token_ids=(),
        vocab_size=0,
        started_at=time.time(),
    )


def _serve_metrics(port: int | None) -> None:
    if port is None:
        return
    try:
        start_http_server(port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"PENNYWEIGHT_METRICS_PORT: nothing can listen on {port}: {error}") from error


def tracing_where_wanted(boot: str) -> Tracing | None:
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return None
    from engine.telemetry import Tracing  # noqa: PLC0415 — the SDK takes a while to import

    return Tracing(boot)


def main() -> Exit:
    timeline = Timeline(Span.LOADING)
    configure_logs()
    try:
        config = WorkerConfig.from_environment()
        structlog.contextvars.bind_contextvars(worker=config.name)
        return Worker(config, timeline).run()
    except (ConfigError, OSError) as error:
        log.error("cannot start", reason=str(error))  # noqa: TRY400 — one clear line; a traceback says nothing more
        return Exit.UNUSABLE
    except Exception as error:
        log.exception("worker failed", error=type(error).__name__)
        return Exit.BROKEN


if __name__ == "__main__":
    sys.exit(main())
