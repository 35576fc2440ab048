"""Lists that people read are true: stages of packages, settings, make targets."""

import ast
import os
import re
import tomllib

import pytest

from dashboard.settings import Settings as DashboardSettings
from engine.config import WorkerConfig
from service.settings import Settings
from tests.architecture.source import PACKAGES, ROOT, folders, modules, name

STAGE = re.compile(r"^\s*(\w+)\s+— \S", re.MULTILINE)
SETTING = re.compile(r"\bPENNYWEIGHT_[A-Z][A-Z0-9_]*\b")


class Asked(dict):
    """An environment that remembers which variables were looked for."""

    def __init__(self, **given):
        super().__init__(given)
        self.names = set()

    def get(self, key, default=None):
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.names.add(key)
        return super().__getitem__(key)


def settings_in_use():
    """Those that the readers look for, and those that stand in the code or a compose file by their full name."""
    urls = {"PENNYWEIGHT_DATABASE_URL": "postgresql://h/d", "PENNYWEIGHT_REDIS_URL": "redis://h"}
    asked = Asked(**urls, PENNYWEIGHT_MODEL="m", PENNYWEIGHT_API_URL="http://h")
    for reader in (Settings, WorkerConfig, DashboardSettings):
        reader.from_environment(asked)
    texts = [path.read_text() for path in modules(*PACKAGES)]
    texts += [path.read_text() for path in (ROOT / "compose.yaml", *ROOT.glob("deploy/compose*.yaml"))]
    return {n for n in asked.names if SETTING.fullmatch(n)} | {n for text in texts for n in SETTING.findall(text)}


@pytest.mark.parametrize("folder", folders(), ids=name)
def test_the_docstring_of_a_package_names_each_of_its_files_and_no_other(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert set(STAGE.findall(docstring)) == files | packages


def test_every_setting_has_a_row_and_every_row_a_setting():
    rows = re.findall(r"^\| `(PENNYWEIGHT_\w+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(settings_in_use())


def test_every_make_target_says_what_it_does():
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    assert targets == set(phony.split())
    assert set(re.findall(r"^([a-z][a-z-]*):.* ## \S", text, re.MULTILINE)) == targets


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {re.sub(r"[-_.]+", "-", pin).lower() for pin in pins}
    named = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower() for requirement in wanted}
    assert named - pinned == set()


def test_the_local_checks_are_those_of_the_pipeline():
    assert "make check" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
