"""`make bench-quality`: what weights in fewer bits cost, against float32 weights of the same model.

    python -m benchmarks.quality [--model FILE_OR_FOLDER] [--weights fp16 int8 int4] [--window 512] [--threads N]

The text (benchmarks/quality.txt, written for this) is read in windows, each from its beginning. Per token: the negative
log-likelihood, whose mean's exponential is the perplexity, and the Kullback-Leibler divergence of the distribution from
that of float32. The change of perplexity is paired by token; ± is its standard error.

A model that was quantised before (as most GGUF files are) shows what is lost on top of that, not since its training.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.kernels.arithmetic import Arithmetic
from engine.threads import prepare_threads
from service.home.model import default_gguf

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = Path(__file__).with_name("quality.txt")
_FEWER = [Arithmetic.FP16, Arithmetic.INT8, Arithmetic.INT4]


@dataclass(frozen=True)
class Reading:
    """One model over the text."""

    likelihoods: Tensor  # float64 [tokens]: log, of each token that came
    distributions: Tensor  # float32 [tokens, vocabulary]: log
    seconds: float


def read(model_path: str, arithmetic: Arithmetic, *, window: int, threads: int) -> Reading:
    import tokenizers  # noqa: PLC0415 — torch reads what main prepares first
    import torch  # noqa: PLC0415 — as above

    from engine import models  # noqa: PLC0415 — as above
    from engine.runner import TorchRunner  # noqa: PLC0415 — as above

    model = models.load(model_path, device="cpu", arithmetic=arithmetic)
    ids = tokenizers.Tokenizer.from_str(model.tokenizer_json).encode(_TEXT.read_text()).ids
    runner = TorchRunner(model, device="cpu", num_blocks=-(-window // 16), block_size=16, threads=threads)
    started = time.perf_counter()
    logs = [
        torch.log_softmax(runner.logits(ids[at : at + window]), -1)[: len(ids) - 1 - at]
        for at in range(0, len(ids) - 1, window)
    ]
    seconds = time.perf_counter() - started
    distributions = torch.cat(logs)
    came = torch.tensor(ids[1:]).unsqueeze(1)
    return Reading(distributions.gather(1, came).squeeze(1).double(), distributions, seconds)


def compare(found: Reading, exact: Reading) -> str:
    worse = exact.likelihoods - found.likelihoods
    change = worse.mean().exp().item() - 1
    error = worse.std().item() / len(worse) ** 0.5
    divergence = (exact.distributions.exp() * (exact.distributions - found.distributions)).sum(1)
    same = (found.distributions.argmax(1) == exact.distributions.argmax(1)).float().mean().item()
    return (
        f"perplexity {perplexity(found):8.4f} {change:+.2%} ± {error:.2%}   KL mean {divergence.mean().item():.5f} "
        f"p99 {divergence.quantile(0.99).item():.4f}   same first choice {same:.1%}"
    )


def perplexity(reading: Reading) -> float:
    value: float = (-reading.likelihoods.mean()).exp().item()
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--weights", nargs="*", type=Arithmetic, default=_FEWER)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    threads = prepare_threads(arguments.threads)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pennyweight"
    model = arguments.model or str(default_gguf(cache, print))
    exact = read(model, Arithmetic.FP32, window=arguments.window, threads=threads)
    print(f"{Path(model).name}: {len(exact.likelihoods)} tokens in windows of {arguments.window}")
    print(f"fp32  perplexity {perplexity(exact):8.4f}")
    for arithmetic in arguments.weights:
        found = read(model, arithmetic, window=arguments.window, threads=threads)
        print(f"{arithmetic:4}  {compare(found, exact)}", flush=True)


if __name__ == "__main__":
    main()
