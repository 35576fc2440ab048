"""The home folder: who holds it, where things lie in it, and what must stay the same from one run to the next.

    lock            held while `pennyweight up` runs; its text is the process id
    secrets.json    ports and passwords of the embedded servers, keys
    bootstrap.json  what the first tenant needs, for people and for the other commands
    postgres/  valkey/  models/  spool/  logs/  run/

Files are readable by their owner alone. A folder that root's run makes may be passed through by others, because
PostgreSQL then runs as another user, inside `postgres/`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from service.home.errors import DiskFullError, HomeError, HomeInUseError
from service.home.ports import free_port
from service.settings import BOOTSTRAP_NAME

T = TypeVar("T")
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Secrets(msgspec.Struct, kw_only=True):
    """What secrets.json holds. It is written before anything that depends on it."""

    postgres_port: int
    postgres_password: str
    valkey_port: int
    valkey_password: str
    encryption: str  # PENNYWEIGHT_SECRET
    api_key: str
    admin_key: str


class Bootstrap(msgspec.Struct, kw_only=True, frozen=True):
    """What bootstrap.json holds."""

    api_url: str
    api_key: str
    admin_key: str
    dashboard_url: str | None  # None: started without a dashboard
    database_url: str
    redis_url: str
    model: str


@dataclass
class Home:
    """Use as a context: entering makes and takes the folder, leaving gives it back. Raises HomeError."""

    folder: Path
    _lock: int | None = None

    def __enter__(self) -> Self:
        try:
            _make(self.folder)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._take(self._lock)
            for part in (self.run, self.logs, self.models, self.spool):
                part.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics"

    def secrets(self) -> Secrets:
        """What the last run kept, or new ones, kept from now on."""
        kept = self._read("secrets.json", Secrets)
        if kept is None:
            kept = new_secrets()
            self.keep_secrets(kept)
        return kept

    def keep_secrets(self, secrets: Secrets) -> None:
        self._write("secrets.json", msgspec.json.encode(secrets))

    def bootstrap(self) -> Bootstrap | None:
        """None before the first run came so far."""
        return self._read(BOOTSTRAP_NAME, Bootstrap)

    def keep_bootstrap(self, bootstrap: Bootstrap) -> None:
        self._write(BOOTSTRAP_NAME, json.dumps(msgspec.to_builtins(bootstrap), indent=2).encode() + b"\n")

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode().strip() or "unknown"
            raise HomeInUseError(
                f"Home {self.folder} is in use by process {holder}: stop it (`kill {holder}`), or give another --home."
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def _read(self, name: str, kind: type[T]) -> T | None:
        path = self.folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise HomeError(f"{path} is damaged ({error}): restore it, or use another home.") from error

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        path, half = self.folder / name, self.folder / f"{name}.half"
        try:
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            half.rename(path)
        except OSError as error:
            raise cannot_write(path, error) from error


def _make(folder: Path) -> None:
    """With the parents that are missing. What is there already keeps its rights: it may be anything."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        _make(folder.parent)
    folder.mkdir()
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)


def new_secrets() -> Secrets:
    return Secrets(
        postgres_port=free_port(),
        postgres_password=secrets.token_urlsafe(24),
        valkey_port=free_port(),
        valkey_password=secrets.token_urlsafe(24),
        encryption=secrets.token_urlsafe(32),
        api_key="",
        admin_key="",
    )


def cannot_write(path: Path, error: OSError) -> HomeError:
    if error.errno in NO_SPACE:
        return DiskFullError(f"The disk is full, {path} can't be written: make room and start again.")
    return HomeError(f"Can't write {path}: {error.strerror}. Give a --home where you may write.")
