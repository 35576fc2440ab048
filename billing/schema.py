"""Bring a database to the newest tables, from code and from wherever the package is installed."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

import billing


def upgrade(url: str, revision: str = "head") -> None:
    """Run the missing migrations; two processes at once are safe, two threads are not.

    Raises ``alembic.util.CommandError`` for a database that is newer than this code, and
    ``sqlalchemy.exc.OperationalError`` for one that does not answer.
    """
    command.upgrade(alembic_config(url), revision)


def alembic_config(url: str) -> Config:
    """``migrations`` stands beside ``billing``, in the repository as in an installation."""
    config = Config()
    config.set_main_option("script_location", str(Path(billing.__file__).parents[1] / "migrations").replace("%", "%%"))
    config.attributes["url"] = url
    return config
