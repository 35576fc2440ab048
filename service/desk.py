"""What a generation needs of its owner, which is a ``dispatch.Dispatch``; and the two ways of not being admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.protocol import Abort, Job, WorkerCard
from service.admission import Granted, Refused
from service.order import Order

if TYPE_CHECKING:
    from service.generation import Generation


class DeniedError(Exception):
    """Not admitted, for a reason that the admission gave. Nothing was taken and nothing will be billed."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.cause)
        self.refused = refused


class UnavailableError(Exception):
    """Not admitted, because this owner or Redis cannot admit now. Nothing will be billed."""


class Desk(Protocol):
    """What a generation needs of its owner (``service.dispatch``)."""

    async def admit(self, order: Order, job: Job) -> Granted | Refused:
        """Raises RedisError."""
        ...

    def enter(self, generation: Generation) -> None:
        """Number the admission and note it in the spool. Raises OSError."""
        ...

    def card(self, worker: str) -> WorkerCard | None: ...

    async def abort(self, worker: str, abort: Abort) -> None:
        """Never raises: an abort that is lost is made good by the leases."""
        ...

    async def release(self, order: Order, used_tokens: int) -> None:
        """Never raises: a release that is lost is made good by the lease."""
        ...

    def forget(self, generation: Generation) -> None:
        """Undo, in the background, an admission of unknown outcome."""
        ...

    def book(self, generation: Generation) -> None:
        """Settle. Never raises."""
        ...
