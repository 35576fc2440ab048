"""How many threads torch gets, and how they wait. To be set before torch is imported.

A step is some hundred short parallel regions, each ending in a barrier. Threads that spin at the barrier are fastest on
an idle machine; beside one busy process they wait for a scheduler quantum each time, and a step takes ten times as long
(docs/decisions/0004). So: one thread per physical core that this process may use, and a short spin before it sleeps.
Who has the machine to himself sets OMP_WAIT_POLICY=ACTIVE, which is then left alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_SPIN = "200"  # turns, some microseconds: of GNU OpenMP, which torch has on Linux; others know the policy only
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def prepare_threads(threads: int | None, environment: MutableMapping[str, str] = os.environ) -> int:
    """Set what OpenMP reads, where it is not set already. Returns the number of threads."""
    wanted = threads or int(environment.get("OMP_NUM_THREADS") or 0) or usable_cores()
    environment.setdefault("OMP_NUM_THREADS", str(wanted))
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment["GOMP_SPINCOUNT"] = _SPIN
    return wanted


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Physical cores among the CPUs this process may run on, at most what its control group allows."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpus, cpu) for cpu in mine}
    return max(1, min(len(cores), _allowed(quota)))


def _siblings(cpus: Path, cpu: int) -> str:
    """What the CPUs of one core have in common; a CPU of which nothing is known is a core of its own."""
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return f"cpu{cpu}"


def _allowed(quota: Path) -> int:
    try:
        limit, period = quota.read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):
        return 1 << 16  # no control group, or "max"
