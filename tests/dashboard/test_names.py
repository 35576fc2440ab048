"""Streamlit puts the folder of its script first on ``sys.path`` while a page runs."""

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

import dashboard

FOLDER = Path(dashboard.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))


@pytest.mark.parametrize("name", MODULES)
def test_no_module_of_the_dashboard_has_the_name_of_another_package(name: str):
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    assert name not in sys.stdlib_module_names
    assert importlib.machinery.PathFinder.find_spec(name, elsewhere) is None


def test_a_page_gets_the_real_engine_and_requests():
    first = f"import sys; sys.path.insert(0, {str(FOLDER)!r})"
    script = f"{first}; import engine, requests; print(engine.__file__, requests.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    engine, requests = map(Path, done.stdout.split())
    assert engine.parent == FOLDER.parent / "engine"
    assert "site-packages" in requests.parts
