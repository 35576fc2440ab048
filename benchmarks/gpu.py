"""The same engine code on a GPU: parity with the CPU on a small model, speed in the shape of Llama 3.1 8B.

    benchmarks/gpu.sh            packs what a machine without a network needs, and runs this

Prints tokens/s at several batch sizes beside the bound that reading weights and KV sets, measured in the same run by
copying device memory; and prefill tokens/s beside the matrix product's peak, likewise measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from uuid import UUID

import torch

from benchmarks.random_model import LLAMA_8B, TINY, random_model
from engine.models import LoadedModel
from engine.models.config import ModelConfig
from engine.plan import Chunk, StepPlan
from engine.protocol import Sampling
from engine.runner import BLOCK_SIZE, TorchRunner

GREEDY = Sampling(max_tokens=1 << 20, temperature=0)


class Batch:
    """Sequences that all decode, as the scheduler would plan them."""

    def __init__(self, runner: TorchRunner, prompts: Sequence[Sequence[int]], room: int) -> None:
        self._runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        per_sequence = -(-room // BLOCK_SIZE)
        self._blocks = [list(range(n * per_sequence, (n + 1) * per_sequence)) for n in range(len(prompts))]
        self._given = [len(prompt) for prompt in prompts]
        self._done = [0] * len(prompts)
        self._number = 0

    def step(self, rows: int = 1 << 30) -> None:
        """Each sequence catches up by at most ``rows`` rows; whoever catches up draws."""
        chunks = []
        for n, tokens in enumerate(self.tokens):
            end = min(len(tokens), self._done[n] + rows)
            chunks.append(
                Chunk(
                    request_id=UUID(int=n),
                    choice=0,
                    tokens=tokens[self._done[n] : end],
                    start=self._done[n],
                    blocks=self._blocks[n],
                    given=self._given[n],
                    watermark=0,
                    draws=end == len(tokens),
                    position=len(tokens) - self._given[n],
                    sampling=GREEDY,
                )
            )
            self._done[n] = end
        self._number += 1
        result = self._runner.execute(StepPlan(number=self._number, chunks=chunks))
        for tokens, token in zip(self.tokens, result.drawn, strict=True):
            if token is not None:
                tokens.append(token)


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


def parity(device: str, steps: int = 64) -> None:
    """Greedy tokens of a small float32 model on the device against the CPU's."""
    given = prompts(6, 70, TINY.vocab_size)
    answers = []
    for place in ("cpu", device):
        model = random_model(TINY, device=place, dtype=torch.float32, draw_on="cpu")
        batch = Batch(TorchRunner(model, device=place, num_blocks=256), given, room=256)
        for _ in range(steps):
            batch.step(rows=32)
        answers.append(batch.tokens)
    same = sum(a == b for a, b in zip(*answers, strict=True))
    print(f"parity: {same} of {len(given)} greedy sequences equal to the CPU's")


def timed(action: object, repeats: int) -> float:
    assert callable(action)
    action()
    spans = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - started)
    return median(spans)


def ceilings(device: str) -> tuple[float, float]:
    """(bytes/s of device memory, bf16 operations/s), measured."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / timed(lambda: target.copy_(source), 10)
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    product = 2 * 8192**3 / timed(lambda: left @ left, 10)
    return copied, product


def speed(model: LoadedModel, config: ModelConfig, device: str, *, context: int, batches: Sequence[int]) -> None:
    memory, arithmetic = ceilings(device)
    weights = 2 * (config.macs_per_row + config.macs_per_draw)  # bytes read by a step, in bf16
    kept = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    print(f"limits: {memory / 1e12:.2f} TB/s, {arithmetic / 1e12:.0f} Tflop/s bf16")
    for size in batches:
        room = context + 64
        runner = TorchRunner(model, device=device, num_blocks=size * -(-room // BLOCK_SIZE))
        batch = Batch(runner, prompts(size, context, config.vocab_size), room)
        started = time.perf_counter()
        for _ in range(-(-context // 2048)):
            batch.step(rows=2048)
        prefill = time.perf_counter() - started
        step = timed(batch.step, 20)
        bound = memory / (weights + size * context * kept) * size
        rate, floor = size / step, 2 * config.macs_per_row * size * context / arithmetic
        print(
            f"batch {size:4}: decode {rate:8.0f} tok/s = {rate / bound:5.1%} of the memory bound; "
            f"prefill {size * context / prefill:8.0f} tok/s = {floor / prefill:5.1%} of the matrix product's peak"
        )
        del batch, runner
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--parity-only", action="store_true", help="also runs on a CPU, against itself")
    arguments = parser.parse_args()
    parity(arguments.device)
    if not arguments.parity_only:
        model = random_model(LLAMA_8B, device=arguments.device, dtype=torch.bfloat16)
        speed(model, LLAMA_8B, arguments.device, context=arguments.context, batches=arguments.batches)


if __name__ == "__main__":
    main()
