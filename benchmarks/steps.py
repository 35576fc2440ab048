"""What a step costs: steps of every shape on a real model, measured one by one, for looking at and for fitting.

    python -m benchmarks.steps record FILE.jsonl --model FILE_OR_FOLDER [--seconds 120] [--threads N]
    python -m benchmarks.steps fit FILE.jsonl [--processor]

A line of the file is a step: its chunks as [first position, rows, whether it draws], its nanoseconds, and those of
processor time, which on one thread are nearly free of what else the machine does. Shapes are drawn at random, so that
neighbours in time have nothing in common. KV memory is empty: what a step costs does not depend on what it reads.

``fit`` teaches the engine's model four fifths of them and prints its error on the others: with all quantities of
``engine.work``, and with each left out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from uuid import UUID

from engine.plan import Chunk, Runner, StepPlan
from engine.protocol import Sampling
from engine.step_time import StepTime
from engine.threads import prepare_threads
from engine.work import SIZE, Load, load

Shape = list[tuple[int, int, bool]]  # first position, rows, draws

_SINGLES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_IDS = range(300, 30_000)  # ordinary words in the vocabulary of every model of interest
_GREEDY = Sampling(max_tokens=1, temperature=0.0)


def draw_shape(noise: random.Random, *, step_tokens: int, context: int) -> Shape:
    """Some single rows at contexts that are alike or not, some chunks of prompts, at most ``step_tokens`` rows."""
    singles = noise.choice(_SINGLES)
    longest = noise.choice((64, 256, context // 2, context))
    shape = [(noise.randrange(1, longest), 1, True) for _ in range(singles)]
    left = step_tokens - singles
    for _ in range(noise.choice((0, 0, 1, 1, 2, 3)) or not singles):
        rows = noise.randint(2, max(2, left if noise.random() < 0.4 else left // 3))
        if rows > left:
            break
        start = 0 if noise.random() < 0.4 else noise.randrange(context - rows)
        shape.append((start, rows, noise.random() < 0.5))
        left -= rows
    return shape


def plan_of(shape: Shape, runner: Runner, noise: random.Random) -> StepPlan:
    """Each chunk has blocks of its own, scattered as in a pool that has been in use."""
    size = runner.limits.block_size
    free = list(range(runner.limits.num_blocks))
    noise.shuffle(free)
    chunks = []
    for number, (start, rows, draws) in enumerate(shape):
        count = -(-(start + rows) // size)
        blocks, free = free[:count], free[count:]
        chunks.append(_chunk(number, start, noise.choices(_IDS, k=rows), blocks, draws=draws))
    return StepPlan(number=0, chunks=chunks)


def _chunk(number: int, start: int, tokens: Sequence[int], blocks: Sequence[int], *, draws: bool) -> Chunk:
    return Chunk(
        request_id=UUID(int=number),
        choice=0,
        tokens=tokens,
        start=start,
        blocks=blocks,
        given=start + len(tokens),
        watermark=0,
        draws=draws,
        position=0,
        sampling=_GREEDY,
    )


def record(runner: Runner, path: Path, *, seconds: float, step_tokens: int, context: int, seed: int) -> int:
    noise = random.Random(seed)
    for _ in range(3):  # first steps of a process are slow
        runner.execute(plan_of([(0, step_tokens, True)], runner, noise))
    until, count = time.monotonic() + seconds, 0
    with path.open("w") as lines:
        while time.monotonic() < until:
            shape = draw_shape(noise, step_tokens=step_tokens, context=context)
            plan, cpu_ns = plan_of(shape, runner, noise), time.process_time_ns()
            device_ns = runner.execute(plan).device_ns
            print(json.dumps([shape, device_ns, time.process_time_ns() - cpu_ns]), file=lines)
            count += 1
    return count


def plain(chunk: tuple[int, int, bool]) -> Load:
    start, rows, draws = chunk
    return load(_chunk(0, start, [0] * rows, [], draws=draws))


def held_out(steps: Sequence[tuple[list[Load], int]]) -> float:
    """Median error on every fifth step of a model that has seen the others."""
    model = StepTime([1.0] * SIZE)
    for _ in range(1 + 2000 // len(steps)):
        for number, (loads, ns) in enumerate(steps):
            if number % 5:
                model.learn(loads, ns)
    return median(abs(ns / model.expected(loads) - 1) for loads, ns in steps[::5])


def fit(path: Path, *, processor: bool) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [([plain(chunk) for chunk in shape], cpu if processor else wall) for shape, wall, cpu in lines]
    print(f"{len(steps)} steps; median error with all quantities {held_out(steps):.1%}")
    for name in Load._fields[1:]:
        without = [([each._replace(**{name: 0}) for each in loads], ns) for loads, ns in steps]
        print(f"  without {name:9} {held_out(without):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["record", "fit"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--processor", action="store_true", help="fit processor time")
    parser.add_argument("--model", help="GGUF file or folder: to record")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--step-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.action == "fit":
        fit(arguments.file, processor=arguments.processor)
        return
    if not arguments.model:
        parser.error("record needs --model")
    threads = prepare_threads(arguments.threads)
    from engine import models  # noqa: PLC0415 — imports torch, which reads what was just prepared
    from engine.runner import TorchRunner  # noqa: PLC0415 — as above

    model = models.load(arguments.model, device=arguments.device)
    size = 16
    blocks = (max(_SINGLES) + 4) * (arguments.context // size + 1)
    runner = TorchRunner(model, device=str(model.decoder.device), num_blocks=blocks, threads=threads)
    count = record(
        runner,
        arguments.file,
        seconds=arguments.seconds,
        step_tokens=arguments.step_tokens,
        context=arguments.context,
        seed=arguments.seed,
    )
    print(f"{count} steps")


if __name__ == "__main__":
    main()
