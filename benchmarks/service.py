"""The workload through the running service: closed loop (W1), Poisson arrivals (W2) and one stream at a time (W3).

    python -m benchmarks.service [--home FOLDER] [--concurrency 16 32] [--rate 0.5]

Needs a running system, started with PENNYWEIGHT_PREFIX_CACHE=0, for its prompts come more than once. Prints output
tokens/s and total tokens/s, TTFT and inter-token latency;
`make bench` runs it beside the engine alone and this machine's limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.workload import Request, Workload, generate


@dataclass
class Answer:
    started: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: float = 0.0


@dataclass(frozen=True)
class Target:
    api: str
    key: str
    model: str

    @classmethod
    def of_home(cls, home: Path) -> Target:
        written = json.loads((home / "bootstrap.json").read_bytes())
        return cls(written["api_url"], written["api_key"], written["model"])


async def ask(client: httpx.AsyncClient, target: Target, request: Request) -> Answer:
    body = {
        "model": target.model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(time.perf_counter())
    async with client.stream("POST", f"{target.api}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                answer.arrivals.append(time.perf_counter())
            if usage := chunk.get("usage"):
                answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.ended = time.perf_counter()
    return answer


async def closed_loop(client: httpx.AsyncClient, target: Target, work: Workload, concurrency: int) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Answer:
        async with gate:
            return await ask(client, target, request)

    started = time.perf_counter()
    answers = await asyncio.gather(*(one(request) for request in work.requests))
    took = time.perf_counter() - started
    output = sum(answer.completion_tokens for answer in answers)
    total = output + sum(answer.prompt_tokens for answer in answers)
    print(f"W1 concurrency {concurrency:3}: {output / took:7.1f} output tok/s  {total / took:7.1f} total tok/s")


async def poisson(client: httpx.AsyncClient, target: Target, work: Workload, rate: float) -> None:
    started = time.perf_counter()
    tasks, at = [], 0.0
    for request, gap in zip(work.requests, work.unit_gaps, strict=True):
        at += gap / rate
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(client, target, request)))
    answers = await asyncio.gather(*tasks)
    ttft = [answer.arrivals[0] - answer.started for answer in answers]
    gaps = [b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    print(f"W2 {rate:.2f} requests/s: TTFT {spread(ttft)} ms  ITL {spread(gaps)} ms (p50/p95)")


def spread(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.0f}/{quantiles(seconds, n=20)[18] * 1e3:.0f}"


async def single(client: httpx.AsyncClient, target: Target, work: Workload, repeats: int = 3) -> None:
    answers = [await ask(client, target, work.single) for _ in range(repeats)]
    rates = [(len(a.arrivals) - 1) / (a.arrivals[-1] - a.arrivals[0]) for a in answers]
    ttft = [a.arrivals[0] - a.started for a in answers]
    print(f"W3 one stream: {median(rates):.1f} decode tok/s  TTFT {median(ttft) * 1e3:.0f} ms")


async def run(target: Target, concurrencies: list[int], rate: float | None) -> None:
    work = generate()
    headers = {"Authorization": f"Bearer {target.key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=600, limits=limits) as client:
        await ask(client, target, work.single)
        for concurrency in concurrencies:
            await closed_loop(client, target, work, concurrency)
        if rate:
            await poisson(client, target, work, rate)
        await single(client, target, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path(".pennyweight"))
    parser.add_argument("--concurrency", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--rate", type=float, help="also run Poisson arrivals at this rate")
    arguments = parser.parse_args()
    asyncio.run(run(Target.of_home(arguments.home), arguments.concurrency, arguments.rate))


if __name__ == "__main__":
    main()
