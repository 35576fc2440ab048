"""The engine alone, in this process: the workload through `Engine.step`, beside the limits of this machine.

    python -m benchmarks.engine --model FILE_OR_FOLDER [--weights fp32 int8] [--batch 16 32] [--threads N]

W1: all requests at once, at most --batch of them running. W3: one request alone. Greedy, end of sequence ignored. Also
prints where the time went: in steps, outside of them, and what deciding a step cost.

This process has the machine to itself, so its threads spin while they wait; --shared makes them wait as a worker's do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from uuid import UUID

from benchmarks.workload import Request, Workload, generate, read
from engine.config import EngineConfig
from engine.core import Engine
from engine.kernels.arithmetic import Arithmetic
from engine.meter import Identity, Meter, unaccounted_ns
from engine.plan import Runner
from engine.protocol import Interval, Job, Origin, Sampling
from engine.threads import prepare_threads
from engine.timeline import Span, Timeline


@dataclass(frozen=True)
class Run:
    seconds: float
    interval: Interval
    token_times: list[list[float]]  # per request, seconds since the start
    scheduling_s: float


def run(runner: Runner, config: EngineConfig, requests: tuple[Request, ...]) -> Run:
    """All requests at once, until the last has ended."""
    identity = Identity(worker="bench", device="bench", device_kind="bench", deployment="bench")
    engine = Engine(runner, Meter(identity, Timeline(Span.OVERHEAD), fixed_rows=config.fixed_rows), config)
    times: dict[UUID, list[float]] = {}
    scheduling = _timed(engine.scheduler, "schedule")
    started = time.perf_counter()
    for number, request in enumerate(requests):
        times[UUID(int=number)] = []
        engine.add(_job(number, request))
    while engine.has_work:
        for event in (event for events in engine.step().events.values() for event in events):
            times[event.request_id] += [time.perf_counter() - started] * len(event.ids)
    seconds = time.perf_counter() - started
    engine.check_integrity()
    return Run(seconds, engine.meter.cut(last=True), list(times.values()), scheduling[0])


def _timed(owner: object, name: str) -> list[float]:
    """Add up the seconds spent in a method."""
    inner, total = getattr(owner, name), [0.0]

    def outer(*arguments: object) -> object:
        started = time.perf_counter()
        try:
            return inner(*arguments)
        finally:
            total[0] += time.perf_counter() - started

    setattr(owner, name, outer)
    return total


def _job(number: int, request: Request) -> Job:
    nobody = UUID(int=0)
    return Job(
        request_id=UUID(int=number),
        attempt=1,
        origin=Origin(
            tenant_id=nobody,
            api_key_id=nobody,
            model="bench",
            deployment="bench",
            revision="",
            endpoint="/v1/completions",
            stream=False,
            boot_id="bench",
            created_at=0.0,
            deadline=time.time() + 86_400,
        ),
        prompt=list(request.prompt),
        sampling=Sampling(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True),
    )


def report_batch(runner: Runner, config: EngineConfig, work: Workload, repeats: int) -> None:
    runs = [run(runner, config, work.requests) for _ in range(repeats)]
    best = sorted(runs, key=lambda each: each.seconds)[len(runs) // 2]
    total = work.prompt_tokens + work.output_tokens
    gaps = [b - a for times in best.token_times for a, b in itertools.pairwise(times)]
    print(
        f"W1 batch {config.max_batch:3}: {work.output_tokens / best.seconds:7.1f} output tok/s "
        f"{total / best.seconds:7.1f} total tok/s   ITL p50/p95/max {_spread(gaps)} ms   {_where(best)}"
    )


def report_single(runner: Runner, config: EngineConfig, work: Workload, repeats: int) -> None:
    runs = [run(runner, config, (work.single,)) for _ in range(repeats)]
    times = [each.token_times[0] for each in runs]
    rate = median((len(each) - 1) / (each[-1] - each[0]) for each in times)
    print(f"W3 one request: {rate:.1f} decode tok/s   TTFT {median(each[0] for each in times) * 1e3:.0f} ms")


def _spread(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    points = (ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100], ordered[-1])
    return "/".join(f"{seconds * 1e3:.0f}" for seconds in points)


def _where(result: Run) -> str:
    interval = result.interval
    wall = interval.end_ns - interval.start_ns
    return (
        f"{interval.steps} steps, {interval.busy_ns / wall:.2%} in them, "
        f"deciding {result.scheduling_s * 1e6 / interval.steps:.0f} µs a step, "
        f"unaccounted {unaccounted_ns(interval) / wall:.5%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", type=Arithmetic, nargs="*", default=[Arithmetic.AUTO])
    parser.add_argument("--batch", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--step-tokens", type=int, default=EngineConfig().step_tokens)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--shared", action="store_true", help="threads wait as those of a worker do")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workload", type=Path, help="a file as benchmarks.workload writes it")
    arguments = parser.parse_args()
    if not arguments.shared:
        os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    threads = prepare_threads(arguments.threads)
    from benchmarks import roofline  # noqa: PLC0415 — imports torch, which reads what was just prepared
    from engine import models  # noqa: PLC0415 — as above
    from engine.runner import TorchRunner  # noqa: PLC0415 — as above

    work = read(arguments.workload) if arguments.workload else generate()
    config = EngineConfig(step_tokens=arguments.step_tokens, max_batch=16)
    for arithmetic in arguments.weights:
        print(f"weights {arithmetic}")
        model = models.load(arguments.model, device=arguments.device, arithmetic=arithmetic)
        runner = TorchRunner(model, device=str(model.decoder.device), kv_memory_bytes=1 << 30, threads=threads)
        run(runner, config, work.requests[:4])  # first steps of a process are slow
        for batch in arguments.batch:
            report_batch(runner, replace(config, max_batch=batch), work, arguments.repeats)
        report_single(runner, config, work, 3 * arguments.repeats)
    roofline.main()


if __name__ == "__main__":
    main()
