"""The two limits of a machine that decide an engine's speed: arithmetic and memory, measured through torch.

    python -m benchmarks.roofline [--threads N]

A step of ``n`` rows reads every weight once and multiplies it ``n`` times: below the rows where the two times are equal
memory sets the pace, above them arithmetic does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

_SQUARE = 2048
_COPIED = 1 << 28  # bytes, far beyond any cache


def matrix_product(size: int = _SQUARE) -> float:
    """Float32 operations per second of a square product; a multiply-add is two."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _seconds(lambda: left @ right)


def memory_read() -> float:
    """Bytes per second of summing an array that no cache holds."""
    array = torch.ones(_COPIED // 4)
    return _COPIED / _seconds(array.sum)


def linear(rows: int, *, inputs: int = 576, outputs: int = 1536) -> float:
    """Float32 operations per second of one of SmolLM2's linears over ``rows`` rows."""
    weight, given = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    return 2 * rows * inputs * outputs / _seconds(lambda: torch.nn.functional.linear(given, weight), repeats=200)


def _seconds(action: Callable[[], object], repeats: int = 9) -> float:
    action()
    spans = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        spans.append(time.perf_counter() - started)
    return median(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    arguments, _ = parser.parse_known_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        print(
            f"limits, {torch.get_num_threads()} threads: matrix product {matrix_product() / 1e9:.0f} Gflop/s, "
            f"memory read {memory_read() / 1e9:.1f} GB/s, linear 576 to 1536 at 1/16/32/256 rows "
            + "/".join(f"{linear(rows) / 1e9:.0f}" for rows in (1, 16, 32, 256))
            + " Gflop/s"
        )


if __name__ == "__main__":
    main()
