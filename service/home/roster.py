"""The processes of a running system: name, command, environment, and how to see that each is ready.

This is the one list of them for one machine; `compose.yaml` has the same commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import Final

from service.home import readiness
from service.home.children import Child, Guard
from service.home.folder import Home
from service.home.model import Model
from service.home.ports import LOOPBACK
from service.home.supervisor import Part, Stage

DRAIN_MARGIN_S: Final = 15.0  # what a process may need beyond its own drain before it is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `up` was asked for, with everything found out."""

    home: Home
    guard: Guard
    environment: Mapping[str, str]  # of every process; has the URLs of the servers and the secret
    redis_url: str
    api_port: int
    dashboard_port: int | None  # None: no dashboard
    processes: int  # of the API
    model: Model
    device: str
    weights: str
    drain_s: float

    @property
    def api_url(self) -> str:
        return f"http://{LOOPBACK}:{self.api_port}"

    @property
    def dashboard_url(self) -> str | None:
        return None if self.dashboard_port is None else f"http://{LOOPBACK}:{self.dashboard_port}"


def engine(plan: Plan) -> Part:
    environment = {
        "PENNYWEIGHT_MODEL": str(plan.model.place),
        "PENNYWEIGHT_MODEL_NAME": plan.model.name,
        "PENNYWEIGHT_DEVICE": plan.device,
        "PENNYWEIGHT_WEIGHTS": plan.weights,
        "PENNYWEIGHT_WORKER_NAME": readiness.worker_name(),
        "PENNYWEIGHT_SPOOL": str(plan.home.spool / "engine"),
    }
    return _part(plan, "engine", ["engine"], partial(readiness.worker_serves, plan.redis_url), environment=environment)


def others(plan: Plan) -> list[Part]:
    """Those that need the tables."""
    parts = [
        _part(plan, "recorder", ["recorder"], partial(readiness.recorder_reads, plan.redis_url), stage=Stage.RECORDS),
        _part(
            plan, "API", ["service", "--port", str(plan.api_port), "--processes", str(plan.processes)],
            partial(readiness.answers, f"{plan.api_url}/health/live"),
            environment={"PENNYWEIGHT_DASHBOARD_URL": plan.dashboard_url or ""},
        ),
        _part(plan, "tasks", ["tasks"], partial(readiness.somebody_beats, plan.redis_url)),
    ]  # fmt: skip
    if plan.dashboard_port is not None:
        words = ["dashboard", "--port", str(plan.dashboard_port)]
        ready = partial(readiness.answers, f"{plan.dashboard_url}/_stcore/health")
        parts.append(_part(plan, "dashboard", words, ready, environment={"PENNYWEIGHT_API_URL": plan.api_url}))
    return parts


def _part(
    plan: Plan,
    name: str,
    words: list[str],
    ready: Callable[[float], bool],
    *,
    stage: Stage = Stage.TRAFFIC,
    environment: Mapping[str, str] | None = None,
) -> Part:
    child = Child(
        name,
        [sys.executable, "-P", "-m", "service.cli", *words],
        guard=plan.guard,
        log=plan.home.logs / f"{name.lower()}.log",
        environment={**plan.environment, **(environment or {})},
        folder=plan.home.folder,
    )
    return Part(child=child, stage=stage, ready=ready, stop=[(Signals.SIGTERM, plan.drain_s + DRAIN_MARGIN_S)])
