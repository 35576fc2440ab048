"""Settings of every process, read once from the environment at the root and passed down.

A command that finds no PENNYWEIGHT_DATABASE_URL looks for a home folder that `pennyweight up` has written:
PENNYWEIGHT_HOME, else ``.pennyweight`` in the current folder or one above it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOME_NAME = ".pennyweight"
BOOTSTRAP_NAME = "bootstrap.json"
SECRETS_NAME = "secrets.json"


class SettingsError(Exception):
    """The environment does not say enough. The message names what to set or run next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    database_url: str  # postgresql://…, as libpq takes it
    redis_url: str  # redis://…, rediss://… or unix://…
    home: Path  # spools and other local state of this machine's processes
    # Seals the texts at rest; "" where neither environment nor home has one.
    secret: str = field(default="", repr=False)

    dashboard_url: str  # where the reader's browser reaches the dashboard
    max_body_bytes: int  # of a request
    share_prefixes: bool  # whether tenants find what others' requests have computed
    # In seconds
    body_timeout_s: float  # from the end of the headers to the end of the body
    lease_s: float  # a boot without progress for so long is dead
    request_timeout_s: float  # deadline of a request, from its admission
    settle_grace_s: float  # after the deadline, before the sweeper settles in the owner's place
    failover_wait_s: float  # how long a running request waits for a living worker
    drain_s: float  # after SIGTERM, for what is running
    key_cache_s: float  # how long a key is believed without asking Postgres again
    key_stale_s: float  # how long a known key is believed while Postgres is away

    @property
    def cache_salt(self) -> str:
        """Of every job: "" keeps each tenant's cached prefixes to itself (see ``engine.protocol.Job``)."""
        return "all" if self.share_prefixes else ""

    @property
    def spool(self) -> Path:
        return self.home / "spool"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises SettingsError."""
        home = find_home(environment)
        urls = _urls(environment, home)
        return cls(
            database_url=urls[0],
            redis_url=urls[1],
            home=home,
            secret=environment.get("PENNYWEIGHT_SECRET") or _secret_of(home),
            dashboard_url=environment.get("PENNYWEIGHT_DASHBOARD_URL") or "http://127.0.0.1:8501",
            max_body_bytes=int(_positive(environment, "MAX_BODY_BYTES", 4 << 20)),
            share_prefixes=_switch(environment, "SHARE_PREFIXES"),
            body_timeout_s=_positive(environment, "BODY_TIMEOUT_S", 60),
            lease_s=_positive(environment, "LEASE_S", 10),
            request_timeout_s=_positive(environment, "REQUEST_TIMEOUT_S", 600),
            settle_grace_s=_positive(environment, "SETTLE_GRACE_S", 30),
            failover_wait_s=_positive(environment, "FAILOVER_WAIT_S", 60),
            drain_s=_positive(environment, "DRAIN_S", 30),
            key_cache_s=_positive(environment, "KEY_CACHE_S", 2),
            key_stale_s=_positive(environment, "KEY_STALE_S", 600),
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


def _secret_of(home: Path) -> str:
    """What `pennyweight up` keeps in the home."""
    try:
        return str(json.loads((home / SECRETS_NAME).read_bytes())["encryption"])
    except (OSError, ValueError, KeyError):
        return ""


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(f"PENNYWEIGHT_{name}") or "0"
    if text not in {"0", "1"}:
        raise SettingsError(f"PENNYWEIGHT_{name} must be 1 or 0, not {text!r}.")
    return text == "1"


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(f"PENNYWEIGHT_{name}")
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"PENNYWEIGHT_{name} must be a positive number, not {text!r}.")
    return value
