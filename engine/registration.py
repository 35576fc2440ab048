"""The hold of this boot on its worker name: card, lease, incumbency, and the tokenizer that owners need.

One process holds a name at a time. A new boot takes it from the one before it, alive or dead, and removes that one's
card, lease and inbox, so that owners fail over at once. Who finds another boot in its place has been replaced and
stops.
After Redis has lost everything, the renewal finds no holder and writes all of it again.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec
import redis
import structlog

from engine.exchange import Exchange
from engine.keys import WORKERS, inbox_key, incumbent_key, lease_key, tokenizer_key
from engine.protocol import WorkerCard, WorkerState, pack

log = structlog.get_logger()

LOADING_LEASE_S: Final = 900.0  # nothing renews it while weights are read
_RENEWALS_PER_LEASE: Final = 4
_INBOX_OUTLIVES_LEASE: Final = 60  # times; an inbox that nobody reads any more goes by itself

# KEYS incumbent, workers, lease. ARGV boot, card, lease in ms, lease prefix, inbox prefix.
_TAKE: Final = """
local before = redis.call('SET', KEYS[1], ARGV[1], 'GET')
if before and before ~= ARGV[1] then
    redis.call('HDEL', KEYS[2], before)
    redis.call('DEL', ARGV[4] .. before, ARGV[5] .. before)
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('SET', KEYS[3], 'worker', 'PX', ARGV[3])
return before
"""
# KEYS incumbent, workers, lease, inbox, tokenizer. ARGV boot, card, lease in ms, expiry of the inbox in ms.
_REPLACED: Final = 0
_RENEWED_WITHOUT_TOKENIZER: Final = 2
_RENEW: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if not holder then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('SET', KEYS[3], 'worker', 'PX', ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[4])
return 1 + (1 - redis.call('EXISTS', KEYS[5]))
"""
# KEYS incumbent, workers, lease, inbox. ARGV boot.
_LEAVE: Final = """
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[4])
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class ReplacedError(Exception):
    """Another boot holds this worker's name."""


class Registration:
    """Owns the card. Lease and card are told again in every quarter of a lease, and at once when the card changes."""

    def __init__(self, card: WorkerCard, *, lease_s: float) -> None:
        self.card = card
        self._lease_s = lease_s
        self._tokenizer = b""
        self._tokenizer_lost = False
        self._due = 0.0  # monotonic seconds

    def take_name(self, connection: redis.Redis) -> None:
        """Become the incumbent, with a lease for as long as loading may take. Raises redis.RedisError."""
        card, boot = self.card, self.card.worker
        keys = (incumbent_key(card.name), WORKERS, lease_key(boot))
        lease_ms = int(LOADING_LEASE_S * 1000)
        before = connection.eval(_TAKE, len(keys), *keys, boot, pack(card), lease_ms, lease_key(""), inbox_key(""))
        if before:
            log.info("took the name from an earlier boot", name=card.name)

    def publish(self, connection: redis.Redis, card: WorkerCard, tokenizer: bytes) -> None:
        """Say what the model turned out to be. Raises redis.RedisError."""
        self._tokenizer = tokenizer
        connection.set(tokenizer_key(card.revision), tokenizer)  # first: a card is of use only with its tokenizer
        self.card = card
        self._due = 0.0

    def become(self, state: WorkerState) -> None:
        self.card = msgspec.structs.replace(self.card, state=state)
        self._due = 0.0

    def ask(self, exchange: Exchange) -> None:
        if time.monotonic() < self._due:
            return
        boot, lease_ms = self.card.worker, int(self._lease_s * 1000)
        keys = (
            incumbent_key(self.card.name),
            WORKERS,
            lease_key(boot),
            inbox_key(boot),
            tokenizer_key(self.card.revision),
        )
        arguments = (boot, pack(self.card), lease_ms, lease_ms * _INBOX_OUTLIVES_LEASE)
        exchange.add("EVAL", _RENEW, len(keys), *keys, *arguments, then=self._renewed)
        if self._tokenizer_lost:
            exchange.add("SET", tokenizer_key(self.card.revision), self._tokenizer, then=self._told_tokenizer)

    def leave(self, connection: redis.Redis) -> None:
        """Free the name, so that owners fail over at once. Raises redis.RedisError."""
        boot = self.card.worker
        keys = (incumbent_key(self.card.name), WORKERS, lease_key(boot), inbox_key(boot))
        connection.eval(_LEAVE, len(keys), *keys, boot)

    def _renewed(self, reply: int) -> None:
        if reply == _REPLACED:
            raise ReplacedError
        self._tokenizer_lost = reply == _RENEWED_WITHOUT_TOKENIZER
        self._due = time.monotonic() + (0.0 if self._tokenizer_lost else self._lease_s / _RENEWALS_PER_LEASE)

    def _told_tokenizer(self, _: object) -> None:
        self._tokenizer_lost = False
