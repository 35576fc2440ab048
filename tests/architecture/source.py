"""The source tree as the tests of this folder look at it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("billing", "dashboard", "engine", "service")


def modules(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def folders() -> list[Path]:
    """Every folder of ours that is a package."""
    return sorted({path.parent for path in modules(*PACKAGES) if (path.parent / "__init__.py").exists()})


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it: ``from a import b`` counts as ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
