"""Print what the named extras of pyproject.toml require, one a line: `python requirements.py service dashboard`.

The Dockerfile installs the requirements in a layer of their own, before the code is copied.
"""  # noqa: INP001 - a script, run by its path before anything is installed

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name])]
sys.stdout.write("\n".join(wanted) + "\n")
