"""Where the system keeps its state: our own PostgreSQL and Valkey in the home, or servers that the user has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Final
from urllib.parse import urlsplit

import psycopg
import redis

from service.home.children import Guard, Say
from service.home.errors import HomeError
from service.home.folder import Home, Secrets
from service.home.postgres import Postgres
from service.home.supervisor import Part, Stage
from service.home.valkey import Valkey

# What the embedded servers get to end in order; a checkpoint of a small machine takes seconds.
_POSTGRES_STOP: Final = [(Signals.SIGINT, 60.0), (Signals.SIGQUIT, 10.0)]
_VALKEY_STOP: Final = [(Signals.SIGTERM, 30.0)]
_CONNECT_S: Final = 10


@dataclass
class Stores:
    """``start`` may be interrupted at any point; ``stop`` ends whatever it came to start."""

    home: Home
    guard: Guard
    secrets: Secrets
    environment: Mapping[str, str]
    postgres: Postgres | None = None
    valkey: Valkey | None = None

    @property
    def database_url(self) -> str:
        return self.postgres.url() if self.postgres else self.environment["PENNYWEIGHT_DATABASE_URL"]

    @property
    def redis_url(self) -> str:
        return self.valkey.url() if self.valkey else self.environment["PENNYWEIGHT_REDIS_URL"]

    def start(self, say: Say) -> None:
        """Raises HomeError."""
        if url := self.environment.get("PENNYWEIGHT_REDIS_URL"):
            _check_redis(url)
        else:
            self._start_valkey(say)
        if url := self.environment.get("PENNYWEIGHT_DATABASE_URL"):
            _check_database(url)
        else:
            self._start_postgres(say)

    def parts(self) -> list[Part]:
        """For the supervisor, to keep running and to end last."""
        parts = []
        if self.postgres:
            parts.append(
                Part(
                    child=self.postgres.child, stage=Stage.STORE, ready=self.postgres.is_ready, stop=_POSTGRES_STOP,
                    before_restart=self.postgres.before_restart,
                )
            )  # fmt: skip
        if self.valkey:
            parts.append(
                Part(child=self.valkey.child, stage=Stage.STORE, ready=self.valkey.is_ready, stop=_VALKEY_STOP)
            )
        return parts

    def stop(self) -> None:
        if self.postgres:
            self.postgres.stop()
        if self.valkey:
            self.valkey.stop()

    def _start_postgres(self, say: Say) -> None:
        folder, log = self.home.folder / "postgres", self.home.logs / "postgres.log"
        started = time.monotonic()
        self.postgres = Postgres(
            folder, self.secrets.postgres_password, self.secrets.postgres_port, log=log, guard=self.guard
        )
        self.postgres.start(say)
        self._remember_ports()
        say(f"{'PostgreSQL':<12} ready after {time.monotonic() - started:.1f} s")

    def _start_valkey(self, say: Say) -> None:
        folder, log = self.home.folder / "valkey", self.home.logs / "valkey.log"
        started = time.monotonic()
        self.valkey = Valkey(folder, self.secrets.valkey_password, self.secrets.valkey_port, log=log, guard=self.guard)
        self.valkey.start(say)
        self._remember_ports()
        say(f"{'Valkey':<12} ready after {time.monotonic() - started:.1f} s")

    def _remember_ports(self) -> None:
        if self.postgres:
            self.secrets.postgres_port = self.postgres.port
        if self.valkey:
            self.secrets.valkey_port = self.valkey.port
        self.home.keep_secrets(self.secrets)


def _check_database(url: str) -> None:
    try:
        psycopg.connect(url, connect_timeout=_CONNECT_S).close()
    except (psycopg.Error, ValueError) as error:
        raise HomeError(
            f"No PostgreSQL for us at PENNYWEIGHT_DATABASE_URL ({_place(url)}, {type(error).__name__}): "
            "check the address, the database's name and the password."
        ) from None  # the error's text may quote the URL


def _check_redis(url: str) -> None:
    try:
        with redis.Redis.from_url(url, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S) as connection:
            connection.ping()
            policy = connection.info("memory").get("maxmemory_policy")
    except (redis.RedisError, ValueError) as error:
        raise HomeError(
            f"No Redis for us at PENNYWEIGHT_REDIS_URL ({_place(url)}, {type(error).__name__}): "
            "check the address and the password."
        ) from None  # the error's text may quote the URL
    if policy != "noeviction":
        raise HomeError(
            f"Redis at PENNYWEIGHT_REDIS_URL evicts keys when memory is short (maxmemory-policy {policy}): "
            "set it to noeviction, or requests get lost."
        )


def _place(url: str) -> str:
    """Host and port, never the password."""
    parts = urlsplit(url)
    try:
        return f"{parts.hostname or 'no host'}:{parts.port}" if parts.port else parts.hostname or "no host"
    except ValueError:
        return "not a URL"
