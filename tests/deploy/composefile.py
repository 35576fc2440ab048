"""What Docker Compose makes of compose.yaml, as far as the tests need it: variables, conditions, command lines."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_NAME = re.compile(r"\$\{(\w+)(:?[-?])?")


class UnsetVariableError(Exception):
    """A required variable has no value; the message is the file's own."""


def load(path: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The file with its anchors merged and its variables filled in. Raises UnsetVariableError."""
    return _filled(yaml.safe_load(path.read_text()), environment)


def _filled(node: Any, environment: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, environment) for key, value in node.items() if not key.startswith("x-")}
    if isinstance(node, list):
        return [_filled(value, environment) for value in node]
    return interpolate(node, environment) if isinstance(node, str) else node


def interpolate(text: str, environment: dict[str, str]) -> str:
    """``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}``, nested in each other; ``$$`` is a dollar."""
    found = _NAME.search(text)
    if found is None:
        return text.replace("$$", "$")
    end = _closing_brace(text, found.end())
    name, operator, operand = found[1], found[2], text[found.end() : end]
    value = environment.get(name)
    missing = value is None or (value == "" and (operator or "").startswith(":"))
    if missing and operator in {"?", ":?"}:
        raise UnsetVariableError(f"{name}: {operand}")
    if missing:
        value = interpolate(operand, environment) if operator else ""
    return interpolate(text[: found.start()], environment) + str(value) + interpolate(text[end + 1 :], environment)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise AssertionError(f"no closing brace in {text}")


@dataclass(frozen=True)
class Service:
    name: str
    spec: dict[str, Any]

    @property
    def needs(self) -> dict[str, str]:
        """Service -> condition."""
        return {name: how["condition"] for name, how in self.spec.get("depends_on", {}).items()}

    @property
    def ends(self) -> bool:
        """A one-shot service: no restart policy."""
        return "restart" not in self.spec

    @property
    def ours(self) -> bool:
        return "build" in self.spec


def in_order(services: dict[str, Any]) -> list[Service]:
    """Every service after what it needs; a circle is an error."""
    left = {name: Service(name, spec) for name, spec in services.items()}
    ordered: list[Service] = []
    while left:
        started = {service.name for service in ordered}
        ready = [service for service in left.values() if set(service.needs) <= started]
        assert ready, f"these wait for each other: {sorted(left)}"
        ordered += ready
        for service in ready:
            del left[service.name]
    return ordered
