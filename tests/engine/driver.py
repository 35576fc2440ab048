"""Hand-made plans for a real runner: sequences that get as many rows per step as the test says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from engine.plan import Chunk, StepPlan, StepResult
from engine.protocol import Sampling
from engine.runner import TorchRunner

GREEDY = Sampling(max_tokens=0, temperature=0.0)


@dataclass(eq=False)
class Text:
    """A sequence: its known tokens, how many of them have KV, and where that lies."""

    number: int
    known: list[int]
    given: int
    sampling: Sampling = GREEDY
    banned: Sequence[int] = ()
    computed: int = 0
    watermark: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        return self.known[self.given :]

    @property
    def missing(self) -> int:
        return len(self.known) - self.computed


class Driver:
    """Hands out blocks in a random order, so that no two of a sequence are neighbours but by chance."""

    def __init__(self, runner: TorchRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.limits.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.steps = 0
        self.texts = 0

    def text(self, prompt: Sequence[int], sampling: Sampling = GREEDY, *, banned: Sequence[int] = ()) -> Text:
        self.texts += 1
        return Text(number=self.texts, known=list(prompt), given=len(prompt), sampling=sampling, banned=banned)

    def step(self, rows: Mapping[Text, int]) -> StepResult:
        """Run one step with so many rows of each text, and append what was drawn."""
        texts = list(rows)
        chunks = [self.chunk(text, count) for text, count in rows.items()]
        result = self.runner.execute(StepPlan(number=self.steps, chunks=chunks))
        self.steps += 1
        for text, chunk, drawn in zip(texts, chunks, result.drawn, strict=True):
            text.computed = chunk.end
            assert (drawn is not None) == chunk.draws
            if drawn is not None:
                text.known.append(drawn)
        return result

    def chunk(self, text: Text, count: int) -> Chunk:
        end = text.computed + count
        assert 0 < count <= text.missing
        while len(text.blocks) * self.runner.limits.block_size < end:
            text.blocks.append(self.free.pop())
        return Chunk(
            request_id=UUID(int=text.number),
            choice=0,
            tokens=text.known[text.computed : end],
            start=text.computed,
            blocks=text.blocks,
            given=text.given,
            watermark=text.watermark,
            draws=end == len(text.known),
            position=len(text.completion),
            sampling=text.sampling,
            banned=text.banned,
        )

    def preempt(self, text: Text) -> None:
        self.free += reversed(text.blocks)
        text.blocks, text.watermark, text.computed = [], text.computed, 0

    def finish(self, texts: Sequence[Text], length: int, *, budget: int = 1 << 20) -> None:
        """Step until each has a completion of ``length``; a step takes at most ``budget`` rows of each."""
        while unfinished := [text for text in texts if len(text.completion) < length]:
            self.step({text: min(text.missing, budget) for text in unfinished})
