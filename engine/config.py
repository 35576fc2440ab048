"""Knobs of the engine and the worker's environment, read once at the root of its process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.kernels.arithmetic import Arithmetic


class ConfigError(Exception):
    """The environment does not say enough, or says something impossible. The message names the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the deciding half may be told. Raises ConfigError when a decode step could not hold every sequence."""

    max_batch: int = 32  # sequences with KV at once
    # Rows of one step: bounds how long a prompt holds up those who are being answered. Measured on two CPU cores with
    # SmolLM2, 24 mixed requests, batch 16: 64, 128, 256, 512 rows gave 78, 97, 101, 87 output tokens/s with 229, 298,
    # 400, 371 ms between two tokens at the 95th percentile.
    step_tokens: int = 128
    prefix_cache: bool = True  # whether what one sequence computed is kept for others that begin alike
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


# By type of device. On a GPU a step of few rows costs what reading the weights costs, so it takes more of them.
_DEFAULTS = {"cpu": EngineConfig(), "cuda": EngineConfig(max_batch=256, step_tokens=2048)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    redis_url: str
    model: str  # GGUF file, folder of safetensors, or a hub id
    model_name: str  # public name
    deployment: str
    device: str  # auto, cpu, cuda or cuda:N
    weights: Arithmetic
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
    max_batch: int | None  # None: by device, as in EngineConfig
    step_tokens: int | None  # None: likewise
    prefix_cache: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Reads PENNYWEIGHT_*. Raises ConfigError."""
        model = _required(environment, "MODEL", "a GGUF file, a folder of safetensors or a hub id")
        model_name = environment.get("PENNYWEIGHT_MODEL_NAME") or Path(model).stem
        deployment = environment.get("PENNYWEIGHT_DEPLOYMENT") or model_name
        config = cls(
            redis_url=_required(environment, "REDIS_URL", "redis://host:port/0 or unix:///path"),
            model=model,
            model_name=model_name,
            deployment=deployment,
            device=environment.get("PENNYWEIGHT_DEVICE") or "auto",
            weights=_arithmetic(environment),
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
            max_batch=_whole(environment, "MAX_BATCH"),
            step_tokens=_whole(environment, "STEP_TOKENS"),
            prefix_cache=_switch(environment, "PREFIX_CACHE", default=True),
        )
        config.engine("cpu")  # an impossible pair is told before minutes of loading
        return config

    def engine(self, device_type: str) -> EngineConfig:
        """``device_type``: cpu or cuda. Raises ConfigError when what was said is impossible."""
        defaults = _DEFAULTS[device_type]
        return replace(
            defaults,
            max_batch=self.max_batch or min(defaults.max_batch, self.step_tokens or defaults.step_tokens),
            step_tokens=self.step_tokens or max(defaults.step_tokens, self.max_batch or 0),
            prefix_cache=self.prefix_cache,
        )


def _required(environment: Mapping[str, str], name: str, what: str) -> str:
    if value := environment.get(f"PENNYWEIGHT_{name}"):
        return value
    raise ConfigError(f"PENNYWEIGHT_{name} is not set: {what}.")


def _arithmetic(environment: Mapping[str, str]) -> Arithmetic:
    text = environment.get("PENNYWEIGHT_WEIGHTS") or Arithmetic.AUTO
    try:
        return Arithmetic(text)
    except ValueError:
        raise ConfigError(f"PENNYWEIGHT_WEIGHTS must be one of {', '.join(Arithmetic)}, not {text!r}.") from None


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(f"PENNYWEIGHT_{name}")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"PENNYWEIGHT_{name} must be a whole number above 0, not {text!r}.")
    return int(text)


def _switch(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(f"PENNYWEIGHT_{name}")
    if not text:
        return default
    if text not in {"0", "1"}:
        raise ConfigError(f"PENNYWEIGHT_{name} must be 1 or 0, not {text!r}.")
    return text == "1"


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
