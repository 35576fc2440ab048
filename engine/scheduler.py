"""Who computes what in the next step: one catch-up loop under one budget of rows. Imports no torch.

A sequence is *caught up* when all its known tokens but the last have KV; it then needs one row per step and draws a
token. Everything else (a new prompt, a later chunk of it, what a preemption threw away, what an earlier attempt had
generated) is the same case: rows that are missing.

1. Caught-up sequences come first, one row each, so that no prompt holds them up for longer than one step's budget.
2. Then whoever is behind and whoever waits, in one order (``Sequence.order``), as far as the budget goes.

A newcomer gets blocks for all its known tokens at once, and only when one more block for each running sequence stays
free; those that the prefix cache knows it takes up instead of computing them. So a running sequence lacks a block only
when it grows; then the last in order loses its KV and waits again (preemption by recompute), the sequence itself if it
is the last. What it lost stays in the cache until its blocks are needed.

Whose turn it is among those who wait says ``engine.waiting``. A newcomer may push out lower classes. Of its own class
it may push out only when nothing of its tenant runs, and then of each other tenant all but the first: so a tenant that
floods the worker holds a quiet one up for a step, not until one of its completions has ended, and none is ever put out
altogether.

No deadlock: whoever passed the intake fits into the pool alone, the first in order can push out all others, and with
nothing running the first of the waiting gets in. Who was admitted keeps its place in the order, so whoever loses its KV
lost it to a token drawn, to a higher class, or to a tenant of which nothing ran.
"""

from __future__ import annotations

from collections import deque

from engine.config import EngineConfig
from engine.kv import Key, KVManager
from engine.plan import Chunk, ModelLimits, StepPlan
from engine.protocol import JobClass
from engine.sequence import Place, Sequence
from engine.waiting import INPUT_COST, OUTPUT_COST, Waiting


class _Step:
    """The rows of one step while they are being given out; thrown away with it."""

    def __init__(self, budget: int, eos: tuple[int, ...]) -> None:
        self.budget = budget
        self._eos = eos
        self._chunks: dict[Sequence, Chunk] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._chunks

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        rows = min(sequence.missing, self.budget)
        self.budget -= rows
        self._chunks[sequence] = sequence.chunk(rows, blocks, self._eos)

    def drop(self, sequence: Sequence) -> None:
        if chunk := self._chunks.pop(sequence, None):
            self.budget += len(chunk.tokens)

    def plan(self, number: int) -> StepPlan:
        return StepPlan(number=number, chunks=tuple(self._chunks.values()))


class Scheduler:
    """Owns who waits and who runs, and says to the KV manager what to hold."""

    def __init__(self, config: EngineConfig, limits: ModelLimits) -> None:
        self._config = config
        self._eos = limits.eos_token_ids
        self.kv = KVManager(limits.num_blocks, limits.block_size, caching=config.prefix_cache)
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.looked_up_tokens = 0  # of those admitted for the first time
        self.found_tokens = 0  # those of them that the prefix cache had
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """The sequence has ended: its blocks are free."""
        if sequence.place is Place.WAITING:
            self.waiting.discard(sequence)
        else:
            self._stop(sequence, now_ns)
            sequence.place = Place.OUTSIDE
        if not (self.running or self.waiting):
            self.waiting.forget()

    def ran(self, sequence: Sequence, chunk: Chunk, token: int | None) -> None:
        """A chunk of the step has run, and drew ``token`` if it caught up."""
        sequence.advance(chunk, token)
        self.kv.publish(_key(sequence), sequence.chain, sequence.tokens, sequence.computed)
        if token is not None:
            self.waiting.charge(sequence, OUTPUT_COST)

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
            elif (sequence := behind.popleft()).place is Place.RUNNING and sequence not in step:
                self._grow(step, sequence, now_ns)  # else a newcomer has pushed it out, and it may be back already

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
        prefix = self.kv.find(newcomer.chain, newcomer.tokens)
        if not self._make_room(step, newcomer, prefix, now_ns):
            return False
        self.waiting.take(newcomer)
        newcomer.place = Place.RUNNING
        self.running.append(newcomer)
        blocks = self.kv.reserve(_key(newcomer), len(newcomer.tokens), now_ns, prefix=prefix)
        assert blocks is not None
        newcomer.take_up(len(prefix) * self.kv.block_size)
        if newcomer.scheduled_ns is None:
            self._begin(newcomer, now_ns)
        step.take(newcomer, blocks)
        return True

    def _begin(self, newcomer: Sequence, now_ns: int) -> None:
        newcomer.scheduled_ns = now_ns
        self.waiting.charge(newcomer, INPUT_COST * newcomer.missing)
        self.looked_up_tokens += len(newcomer.tokens)
        self.found_tokens += newcomer.computed

    def _make_room(self, step: _Step, newcomer: Sequence, prefix: list[int], now_ns: int) -> bool:
        """Push out as few as need be. False: nobody was, for that would not make room."""
        if self._has_room(newcomer, prefix, leaving=[]):
            return True
        pushable = self._pushable(newcomer)
        if not self._has_room(newcomer, prefix, leaving=pushable):
            return False
        leaving: list[Sequence] = []
        while not self._has_room(newcomer, prefix, leaving=leaving):
            leaving.append(pushable.pop())
        for victim in leaving:
            self._preempt(step, victim, now_ns)
        return True

    def _pushable(self, newcomer: Sequence) -> list[Sequence]:
        """Whom a newcomer may push out, the last in order last."""
        klass, tenant = newcomer.job.klass, newcomer.job.origin.tenant_id
        running = sorted(self.running, key=Sequence.order)
        equals = [sequence for sequence in running if sequence.job.klass is klass]
        firsts = {sequence.job.origin.tenant_id: sequence for sequence in reversed(equals)}
        if tenant in firsts:
            equals = []
        lower = [s for s in running if s.job.klass is JobClass.BATCH] if klass is JobClass.INTERACTIVE else []
        return [s for s in equals if s is not firsts[s.job.origin.tenant_id]] + lower

    def _has_room(self, newcomer: Sequence, prefix: list[int], *, leaving: list[Sequence]) -> bool:
        staying = len(self.running) - len(leaving)
        return staying < self._config.max_batch and self.kv.fits(
            len(newcomer.tokens), prefix, spare=staying, leaving=[_key(sequence) for sequence in leaving]
        )

    def _preempt(self, step: _Step, victim: Sequence, now_ns: int) -> None:
        step.drop(victim)
        self._stop(victim, now_ns)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.push(victim)

    def _stop(self, sequence: Sequence, now_ns: int) -> None:
        self.running.remove(sequence)
        sequence.kv_block_ns += self.kv.release(_key(sequence), now_ns)


def _key(sequence: Sequence) -> Key:
    return sequence.job.request_id, sequence.choice
