"""Whose jobs run here, and whether they still live: looked at about once a second."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from engine.exchange import Exchange
from engine.keys import lease_key

_EVERY_S: Final = 1.0
# An emptied Redis takes all leases at once; the living write theirs again within a quarter of one.
_GRACE_S: Final = 4.0


class Owners:
    """Remembers since when each owner's lease has been missing."""

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}
        self._due = 0.0

    def ask(self, exchange: Exchange, owners: set[str]) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _EVERY_S
        self._missing_since = {owner: at for owner, at in self._missing_since.items() if owner in owners}
        for owner in owners:
            exchange.add("EXISTS", lease_key(owner), then=partial(self._seen, owner))

    def lost(self) -> list[str]:
        """Those whose lease has been missing at every look for longer than the grace."""
        before = time.monotonic() - _GRACE_S
        return [owner for owner, at in self._missing_since.items() if at < before]

    def _seen(self, owner: str, exists: int) -> None:
        if exists:
            self._missing_since.pop(owner, None)
        else:
            self._missing_since.setdefault(owner, time.monotonic())
