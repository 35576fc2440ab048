"""Alembic's entry: which database, under which lock, and what a comparison with the tables leaves out.

The URL comes from whoever runs Alembic in code (``config.attributes["url"]``), from ``-x url=…``, or from the settings.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import text
from sqlalchemy.sql.schema import SchemaItem

from billing.database import Turn, open_database
from billing.partitions import is_partition
from billing.tables import metadata
from service.settings import Settings

LOCK_TIMEOUT = "5s"  # a migration that waits for a table's lock makes everyone behind it wait


def url() -> str:
    given = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True).get("url")
    # A migration needs no Redis, which the settings would ask for
    return given or os.environ.get("PENNYWEIGHT_DATABASE_URL") or Settings.from_environment().database_url


def compared(item: SchemaItem, name: str | None, kind: str, reflected: bool, counterpart: SchemaItem | None) -> bool:  # noqa: ARG001, FBT001 - Alembic's signature
    """Partitions are made ahead of time, not by migrations."""
    return not (kind == "table" and name is not None and is_partition(name))


def run() -> None:
    engine = open_database(url())
    with engine.connect() as connection:
        # Held by the session over every revision, so that of two upgrades at once the second finds nothing to do.
        connection.execute(text("SET lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_lock(:turn)"), {"turn": int(Turn.MIGRATION)})
        connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=metadata,
            include_object=compared,
            compare_server_default=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


if context.is_offline_mode():
    raise SystemExit("Offline SQL is not supported: run the upgrade against the database.")
run()
