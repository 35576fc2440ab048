"""`make bench-attribution`: is what the meter says of a request what the request really cost?

    python -m benchmarks.attribution [--model FILE_OR_FOLDER] [--repeats 5] [--pairs 10] [--quick]

Sets of four requests run on the real engine with real weights: each set as a whole, and each of its subsets. From the
device times of all subsets follows the true cost of each request, its Shapley value in the game that was measured: the
mean over all orders of what it adds to those before it. The meter knows nothing of the subsets; it shares out the steps
of the whole set. Beside its error stand

    noise       the true value of one repeat against that of the others: nobody can be expected to be closer
    by tokens   the time of the whole set, in proportion to prompt and completion tokens
    by wall     likewise to how long each request was there

Each repeat runs all subsets of all sets in a new order, and is held against the medians of the others. Prompts are new
random tokens each time. A tenant-hour: a tenant who always sends one certain request of each set, in an hour in which
each set comes equally often; over all such tenants. Last the meter's own cost (benchmarks.metering).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from uuid import UUID

from benchmarks.workload import Request, generate
from engine.config import EngineConfig
from engine.core import Engine
from engine.meter import Identity, Meter
from engine.plan import Runner
from engine.protocol import AttemptReport, Job, Origin, Outcome, Sampling
from engine.threads import prepare_threads
from engine.timeline import Clock, Span, Timeline

Lengths = tuple[int, int]  # prompt, completion
Sets = dict[str, tuple[Lengths, ...]]
Who = frozenset[int]  # numbers of requests in a set

_ALL: Who = frozenset(range(4))
# Of costs within a factor of some five: the noise of the dearest would drown the true value of a very cheap one.
SETS: Sets = {
    "prefill-heavy": ((256, 2), (192, 2), (128, 2), (64, 2)),
    "decode-heavy": ((32, 40), (24, 32), (16, 24), (8, 16)),
    "long context": ((600, 8), (400, 14), (250, 20), (120, 26)),
    "mixed": ((300, 4), (120, 12), (48, 24), (16, 32)),
}
_IDS = range(300, 30_000)  # ordinary words in the vocabulary of every model of interest


@dataclass(frozen=True, slots=True)
class Run:
    device_ns: int  # of all its steps
    reports: Sequence[AttemptReport]  # in the order of the requests


@dataclass(frozen=True, slots=True)
class Repeat:
    """One set with all its subsets, once."""

    worth: dict[Who, float]  # nanoseconds
    split: dict[str, list[float]]  # by who says so: nanoseconds of each request in the run of all


def job(request: Request) -> Job:
    nobody = UUID(int=0)
    return Job(
        request_id=UUID(int=random.getrandbits(128)),
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


def engine_of(
    runner: Runner, config: EngineConfig, meter: type[Meter] = Meter, clock: Clock = time.monotonic_ns
) -> Engine:
    identity = Identity(worker="bench", device="bench", device_kind="bench", deployment="bench")
    return Engine(runner, meter(identity, Timeline(Span.OVERHEAD, clock), fixed_rows=config.fixed_rows), config)


def fresh(lengths: Lengths) -> Request:
    prompt, tokens = lengths
    return Request(tuple(random.choices(_IDS, k=prompt)), tokens)


def run(engine: Engine, requests: Sequence[Request]) -> Run:
    """All at once, until the last has ended."""
    jobs = [job(request) for request in requests]
    for each in jobs:
        engine.add(each)
    device_ns, reports = 0, {}
    while engine.has_work:
        output = engine.step()
        device_ns += output.result.device_ns if output.result else 0
        reports |= {ended.report.request_id: ended.report for ended in output.ended}
    assert all(report.outcome is Outcome.COMPLETED for report in reports.values()), "every request runs to its end"
    return Run(device_ns, [reports[each.request_id] for each in jobs])


def subsets() -> Iterator[Who]:
    return (frozenset(who) for size in range(1, 5) for who in itertools.combinations(sorted(_ALL), size))


def shapley(worth: dict[Who, float]) -> list[float]:
    """True values: over all orders of four, what each adds to those before it."""
    values = [0.0] * len(_ALL)
    for order in itertools.permutations(sorted(_ALL)):
        before: Who = frozenset()
        for who in order:
            values[who] += (worth[before | {who}] - worth.get(before, 0.0)) / math.factorial(len(_ALL))
            before |= {who}
    return values


def splits(whole: Run) -> dict[str, list[float]]:
    reports = whole.reports
    return {
        "meter": [float(report.used_ns + sum(report.wasted_ns.values())) for report in reports],
        "by tokens": _in_proportion(whole, [report.prompt_tokens + report.generated_tokens for report in reports]),
        "by wall": _in_proportion(whole, [report.prefill_ns + report.decode_ns for report in reports]),
    }


def _in_proportion(whole: Run, weights: Sequence[int]) -> list[float]:
    return [whole.device_ns * weight / sum(weights) for weight in weights]


def shorter(sets: Sets) -> Sets:
    return {name: tuple((prompt // 4, max(tokens // 4, 2)) for prompt, tokens in each) for name, each in sets.items()}


def one_repeat(engine: Engine, sets: Sets) -> dict[str, Repeat]:
    """All subsets of all sets, in a random order."""
    todo = [(name, who) for name in sets for who in subsets()]
    random.shuffle(todo)
    done = {name: Repeat({}, {}) for name in sets}
    for name, who in todo:
        result = run(engine, [fresh(sets[name][number]) for number in sorted(who)])
        done[name].worth[who] = result.device_ns
        if who == _ALL:
            done[name].split.update(splits(result))
    return done


def medians(repeats: Sequence[Repeat]) -> dict[Who, float]:
    return {who: median(repeat.worth[who] for repeat in repeats) for who in subsets()}


def errors(repeats: Sequence[Repeat], says: Callable[[Repeat], Sequence[float]]) -> list[float]:
    """Of each request in each repeat, against the true value in the others."""
    found = []
    for number, repeat in enumerate(repeats):
        true = shapley(medians([*repeats[:number], *repeats[number + 1 :]]))
        found += [abs(said / truth - 1) for said, truth in zip(says(repeat), true, strict=True)]
    return found


def tenant_hours(by_set: dict[str, list[Repeat]], who_says: str) -> list[float]:
    """Errors of the totals of all tenants who send one request of each set."""
    pairs = [list(zip(_said(repeats, who_says), shapley(medians(repeats)), strict=True)) for repeats in by_set.values()]
    return [
        abs(sum(said for said, _ in sent) / sum(true for _, true in sent) - 1) for sent in itertools.product(*pairs)
    ]


def _said(repeats: Sequence[Repeat], who_says: str) -> list[float]:
    return [median(column) for column in zip(*(repeat.split[who_says] for repeat in repeats), strict=True)]


SAYS: dict[str, Callable[[Repeat], Sequence[float]]] = {
    "noise": lambda repeat: shapley(repeat.worth),
    "meter": lambda repeat: repeat.split["meter"],
    "by tokens": lambda repeat: repeat.split["by tokens"],
    "by wall": lambda repeat: repeat.split["by wall"],
}


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{median(ordered):7.1%} {ordered[math.ceil(len(ordered) * 0.95) - 1]:7.1%}"


def report(by_set: dict[str, list[Repeat]]) -> None:
    print("\nError of a request's cost, median and 95th percentile")
    print(f"{'':15}" + "".join(f"{name:>17}" for name in SAYS))
    columns: dict[str, list[float]] = {name: [] for name in SAYS}
    for kind, repeats in by_set.items():
        row = {name: errors(repeats, says) for name, says in SAYS.items()}
        print(f"{kind:15}" + "".join(f"  {spread(row[name])}" for name in SAYS))
        for name, found in row.items():
            columns[name] += found
    print(f"{'all':15}" + "".join(f"  {spread(columns[name])}" for name in SAYS))
    hours = {name: tenant_hours(by_set, name) for name in SAYS if name != "noise"}
    print(f"{'a tenant-hour':15}{'':17}" + "".join(f"  {spread(found)}" for found in hours.values()))
    better = min(median(columns["by tokens"]), median(columns["by wall"]))
    print(f"The meter's median error is {median(columns['meter']) / better:.2f} of the better baseline's.")


def report_requests(by_set: dict[str, list[Repeat]], sets: Sets) -> None:
    print("\nEach request: true milliseconds, and what they say of it (medians of the repeats)")
    for kind, repeats in by_set.items():
        true = shapley(medians(repeats))
        said = {name: _said(repeats, name) for name in SAYS if name != "noise"}
        for number, (prompt, tokens) in enumerate(sets[kind]):
            others = "".join(f"  {name} {said[name][number] / true[number] - 1:+7.1%}" for name in said)
            print(f"{kind:15}{prompt:5} + {tokens:2} tokens {true[number] / 1e6:8.0f} ms{others}")


def report_model(engine: Engine) -> None:
    model = engine.meter.step_time
    assert model is not None
    print(
        f"\nStep-time model: R² {model.quality.r2:.3f}, error {model.quality.error:.1%}, pace {model.pace:.2f}, "
        f"{model.stalls} stalls of {model.stall_ns / 1e9:.2f} s in all"
    )
    print("  coefficients, µs: " + " ".join(f"{value / 1e3:.3g}" for value in model.coefficients))


def measure(engine: Engine, sets: Sets, *, repeats: int) -> dict[str, list[Repeat]]:
    by_set: dict[str, list[Repeat]] = {name: [] for name in sets}
    started = time.monotonic()
    for number in range(repeats):
        for name, repeat in one_repeat(engine, sets).items():
            by_set[name].append(repeat)
        print(f"repeat {number + 1} of {repeats}: {time.monotonic() - started:.0f} s", flush=True)
    return by_set


def default_model() -> Path:
    from service.home.model import default_gguf  # noqa: PLC0415 — only where no model is named

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pennyweight"
    return default_gguf(cache, print)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file or folder; the default model without it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="at least 2")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--shared", action="store_true", help="threads wait as those of a worker do")
    parser.add_argument("--quick", action="store_true", help="a quarter of the lengths, 2 repeats, 3 pairs: to try")
    arguments = parser.parse_args()
    if not arguments.shared:
        os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    threads = prepare_threads(arguments.threads)
    from benchmarks import metering  # noqa: PLC0415 — imports what may import torch
    from engine import models  # noqa: PLC0415 — imports torch, which reads what was just prepared
    from engine.runner import TorchRunner  # noqa: PLC0415 — as above

    model = models.load(str(arguments.model or default_model()), device=arguments.device)
    runner = TorchRunner(model, device=str(model.decoder.device), kv_memory_bytes=1 << 29, threads=threads)
    engine = engine_of(runner, EngineConfig(max_batch=8))
    started = time.monotonic()
    run(engine, generate().requests[: 4 if arguments.quick else 12])
    print(f"The meter has seen a workload of another kind for {time.monotonic() - started:.0f} s", flush=True)
    sets = shorter(SETS) if arguments.quick else SETS
    by_set = measure(engine, sets, repeats=2 if arguments.quick else arguments.repeats)
    report(by_set)
    report_requests(by_set, sets)
    report_model(engine)
    metering.report(runner, pairs=3 if arguments.quick else arguments.pairs)


if __name__ == "__main__":
    random.seed(0)
    main()
