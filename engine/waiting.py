"""Who waits without KV, and whose turn it is: classes in their order, within a class the tenant that was served least.

Tenants share a worker by a virtual token counter each ("Fairness in Serving Large Language Models", Sheng et al. 2024,
https://arxiv.org/abs/2401.00588, algorithm 2), here per class and divided by the tenant's weight:

* A first admission costs ``INPUT_COST`` for each token that must be computed, each drawn token ``OUTPUT_COST``. What a
  prefix hit saves is free, and so is what a preemption makes us compute again.
* Next is the first request of the tenant whose counter is lowest; among equals, of the one whose turn is longest ago.
* A tenant that comes back after nothing of it waited is lifted to the lowest counter of those who wait, or to that of
  the last who did: nobody saves up turns by staying away.

So of two tenants that both have requests waiting all the time, none gets more than 2 U ahead of the other (in tokens by
cost and weight), U being the most that what runs at once can cost. Counters only grow, so an order that was right when
it was written down can only be too early: it is put right when it comes up, and ten thousand waiting cost nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from engine.protocol import JobClass
from engine.sequence import Place, Sequence

INPUT_COST: Final = 1.0
OUTPUT_COST: Final = 2.0

_Turn = tuple[float, int, int]  # counter, number of the tenant's last turn, arrival of its first


@dataclass(slots=True, eq=False)
class _Tenant:
    served: float = 0.0  # the virtual token counter
    last: int = 0  # number of its last turn; 0: none
    waiting: int = 0
    heap: list[tuple[int, Sequence]] = field(default_factory=list)  # by arrival; who has left goes when it comes up
    noted: _Turn | None = None  # its turn as it stands in the line

    def first(self) -> Sequence | None:
        while self.heap and self.heap[0][1].place is not Place.WAITING:
            heapq.heappop(self.heap)
        return self.heap[0][1] if self.heap else None

    def turn(self) -> _Turn | None:
        first = self.first()
        return (self.served, self.last, first.arrival) if first else None


class _Line:
    """One class."""

    def __init__(self) -> None:
        self._tenants: dict[UUID, _Tenant] = {}
        self._heap: list[tuple[_Turn, _Tenant]] = []
        self._left_last: _Tenant | None = None
        self._turns = 0
        self.waiting = 0

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenants.setdefault(sequence.job.origin.tenant_id, _Tenant())
        if not tenant.waiting and sequence.scheduled_ns is None:
            tenant.served = max(tenant.served, self._lowest())
        tenant.waiting += 1
        self.waiting += 1
        heapq.heappush(tenant.heap, (sequence.arrival, sequence))
        self._note(tenant)

    def first(self) -> tuple[Sequence, float] | None:
        """Whose turn it is, and the counter of its tenant."""
        while self._heap:
            noted, tenant = self._heap[0]
            if noted != tenant.noted:  # written down anew since
                heapq.heappop(self._heap)
            elif noted == (turn := tenant.turn()):
                return tenant.heap[0][1], tenant.served
            else:
                heapq.heappop(self._heap)
                tenant.noted = None
                if turn:
                    self._note(tenant)
        return None

    def take(self, sequence: Sequence) -> None:
        """It has its turn: what ``first`` has just returned."""
        tenant = self._leave(sequence)
        heapq.heappop(tenant.heap)
        self._turns += 1
        tenant.last = self._turns

    def discard(self, sequence: Sequence) -> None:
        self._leave(sequence)

    def charge(self, tenant_id: UUID, cost: float) -> None:
        self._tenants[tenant_id].served += cost

    def _leave(self, sequence: Sequence) -> _Tenant:
        tenant = self._tenants[sequence.job.origin.tenant_id]
        tenant.waiting -= 1
        self.waiting -= 1
        if not tenant.waiting:
            self._left_last = tenant
        return tenant

    def _lowest(self) -> float:
        if first := self.first():
            return first[1]
        return self._left_last.served if self._left_last else 0.0

    def _note(self, tenant: _Tenant) -> None:
        turn = tenant.turn()
        if turn and (tenant.noted is None or turn < tenant.noted):
            tenant.noted = turn
            heapq.heappush(self._heap, (turn, tenant))


class Waiting:
    """Sequences without KV, and the counters of their tenants."""

    def __init__(self) -> None:
        self._lines = {klass: _Line() for klass in JobClass}

    def __len__(self) -> int:
        return sum(line.waiting for line in self._lines.values())

    def push(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        self._line(sequence).push(sequence)

    def first(self) -> Sequence | None:
        """Whose turn it is. Who never ran gets its place in the order (``Sequence.order``) by this turn."""
        for line in self._lines.values():
            if found := line.first():
                sequence, served = found
                if sequence.scheduled_ns is None:
                    sequence.turn = served
                return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        """Take out what ``first`` has just returned."""
        self._line(sequence).take(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take out whoever it is."""
        sequence.place = Place.OUTSIDE
        self._line(sequence).discard(sequence)

    def charge(self, sequence: Sequence, cost: float) -> None:
        self._line(sequence).charge(sequence.job.origin.tenant_id, cost / sequence.weight)

    def forget(self) -> None:
        """Nobody waits and nobody runs: all tenants are even again."""
        self._lines = {klass: _Line() for klass in JobClass}

    def _line(self, sequence: Sequence) -> _Line:
        return self._lines[sequence.job.klass]
