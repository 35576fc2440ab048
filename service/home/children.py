"""Processes of ours: each in a process group of its own, with a log file, and none that outlives its supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TypedDict

from service.home import guard as guard_script

Say = Callable[[str], None]

_PR_SET_PDEATHSIG = 1
_PROGRESS_EVERY_S = 3.0
_LOG_BYTES = 8 << 20  # a log file is cut at about this size, and its last part kept beside it as NAME.1


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine that a child runs as."""

    name: str
    uid: int
    gid: int


class Credentials(TypedDict, total=False):
    """Arguments of subprocess.Popen."""

    user: int
    group: int
    extra_groups: list[int | str]


def credentials(account: Account | None) -> Credentials:
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


class Guard:
    """Our end of the pipe to `guard.py`."""

    def __init__(self, lock: Path, say: Say) -> None:
        """Start the guard; first wait until the guard of an earlier run has ended everything that run left."""
        lock.parent.mkdir(parents=True, exist_ok=True)
        if not _lock_is_free(lock):
            say("waiting for the processes of an earlier run to end")
        argv = [sys.executable, "-I", "-S", guard_script.__file__, str(lock)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def watch(self, group: int, orphaned: Signals) -> None:
        self._tell(f"+ {group} {int(orphaned)}\n")

    def forget(self, group: int) -> None:
        self._tell(f"- {group}\n")

    def close(self) -> None:
        """End whatever is still on its list, then the guard itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # A guard that somebody killed tells nobody: the children still have the kernel's signal.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


class Child:
    """One process and its log file. It can be started again after it ended."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        guard: Guard,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        account: Account | None = None,
        orphaned: Signals = Signals.SIGKILL,
    ) -> None:
        """``orphaned`` is the signal it gets when the supervisor dies."""
        self.name = name
        self.log = log
        self.argv = [str(word) for word in argv]
        self._guard = guard
        self._environment = environment
        self._folder = folder
        self._account = account
        self._orphaned = orphaned
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Negative when a signal ended it; None while it runs and before the first start."""
        return self._process.returncode if self._process else None

    def alive(self) -> bool:
        if self._process is None:
            return False
        ran = self._process.returncode is None
        if self._process.poll() is None:
            return True
        if ran:
            self._end_group()
        return False

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.argv,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o077,
                preexec_fn=_die_with_parent(self._orphaned),  # noqa: PLW1509 — the supervisor has one thread
                **credentials(self._account),
            )
        self._guard.watch(self._process.pid, self._orphaned)

    def send(self, number: Signals) -> None:
        """To the process, not to its group: it knows best how to end its own children."""
        if self._process is not None and self.alive():
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended within the timeout."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            self._end_group()
        return True

    def stop(self, *steps: tuple[Signals, float]) -> None:
        """Send each signal in turn and give it its seconds; in the end SIGKILL to the whole group."""
        for number, patience_s in steps:
            self.send(number)
            if self.wait(patience_s):
                return
        self._end_group()
        self.wait(timeout_s=60)

    def output(self) -> str:
        """What it wrote since its last start, the last 64 KiB of it."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - (1 << 16)))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def bound_log(self) -> None:
        """Move a log that grew too long aside. What is written during the copy may be lost."""
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > _LOG_BYTES:
                self.log.with_name(f"{self.log.name}.1").write_bytes(self.log.read_bytes())
                os.truncate(self.log, 0)  # it is open for appending, so the next line starts at 0
                self._log_start = 0

    def _end_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, Signals.SIGKILL)
        self._guard.forget(self._process.pid)


def wait_ready(child: Child, ready: Callable[[], bool], say: Say) -> bool:
    """True once ``ready`` says so, False when the process ended instead.

    There is no timeout: a server that replays hours of log is alive and progressing. Its last line of output is told
    every few seconds.
    """
    pause_s, told = 0.01, time.monotonic()
    while child.alive():
        if ready():
            return True
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.3)
        if time.monotonic() - told > _PROGRESS_EVERY_S:
            told = time.monotonic()
            say(f"{child.name} is starting: {last_line(child.output())}")
    return False


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output yet")


def _lock_is_free(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _die_with_parent(number: Signals) -> Callable[[], None] | None:
    """For Linux: what a new child runs before it becomes its program. Elsewhere the guard alone does it."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), Signals.SIGKILL)

    return ask_kernel
