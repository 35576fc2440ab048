"""The workload that the benchmarks share: 64 requests of mixed lengths, one of a fixed length, and arrival gaps.

    python -m benchmarks.workload FILE.json [--seed 0]     write it, for drivers of other servers

Lengths are spread evenly over a range and shuffled, so that the totals are the same for every seed: prompts of 32 to
238 tokens, outputs of 16 to 119. Prompts are random token ids: what a step costs doesn't depend on what they say.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

_REQUESTS = 64
_PROMPT = (32, 238)  # tokens, both ends included
_OUTPUT = (16, 119)
_SINGLE_PROMPT, _SINGLE_OUTPUT = 64, 128
_IDS = range(300, 30_000)  # ordinary words in the vocabulary of every model of interest


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]  # token ids
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    requests: tuple[Request, ...]  # W1: all at once; W2: with unit_gaps / rate seconds between them
    unit_gaps: tuple[float, ...]  # exponential, mean 1
    single: Request  # W3

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def generate(seed: int = 0) -> Workload:
    noise = random.Random(seed)
    prompts, outputs = _spread(*_PROMPT, noise), _spread(*_OUTPUT, noise)
    return Workload(
        requests=tuple(Request(_ids(length, noise), tokens) for length, tokens in zip(prompts, outputs, strict=True)),
        unit_gaps=tuple(noise.expovariate(1.0) for _ in range(_REQUESTS)),
        single=Request(_ids(_SINGLE_PROMPT, noise), _SINGLE_OUTPUT),
    )


def read(path: Path) -> Workload:
    """A file as ``write`` makes it."""
    data = json.loads(path.read_bytes())
    return Workload(
        requests=tuple(_request(each) for each in data["requests"]),
        unit_gaps=tuple(data["unit_exp_gaps"]),
        single=_request(data["w3"]),
    )


def write(workload: Workload, path: Path) -> None:
    requests = [{"id": n, **_json(request)} for n, request in enumerate(workload.requests)]
    data = {"requests": requests, "w3": _json(workload.single), "unit_exp_gaps": workload.unit_gaps}
    path.write_text(json.dumps(data))


def _spread(low: int, high: int, noise: random.Random) -> list[int]:
    lengths = [round(low + (high - low) * n / (_REQUESTS - 1)) for n in range(_REQUESTS)]
    noise.shuffle(lengths)
    return lengths


def _ids(length: int, noise: random.Random) -> tuple[int, ...]:
    return tuple(noise.choices(_IDS, k=length))


def _request(data: dict[str, object]) -> Request:
    prompt, max_tokens = data["prompt_token_ids"], data["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(max_tokens, int)
    return Request(tuple(prompt), max_tokens)


def _json(request: Request) -> dict[str, object]:
    return {"prompt_token_ids": request.prompt, "n_prompt": len(request.prompt), "max_tokens": request.max_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = generate(arguments.seed)
    write(workload, arguments.file)
    print(f"{len(workload.requests)} requests: {workload.prompt_tokens} prompt, {workload.output_tokens} output tokens")


if __name__ == "__main__":
    main()
