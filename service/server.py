"""``pennyweight service``: N API processes on one port, and the parent that keeps them alive.

The parent listens and serves nothing. A process that dies is replaced at once (after a pause, if it died young); its
requests are settled by the spool that its successor adopts. SIGTERM or SIGINT drains: no new connection, running
requests finish within drain_s, the rest are failed with an error their clients see. When the parent dies, its children
see the end of their standard input and drain too.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import structlog

from service.home import metrics
from service.settings import Settings, SettingsError

log = structlog.get_logger()

SETTLE_S: Final = 12.0  # after drain_s: aborts, settlements, the recorder's last word
_BACKLOG: Final = 2048
_TICK_S: Final = 0.5
_YOUNG_S: Final = 5.0  # a process that died younger than this is not replaced at once
_LONGEST_PAUSE_S: Final = 5.0


def run(settings: Settings, *, host: str, port: int, processes: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError when the port cannot be had."""
    with _listen(host, port) as listening:
        folder = _metrics_folder(settings, port)
        children = [_Child(settings, listening, folder) for _ in range(processes)]
        _Supervisor(children, folder, stop_s=settings.drain_s + SETTLE_S).run()


@dataclass(slots=True)
class _Child:
    """The place of one API process, whichever holds it now."""

    settings: Settings
    listening: socket.socket
    metrics_folder: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # monotonic
    pause_s: float = 0.0
    next_start: float = 0.0  # monotonic

    def start(self) -> None:
        self.process = subprocess.Popen(  # noqa: S603  # our own words
            [sys.executable, "-P", "-m", "service.process", str(self.listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[self.listening.fileno()],
            env={**os.environ, metrics.VARIABLE: str(self.metrics_folder)},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.settings, enc_hook=str) + b"\n")
        self.process.stdin.flush()
        self.started = time.monotonic()

    def died(self) -> bool:
        """Whether it has just been found dead; then it is due again after its pause."""
        if self.process is None or self.process.poll() is None:
            return False
        log.warning("api process died", pid=self.process.pid, status=self.process.returncode)
        young = time.monotonic() - self.started < _YOUNG_S
        self.pause_s = min(_LONGEST_PAUSE_S, 2 * self.pause_s or 0.25) if young else 0.0
        self.next_start = time.monotonic() + self.pause_s
        self.end()
        return True

    def due(self) -> bool:
        return self.process is None and time.monotonic() >= self.next_start

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def wait(self, until: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("api process did not drain in time", pid=self.process.pid)
            self.process.kill()
            self.process.wait()
        self.end()

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None


class _Supervisor:
    """Keeps the children alive until a signal says to stop."""

    def __init__(self, children: list[_Child], folder: Path, *, stop_s: float) -> None:
        self._children = children
        self._folder = folder
        self._stop_s = stop_s
        self._stopping = False

    def run(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)  # noqa: FBT003  # the socket's own interface
        previous = signal.set_wakeup_fd(writer.fileno())
        handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            with reader, writer, selectors.DefaultSelector() as selector:
                selector.register(reader, selectors.EVENT_READ)
                while not self._stopping:
                    self._look()
                    if selector.select(_TICK_S):
                        reader.recv(4096)
        finally:
            self._end()
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _look(self) -> None:
        if any([child.died() for child in self._children]):  # noqa: C419  # every child is looked at
            metrics.bury(self._folder)
        for child in self._children:
            if child.due() and not self._stopping:
                child.start()

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._stopping = True

    def _end(self) -> None:
        for child in self._children:
            child.send(signal.SIGTERM)
        until = time.monotonic() + self._stop_s
        for child in self._children:
            child.wait(until)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --host and --port."
        ) from error


def _metrics_folder(settings: Settings, port: int) -> Path:
    """The one of the whole machine where there is one, else our own, emptied."""
    if shared := os.environ.get(metrics.VARIABLE):
        return Path(shared)
    folder = settings.home / f"metrics-{port}"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    metrics.empty(folder)
    return folder
