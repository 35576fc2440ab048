"""Device time and tokens of one attempt, while it lives and when it closes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from engine.plan import Chunk
from engine.protocol import WasteCause


@dataclass(slots=True)
class Account:
    """Device time and tokens of one attempt. Tokens are counted from the plan, not from what the executor says."""

    tenant: UUID
    used_ns: int = 0
    wasted_ns: Counter[WasteCause] = field(default_factory=Counter)
    used_after: list[int] = field(default_factory=list)  # used_ns after the step that drew each token
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    peak_batch: int = 0

    @property
    def device_ns(self) -> int:
        return self.used_ns + self.wasted_ns.total()

    def add_share(self, chunk: Chunk, share_ns: int) -> int:
        """Book a share; returns the part of it that was wasted on recomputing, by rows inside the chunk."""
        recomputed = max(0, min(chunk.end, chunk.watermark) - chunk.start)
        wasted = share_ns * recomputed // len(chunk.tokens)
        self.used_ns += share_ns - wasted
        if wasted:
            self.wasted_ns[WasteCause.PREEMPTION] += wasted
        return wasted

    def count(self, chunk: Chunk, batch: int) -> None:
        self.prompt_tokens += max(0, min(chunk.end, chunk.given) - max(chunk.start, chunk.watermark))
        self.recomputed_tokens += max(0, min(chunk.end, chunk.watermark) - chunk.start)
        self.generated_tokens += chunk.draws
        if chunk.draws:
            self.used_after.append(self.used_ns)
        self.steps += 1
        self.peak_batch = max(self.peak_batch, batch)

    def waste(self, cause: WasteCause, *, keep: int = 0) -> int:
        """Move from used to ``cause`` what came after the first ``keep`` tokens drawn; returns how much."""
        moved = self.used_ns - self._used_for(keep)
        self.used_ns -= moved
        if moved:
            self.wasted_ns[cause] += moved
        return moved

    def _used_for(self, drawn: int) -> int:
        if drawn <= 0:
            return 0
        return self.used_after[drawn - 1] if drawn <= len(self.used_after) else self.used_ns
