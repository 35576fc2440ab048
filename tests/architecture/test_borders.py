"""Who may import whom. `make check` holds the same between whole packages with import-linter."""

import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, imports, modules, name

# What each package may import of ours besides itself; "engine" is its torch-free face.
MAY = {"billing": set(), "engine": set(), "service": {"billing", "engine"}, "dashboard": {"billing"}}
FACE = {"protocol", "keys", "names", "spool", "logs", "simulate"}

IMPORT_ALL = """
import importlib, pkgutil, sys
import service
for module in pkgutil.walk_packages(service.__path__, "service."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running the code."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package):
    wrong = [
        f"{name(path)} imports {imported}"
        for path in modules(package)
        for imported in imports(path)
        if (top := imported.split(".")[0]) in PACKAGES and top != package and top not in MAY[package]
    ]
    assert wrong == []


def test_the_engine_is_imported_by_its_face_alone():
    wrong = [
        f"{name(path)} imports {imported}"
        for path in modules("service")
        for imported in imports(path)
        if imported.split(".")[0] == "engine" and imported.split(".")[1] not in FACE
    ]
    assert wrong == []


def test_tests_are_imported_by_nobody():
    assert [name(path) for path in modules(*PACKAGES) if any(i.split(".")[0] == "tests" for i in imports(path))] == []


def test_importing_all_of_service_needs_no_torch_and_no_streamlit():
    assert loaded_by(IMPORT_ALL) & {"torch", "streamlit", "transformers"} == set()


def test_help_is_quick_because_it_imports_no_framework():
    code = (
        "import sys, click.testing; from service.cli import main\n"
        "assert click.testing.CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    assert loaded_by(code) & {"litestar", "sqlalchemy", "celery", "redis", "psycopg"} == set()
