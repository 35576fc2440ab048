"""The registry of workers: which models are served, by whom, and who is alive.

Workers publish a card and renew a lease; this side looks at both twice a second and builds the tokenizer of each
revision once. A model stays known after its last worker went, so that its requests get "try again" and not "unknown".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, cast

import msgspec
import structlog
from redis.asyncio import Redis

from engine.keys import WORKERS, lease_key, tokenizer_key
from engine.protocol import WorkerCard, WorkerState, unpack_card
from service.admission import Candidate
from service.text import Text

log = structlog.get_logger()

EVERY_S: Final = 0.5
_AGAIN_S: Final = 0.1  # between looks that requests ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A public name and the living workers that serve one revision of it."""

    name: str
    deployment: str
    revision: str
    text: Text
    cards: tuple[WorkerCard, ...]  # ready ones; may be empty
    context_length: int
    kv_tokens: int  # a longer request fits no worker
    default_max_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    since: float  # UTC seconds

    @property
    def candidates(self) -> list[Candidate]:
        return [Candidate(card.worker, card.max_outstanding_tokens) for card in self.cards]


class Workers:
    """What Redis said at the last look. A loop calls ``refresh``; ``find`` looks when a request needs it."""

    def __init__(self, connection: Redis) -> None:
        self._redis = connection
        self._raw: dict[bytes, bytes] = {}
        self._cards: dict[str, WorkerCard] = {}
        self._living: frozenset[str] = frozenset()
        self._texts: dict[str, Text] = {}
        self._models: dict[str, Model] = {}
        self._looked = 0.0  # monotonic
        self._looking = asyncio.Lock()

    async def find(self, name: str) -> Model | None:
        """The model, looked for afresh where nobody is known to serve it: another process may know better already.

        Raises redis.RedisError.
        """
        model = self._models.get(name)
        if model is None or not model.cards:
            await self.look()
        return self._models.get(name)

    async def look(self) -> None:
        """Look at Redis now. Whoever asks meanwhile shares the next look. Raises redis.RedisError."""
        asked = time.monotonic()
        async with self._looking:
            if self._looked <= asked:  # else a look that began later has answered us, too
                await asyncio.sleep(self._looked + _AGAIN_S - time.monotonic())
                await self.refresh()

    def model(self, name: str) -> Model | None:
        return self._models.get(name)

    def candidates(self, of: Model) -> list[Candidate]:
        """Who serves this revision now."""
        model = self._models.get(of.name)
        return model.candidates if model and model.revision == of.revision else []

    def models(self) -> list[Model]:
        return sorted(self._models.values(), key=lambda model: model.name)

    def card(self, worker: str) -> WorkerCard | None:
        return self._cards.get(worker)

    def living(self, worker: str) -> bool:
        return worker in self._living

    async def refresh(self) -> None:
        """Raises redis.RedisError; what was known stays known then."""
        began = time.monotonic()
        raw = cast("dict[bytes, bytes]", await self._redis.hgetall(WORKERS))
        if raw != self._raw:
            self._cards = {card.worker: card for card in _cards(raw.values())}
            self._raw = raw
        self._living = await self._with_lease(list(self._cards))
        await self._learn_texts()
        for name in {card.model for card in self._cards.values()} | set(self._models):
            self._update(name)
        self._looked = began

    async def _with_lease(self, workers: list[str]) -> frozenset[str]:
        pipe = self._redis.pipeline(transaction=False)
        for worker in workers:
            pipe.exists(lease_key(worker))
        return frozenset(worker for worker, there in zip(workers, await pipe.execute(), strict=True) if there)

    async def _learn_texts(self) -> None:
        for card in self._cards.values():
            if card.revision in self._texts or card.worker not in self._living:
                continue
            content = cast("bytes | None", await self._redis.get(tokenizer_key(card.revision)))
            if content is None:
                continue  # a worker publishes its card first
            try:
                self._texts[card.revision] = await asyncio.to_thread(
                    Text, content.decode(), card.chat_template, card.special_tokens
                )
            except ValueError as error:
                log.warning("worker published an unusable tokenizer", worker=card.worker, error=str(error))

    def _update(self, name: str) -> None:
        ready = [
            card
            for card in self._cards.values()
            if card.model == name
            and card.state is WorkerState.READY
            and card.worker in self._living
            and card.revision in self._texts
        ]
        before = self._models.get(name)
        if not ready:
            if before:
                self._models[name] = replace(before, cards=())
            return
        newest = max(ready, key=lambda card: card.started_at)
        cards = tuple(c for c in ready if (c.deployment, c.revision) == (newest.deployment, newest.revision))
        self._models[name] = Model(
            name=name,
            deployment=newest.deployment,
            revision=newest.revision,
            text=self._texts[newest.revision],
            cards=cards,
            context_length=newest.context_length,
            kv_tokens=min(card.kv_tokens for card in cards),
            default_max_tokens=newest.default_max_tokens,
            vocab_size=newest.vocab_size,
            eos_token_ids=newest.eos_token_ids,
            since=before.since if before else newest.started_at,
        )


def _cards(raw: Iterable[bytes]) -> list[WorkerCard]:
    cards = []
    for data in raw:
        try:
            cards.append(unpack_card(data))
        except msgspec.MsgspecError:
            log.warning("a worker's card cannot be read", size=len(data))
    return cards
