"""Settings of every process, read once from the environment at the root and passed down.

A command that finds no PENNYWEIGHT_DATABASE_URL looks for a home folder that `pennyweight up` has written: PENNYWEIGHT_HOME,
else ``.pennyweight`` in the current folder or one above it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOME_NAME = ".pennyweight"
BOOTSTRAP_NAME = "bootstrap.json"


class SettingsError(Exception):
    """The environment does not say enough. The message names what to set or run next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    database_url: str  # postgresql://…, as libpq takes it
    redis_url: str  # redis://…, rediss://… or unix://…
    home: Path  # spools and other local state of this machine's processes

    # Limits and leases, in seconds
    lease_s: float = 10.0  # a boot without progress for so long is dead
    request_timeout_s: float = 600.0  # deadline of a request, from its admission
    settle_grace_s: float = 30.0  # after the deadline, before the sweeper settles in the owner's place
    failover_wait_s: float = 60.0  # how long a running request waits for a living worker
    drain_s: float = 30.0  # after SIGTERM, for what is running
    key_cache_s: float = 2.0  # how long a key is believed without asking Postgres again
    key_stale_s: float = 600.0  # how long a known key is believed while Postgres is away
    max_body_bytes: int = 4 << 20

    @property
    def spool(self) -> Path:
        return self.home / "spool"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises SettingsError."""
        home = find_home(environment)
        urls = _urls(environment, home)
        numbers: dict[str, float] = {}
        for name in _NUMBERS:
            text = environment.get(f"PENNYWEIGHT_{name.upper()}")
            if text is not None:
                numbers[name] = _number(name, text)
        body = int(numbers.pop("max_body_bytes", cls.max_body_bytes))
        return cls(database_url=urls[0], redis_url=urls[1], home=home, max_body_bytes=body, **numbers)


_NUMBERS = (
    "lease_s",
    "request_timeout_s",
    "settle_grace_s",
    "failover_wait_s",
    "drain_s",
    "key_cache_s",
    "key_stale_s",
    "max_body_bytes",
)


def find_home(environment: Mapping[str, str] = os.environ) -> Path:
    """PENNYWEIGHT_HOME, else the nearest written home at or above the current folder, else ``./.pennyweight``."""
    if named := environment.get("PENNYWEIGHT_HOME"):
        return Path(named).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / HOME_NAME / BOOTSTRAP_NAME).is_file():
            return folder / HOME_NAME
    return here / HOME_NAME


def _urls(environment: Mapping[str, str], home: Path) -> tuple[str, str]:
    database, redis = environment.get("PENNYWEIGHT_DATABASE_URL"), environment.get("PENNYWEIGHT_REDIS_URL")
    if database and redis:
        return database, redis
    try:
        written = json.loads((home / BOOTSTRAP_NAME).read_bytes())
        return database or written["database_url"], redis or written["redis_url"]
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"No running Pennyweight found at {home}. Start one with `pennyweight up`, "
            "or set PENNYWEIGHT_DATABASE_URL and PENNYWEIGHT_REDIS_URL."
        ) from error


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise SettingsError(f"PENNYWEIGHT_{name.upper()} must be a positive number, not {text!r}.")
    return value
