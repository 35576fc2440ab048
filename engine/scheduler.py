"""Who computes what in the next step: one catch-up loop under one budget of rows. Imports no torch.

A sequence is *caught up* when all its known tokens but the last have KV; it then needs one row per step and draws a
token. Everything else (a new prompt, a later chunk of it, what a preemption threw away, what an earlier attempt had
generated) is the same case: rows that are missing.

1. Caught-up sequences come first, one row each, so that no prompt holds them up for longer than one step's budget.
2. Then whoever is behind and whoever waits, in one order (``Sequence.order``), as far as the budget goes.

A newcomer gets blocks for all its known tokens at once, and only when one more block for each running sequence stays
free. So a running sequence lacks a block only when it grows; then the last in order loses its KV and waits again
(preemption by recompute), the sequence itself if it is the last. A newcomer may push out lower classes, never its own.

No deadlock: whoever passed the intake fits into the pool alone, the first in order can push out all others, and with
nothing running the first of the waiting gets in.
"""

from __future__ import annotations

import heapq
from collections import deque

from engine.config import EngineConfig
from engine.kv import Key, KVManager
from engine.plan import Chunk, ModelLimits, StepPlan
from engine.protocol import JobClass
from engine.sequence import Place, Sequence


class _Step:
    """The rows of one step while they are being given out; thrown away with it."""

    def __init__(self, budget: int, eos: tuple[int, ...]) -> None:
        self.budget = budget
        self._eos = eos
        self._chunks: dict[Key, Chunk] = {}

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        rows = min(sequence.missing, self.budget)
        self.budget -= rows
        self._chunks[_key(sequence)] = sequence.chunk(rows, blocks, self._eos)

    def drop(self, sequence: Sequence) -> None:
        if chunk := self._chunks.pop(_key(sequence), None):
            self.budget += len(chunk.tokens)

    def plan(self, number: int) -> StepPlan:
        return StepPlan(number=number, chunks=tuple(self._chunks.values()))


class Waiting:
    """Sequences without KV, first in order first. Who has gone leaves lazily: ten thousand waiting cost nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._left = 0

    def __len__(self) -> int:
        return len(self._heap) - self._left

    def push(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        heapq.heappush(self._heap, (sequence.order(), sequence))

    def first(self) -> Sequence | None:
        while self._heap and self._heap[0][1].place is Place.OUTSIDE:
            heapq.heappop(self._heap)
            self._left -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what ``first`` has just returned."""
        heapq.heappop(self._heap)

    def discard(self, sequence: Sequence) -> None:
        sequence.place = Place.OUTSIDE
        self._left += 1


class Scheduler:
    """Owns who waits and who runs, and says to the KV manager what to hold."""

    def __init__(self, config: EngineConfig, limits: ModelLimits) -> None:
        self._config = config
        self._eos = limits.eos_token_ids
        self.kv = KVManager(limits.num_blocks, limits.block_size)
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """The sequence has ended: its blocks are free."""
        if sequence.place is Place.WAITING:
            self.waiting.discard(sequence)
            return
        self.running.remove(sequence)
        sequence.place = Place.OUTSIDE
        sequence.kv_block_ns += self.kv.release(_key(sequence), now_ns)

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step. Without chunks only when nobody waits and nobody runs."""
        self._steps += 1
        step = _Step(self._config.step_tokens, self._eos)
        for sequence in sorted(self.running, key=Sequence.order):
            if sequence.place is Place.RUNNING and sequence.missing == 1:
                self._grow(step, sequence, now_ns)
        self._catch_up(step, now_ns)
        return step.plan(self._steps)

    def _catch_up(self, step: _Step, now_ns: int) -> None:
        behind = deque(sorted((s for s in self.running if s.missing > 1), key=Sequence.order))
        newcomer = self.waiting.first()
        while step.budget and (behind or newcomer):
            if newcomer and not (behind and behind[0].order() < newcomer.order()):
                newcomer = self.waiting.first() if self._admit(step, newcomer, now_ns) else None
            elif (sequence := behind.popleft()).place is Place.RUNNING:  # else a newcomer has pushed it out
                self._grow(step, sequence, now_ns)

    def _grow(self, step: _Step, sequence: Sequence, now_ns: int) -> None:
        while True:
            blocks = self.kv.reserve(_key(sequence), len(sequence.tokens), now_ns)
            if blocks is not None:
                step.take(sequence, blocks)
                return
            victim = max(self.running, key=Sequence.order)
            self._preempt(step, victim, now_ns)
            if victim is sequence:
                return

    def _admit(self, step: _Step, newcomer: Sequence, now_ns: int) -> bool:
        """Give the first of the waiting its blocks and its rows. False: no room yet."""
        lower = self._pushable(newcomer.job.klass)
        while not self._has_room(newcomer, leaving=[]):
            if not self._has_room(newcomer, leaving=lower):
                return False
            self._preempt(step, lower.pop(), now_ns)
        self.waiting.pop()
        newcomer.place = Place.RUNNING
        self.running.append(newcomer)
        blocks = self.kv.reserve(_key(newcomer), len(newcomer.tokens), now_ns)
        assert blocks is not None
        if newcomer.scheduled_ns is None:
            newcomer.scheduled_ns = now_ns
        step.take(newcomer, blocks)
        return True

    def _pushable(self, klass: JobClass) -> list[Sequence]:
        """Whom a newcomer of this class may push out, the last in order last."""
        if klass is JobClass.BATCH:
            return []
        return sorted((s for s in self.running if s.job.klass is JobClass.BATCH), key=Sequence.order)

    def _has_room(self, newcomer: Sequence, *, leaving: list[Sequence]) -> bool:
        staying = len(self.running) - len(leaving)
        free = self.kv.free + sum(self.kv.held(_key(s)) for s in leaving)
        needed = self.kv.blocks_for(len(newcomer.tokens)) + staying
        return staying < self._config.max_batch and needed <= free

    def _preempt(self, step: _Step, victim: Sequence, now_ns: int) -> None:
        step.drop(victim)
        self.running.remove(victim)
        victim.kv_block_ns += self.kv.release(_key(victim), now_ns)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.push(victim)


def _key(sequence: Sequence) -> Key:
    return sequence.job.request_id, sequence.choice
