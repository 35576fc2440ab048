"""A digest that names a model's exact files, cheap enough for weights of any size.

Small files (configuration, tokenizer, templates) go in whole. Of a weight file go in its size, its head (tensor names,
shapes, places) and 64 KiB at each of 64 evenly spaced places. Other weights of the same shape, another quantisation,
another tokenizer or setting give another digest. It is a name and no seal: someone who edits bytes between the samples
on purpose is not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 * 1024
_HEAD_BYTES: Final = 8 * 1024 * 1024
_DIGITS: Final = 32


def digest(*, small: Mapping[str, str], weights: Sequence[Path]) -> str:
    """``small`` by file name; ``weights`` count in the order given. Where the files lie doesn't matter."""
    total = hashlib.sha256()
    for name, text in sorted(small.items()):
        total.update(f"{name}\0{len(text)}\0{text}".encode())
    for path in weights:
        _add_samples(total, path)
    return total.hexdigest()[:_DIGITS]


def _add_samples(total: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    total.update(f"weights\0{size}\0".encode())
    with path.open("rb") as file:
        total.update(file.read(_HEAD_BYTES))
        for number in range(_SAMPLES):
            file.seek(size * number // _SAMPLES)
            total.update(file.read(_SAMPLE_BYTES))
