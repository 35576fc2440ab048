"""Knobs of the engine and the worker's environment, read once at the root of its process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class ConfigError(Exception):
    """The environment does not say enough, or says something impossible. The message names the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the deciding half may be told. Raises ConfigError when a decode step could not hold every sequence."""

    max_batch: int = 32  # sequences with KV at once
    step_tokens: int = 256  # rows of one step: bounds how long a prompt holds up the running ones
    fixed_rows: int = 16  # the meter's fixed part of a step, in rows (see meter.shares)
    interval_s: float = 10.0
    remembered_requests: int = 65_536  # whose highest attempt is known, so that a late lower one is dropped
    max_failures: int = 3  # steps in a row that may raise before the worker gives up and is restarted

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= self.step_tokens:
            raise ConfigError(
                f"PENNYWEIGHT_STEP_TOKENS ({self.step_tokens}) must be at least PENNYWEIGHT_MAX_BATCH "
                f"({self.max_batch}): each running sequence needs a row in every step."
            )


_DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    redis_url: str
    model: str  # GGUF file, folder of safetensors, or a hub id
    model_name: str  # public name
    deployment: str
    device: str  # auto, cpu, cuda or cuda:N
    name: str  # stable over restarts, held by one process at a time
    spool: Path
    kv_tokens: int | None  # size of the KV pool; None: by memory
    kv_memory_mb: int | None  # None: a part of the memory there is (see engine.loading)
    threads: int | None  # of torch; None: one per physical core this process may use
    max_outstanding_tokens: int | None  # None: four times the KV pool
    default_max_tokens: int
    lease_s: float
    drain_s: float
    metrics_port: int | None
    engine: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Reads PENNYWEIGHT_*. Raises ConfigError."""
        model = _required(environment, "MODEL", "a GGUF file, a folder of safetensors or a hub id")
        model_name = environment.get("PENNYWEIGHT_MODEL_NAME") or Path(model).stem
        deployment = environment.get("PENNYWEIGHT_DEPLOYMENT") or model_name
        return cls(
            redis_url=_required(environment, "REDIS_URL", "redis://host:port/0 or unix:///path"),
            model=model,
            model_name=model_name,
            deployment=deployment,
            device=environment.get("PENNYWEIGHT_DEVICE") or "auto",
            name=environment.get("PENNYWEIGHT_WORKER_NAME") or f"{socket.gethostname()}/{deployment}",
            spool=Path(environment.get("PENNYWEIGHT_SPOOL") or ".pennyweight/spool/engine"),
            kv_tokens=_whole(environment, "KV_TOKENS"),
            kv_memory_mb=_whole(environment, "KV_MEMORY_MB"),
            threads=_whole(environment, "THREADS"),
            max_outstanding_tokens=_whole(environment, "MAX_OUTSTANDING_TOKENS"),
            default_max_tokens=_whole(environment, "DEFAULT_MAX_TOKENS") or 512,
            lease_s=_seconds(environment, "LEASE_S", 10.0),
            drain_s=_seconds(environment, "DRAIN_S", 30.0),
            metrics_port=_whole(environment, "METRICS_PORT"),
            engine=EngineConfig(
                max_batch=_whole(environment, "MAX_BATCH") or _DEFAULTS.max_batch,
                step_tokens=_whole(environment, "STEP_TOKENS") or _DEFAULTS.step_tokens,
            ),
        )


def _required(environment: Mapping[str, str], name: str, what: str) -> str:
    if value := environment.get(f"PENNYWEIGHT_{name}"):
        return value
    raise ConfigError(f"PENNYWEIGHT_{name} is not set: {what}.")


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(f"PENNYWEIGHT_{name}")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"PENNYWEIGHT_{name} must be a whole number above 0, not {text!r}.")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(f"PENNYWEIGHT_{name}")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"PENNYWEIGHT_{name} must be a positive number of seconds, not {text!r}.")
    return value
