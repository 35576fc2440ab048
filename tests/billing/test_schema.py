"""Migrations and tables say the same, upgrading is safe at any time, and history is only ever appended."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text

from billing.changes import log_change
from billing.database import DatabaseRefused, open_database, transaction
from billing.partitions import is_partition, make, make_ahead, month_of
from billing.schema import alembic_config, upgrade
from billing.tables import metadata
from tests.billing.conftest import NOW

COLUMNS = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
"""
CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND contype IN ('c', 'u', 'p', 'f')
"""
INDEXES = "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
QUERIES = {"columns": COLUMNS, "constraints": CONSTRAINTS, "indexes": INDEXES}


def catalog(engine: Engine) -> dict[str, set[tuple]]:
    """All that Postgres knows of our tables, by kind; checks and defaults too, which Alembic does not compare."""
    with engine.connect() as connection:
        found = {kind: {tuple(row) for row in connection.execute(text(sql))} for kind, sql in QUERIES.items()}
    return {kind: {row for row in rows if not is_made_otherwise(row[0])} for kind, rows in found.items()}


def is_made_otherwise(table: str) -> bool:
    return is_partition(table) or table == "alembic_version"


def test_the_migrations_make_exactly_the_tables_that_the_code_declares(engine, empty_database_url):
    declared = open_database(empty_database_url)
    with transaction(declared) as connection:
        metadata.create_all(connection)
    made, wanted = catalog(engine), catalog(declared)
    declared.dispose()
    for kind in QUERIES:
        assert made[kind] == wanted[kind], kind
    assert len(made["columns"]) > 100


def test_alembic_check_finds_nothing(database_url, engine):
    command.check(alembic_config(database_url))
    with transaction(engine) as connection:
        connection.execute(text("ALTER TABLE tenants DROP COLUMN tpm"))
        context = MigrationContext.configure(
            connection, opts={"include_object": lambda *item: not is_partition(item[1] or "")}
        )
        assert compare_metadata(context, metadata) != [], "it would find a difference"


def test_two_upgrades_at_once_and_one_more_do_no_harm(empty_database_url):
    program = "import sys; from billing.schema import upgrade; upgrade(sys.argv[1])"
    both = [subprocess.Popen([sys.executable, "-c", program, empty_database_url], cwd="/") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    upgrade(empty_database_url)
    engine = open_database(empty_database_url)
    with transaction(engine) as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "0002"
        this_month = connection.scalar(text("SELECT to_regclass(:name)"), {"name": f"requests_{NOW:%Y_%m}"})
    engine.dispose()
    assert this_month is not None


@pytest.mark.parametrize("table", ["prices", "device_rates", "audit_log"])
@pytest.mark.parametrize("change", ["UPDATE {} SET id = DEFAULT", "DELETE FROM {}", "TRUNCATE {}"])
def test_history_refuses_changes(rated, table, change):
    with pytest.raises(DatabaseRefused, match="RestrictViolation"), transaction(rated) as connection:
        connection.execute(text(change.format(table)))


def test_a_change_that_is_not_committed_is_not_in_the_log(engine):
    with engine.connect() as connection, connection.begin() as attempt:
        log_change(connection, "test", "thing.do", subject="x", amount="1")
        attempt.rollback()
    with transaction(engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM audit_log")) == 0


def test_partitions_are_made_ahead_once_by_any_number_of_processes(engine):
    far = datetime(2031, 11, 20, tzinfo=UTC)

    def ahead():
        with transaction(engine) as connection:
            return make_ahead(connection, far)

    with ThreadPoolExecutor(3) as pool:
        made = [done.result() for done in [pool.submit(ahead) for _ in range(3)]]
    months = ["2031_10", "2031_11", "2031_12", "2032_01"]
    wanted = sorted(f"{table}_{month}" for table in ("requests", "attempts") for month in months)
    assert sorted(name for names in made for name in names) == wanted


def test_a_partition_is_made_while_others_read_and_write(rated):
    with rated.connect() as busy, busy.begin():
        busy.execute(text("SELECT count(*) FROM requests"))
        with transaction(rated) as connection:
            connection.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert make(connection, [month_of(datetime(2032, 5, 5, tzinfo=UTC))])
