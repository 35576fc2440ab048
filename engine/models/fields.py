"""Typed look-ups in metadata that strangers wrote: config.json, the key-value part of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from engine.models.errors import ModelError

# No size of a real model comes near; a product of three of them stays far from what a Python int can't print.
_LARGEST: Final = 2**31 - 1


class Fields:
    """A mapping whose values are checked as they are read. Every complaint names the key and the file."""

    def __init__(self, values: Mapping[str, object], *, where: str) -> None:
        self._values = values
        self._where = where

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number", value)
        if not least <= value <= most:
            raise ModelError(f"{self._where}: {key} is {_short(value)}, outside {least}..{most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        if not 0 < value < math.inf:  # also refuses NaN
            raise ModelError(f"{self._where}: {key} is {_short(value)}, not a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> Sequence[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def reals(self, key: str) -> Sequence[float]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, float) and math.isfinite(item) for item in value):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def integers(self, key: str) -> Sequence[int]:
        """A list of whole numbers; a single one counts as a list of one."""
        value = self._get(key, None)
        items: list[object] = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(numbers) != len(items):
            raise self._wrong(key, "a list of whole numbers", value)
        return numbers

    def flags(self, key: str) -> Sequence[bool]:
        """A list of yes and no, also written as 1 and 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int) and item in (0, 1) for item in value):
            raise self._wrong(key, "a list of true and false", value)
        return [bool(item) for item in value]

    def over(self, defaults: Mapping[str, object]) -> Fields:
        """The same, with ``defaults`` for keys that are not there; one that is there and null stays null."""
        return Fields({**defaults, **self._values}, where=self._where)

    def under(self, prefix: str) -> Fields:
        """The keys that begin with ``prefix``, without it."""
        values = {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}
        return Fields(values, where=f"{self._where} {prefix}*")

    def within(self, key: str) -> Fields:
        """The mapping under ``key``; an empty one where there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "a mapping", value)
        return Fields(value, where=f"{self._where}: {key}")

    def items(self) -> Iterator[tuple[str, object]]:
        yield from self._values.items()

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._where} lacks {key}")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self._where}: {key} should be {wanted}, not {_short(value)}")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, int | float | str | bool) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
