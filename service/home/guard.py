"""The process that outlives a killed supervisor, and ends what it left.

Started as ``python guard.py LOCK`` with a pipe from the supervisor as standard input. Lines on the pipe:

    + GROUP SIGNAL    this process group is alive; send it SIGNAL if the supervisor dies
    - GROUP           it has ended

The pipe closes when the supervisor ends, however it ends. Every group that is still on the list then gets its signal,
and SIGKILL when that did not help. LOCK is held until all of that is done, so the next run can wait for it.

On Linux the children of the supervisor also ask the kernel for a signal when it dies (`children.py`); their own
children can't ask, and macOS has no such signal. This script stands alone (no import of ours) so that it starts quickly
and needs next to no memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Set as AbstractSet

GRACE_S = 5.0


def main(lock: str) -> None:
    with open(lock, "a", encoding="ascii") as held:  # noqa: PTH123 — pathlib would double the start-up time
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(1, b"ready\n")
        groups: dict[int, int] = {}
        for line in sys.stdin:
            sign, group, *rest = line.split()
            if sign == "+":
                groups[int(group)] = int(rest[0])
            else:
                groups.pop(int(group), None)
        end(groups)


def end(groups: dict[int, int]) -> None:
    for group, number in groups.items():
        _signal(group, number)
    deadline = time.monotonic() + GRACE_S
    while living(groups.keys()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for group in groups:
        _signal(group, signal.SIGKILL)
    while living(groups.keys()):
        time.sleep(0.02)


def living(groups: AbstractSet[int]) -> bool:
    """Whether a process of these groups runs. A zombie does not: nobody may ever reap it, as in some containers."""
    if sys.platform != "linux":
        return any(_signal(group, 0) for group in groups)
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 — see main
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 — see main
            state, _, group = stat.read().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state != b"Z":
                return True
    return False


def _signal(group: int, number: int) -> bool:
    """False when the group is gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of zombies
        return False
    return True


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    main(sys.argv[1])
