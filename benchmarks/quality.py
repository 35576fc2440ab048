"""`make bench-quality`: what weights in fewer bits cost, against float32 weights of the same model.

    python -m benchmarks.quality [--model FILE_OR_FOLDER] [--weights fp16 int8 int4] [--window 512] [--threads N]

The text (benchmarks/quality.txt, written for this) is read in windows, each from its beginning, by all forms of the
model side by side. Per token: the negative log-likelihood, whose mean's exponential is the perplexity, and the
Kullback-Leibler divergence of the distribution from that of float32. The change of perplexity is paired by token; ± is
its standard error.

A model that was quantised before (as most GGUF files are) shows what is lost on top of that, not since its training.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.kernels.arithmetic import Arithmetic
from engine.threads import prepare_threads
from service.home.model import default_gguf

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runner import TorchRunner

_TEXT = Path(__file__).with_name("quality.txt")
_FEWER = [Arithmetic.FP16, Arithmetic.INT8, Arithmetic.INT4]
_BLOCK = 16


class Score:
    """One form of the model over the text. All are per token, in nats."""

    def __init__(self) -> None:
        self._likelihoods: list[Tensor] = []
        self._divergences: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, found: Tensor, exact: Tensor, came: Tensor) -> None:
        """found, exact: logarithms of distributions [tokens, vocabulary]; came: ids [tokens]."""
        self._likelihoods.append(found.gather(1, came.unsqueeze(1)).squeeze(1).double())
        self._divergences.append((exact.exp() * (exact - found)).sum(1))
        self._same.append(found.argmax(1) == exact.argmax(1))

    @property
    def likelihoods(self) -> Tensor:
        import torch  # noqa: PLC0415 — reads what main prepares first

        return torch.cat(self._likelihoods)

    @property
    def perplexity(self) -> float:
        value: float = (-self.likelihoods.mean()).exp().item()
        return value

    def against(self, exact: Score) -> str:
        import torch  # noqa: PLC0415 — as above

        worse = exact.likelihoods - self.likelihoods
        error = worse.std().item() / len(worse) ** 0.5
        divergence, same = torch.cat(self._divergences), torch.cat(self._same)
        return (
            f"perplexity {self.perplexity:8.4f} {worse.mean().exp().item() - 1:+.2%} ± {error:.2%}   "
            f"KL mean {divergence.mean().item():.5f} p99 {divergence.quantile(0.99).item():.4f}   "
            f"same first choice {same.float().mean().item():.1%}"
        )


def measure(runners: dict[Arithmetic, TorchRunner], ids: Sequence[int], window: int) -> dict[Arithmetic, Score]:
    """The first of the runners is what the others are held against."""
    import torch  # noqa: PLC0415 — as above

    scores = {arithmetic: Score() for arithmetic in runners}
    for at in range(0, len(ids) - 1, window):
        came = torch.tensor(ids[at + 1 : at + window + 1])
        exact = None
        for arithmetic, runner in runners.items():
            found = torch.log_softmax(runner.logits(ids[at : at + len(came)]), -1)
            exact = found if exact is None else exact
            scores[arithmetic].add(found, exact, came)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--weights", nargs="*", type=Arithmetic, default=_FEWER)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    threads = prepare_threads(arguments.threads)
    import tokenizers  # noqa: PLC0415 — as above

    from engine import models  # noqa: PLC0415 — imports torch
    from engine.runner import TorchRunner  # noqa: PLC0415 — as above

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pennyweight"
    path = arguments.model or str(default_gguf(cache, print))
    loaded = {each: models.load(path, device="cpu", arithmetic=each) for each in (Arithmetic.FP32, *arguments.weights)}
    blocks = -(-arguments.window // _BLOCK)
    runners = {
        each: TorchRunner(model, device="cpu", num_blocks=blocks, block_size=_BLOCK, threads=threads)
        for each, model in loaded.items()
    }
    tokenizer = tokenizers.Tokenizer.from_str(loaded[Arithmetic.FP32].tokenizer_json)
    ids = tokenizer.encode(_TEXT.read_text()).ids
    scores = measure(runners, ids, arguments.window)
    exact = scores.pop(Arithmetic.FP32)
    print(f"{Path(path).name}: {len(ids) - 1} tokens in windows of {arguments.window}")
    print(f"fp32  perplexity {exact.perplexity:8.4f}")
    for arithmetic, score in scores.items():
        print(f"{arithmetic:4}  {score.against(exact)}")


if __name__ == "__main__":
    main()
