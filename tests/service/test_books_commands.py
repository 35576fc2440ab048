"""The commands of the books: what a user types, what it does, and what to type next."""

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from click.testing import CliRunner, Result

from billing.database import open_database, transaction
from billing.keys import Scope, authenticate
from billing.prices import list_prices
from billing.recording import record
from billing.rollup import roll_up
from billing.tenants import Limits
from service.cli import main
from tests.billing.conftest import attempt, interval, origin, settlement


@pytest.fixture
def run(database_url, redis_url, tmp_path):
    environment = {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path),
    }

    def invoke(*words: str, fails: bool = False) -> Result:
        result = CliRunner(env=environment).invoke(main, words)
        assert result.exit_code == 0 or fails, result.output
        return result

    return invoke


@pytest.fixture
def database(database_url):
    engine = open_database(database_url)
    yield engine
    engine.dispose()


def secret_in(output: str) -> str:
    (secret,) = re.findall(r"^pw-\S+$", output, re.MULTILINE)
    return secret


def serve(database, tenant_id, *, count: int = 3) -> None:
    """Requests in the books and in the sums."""
    now = datetime.now(UTC)
    done = [settlement(origin=origin(tenant_id=tenant_id, boot_seq=n), finished_at=now) for n in range(1, count + 1)]
    busy = 10_000_000 * count
    with transaction(database) as books:
        record(
            books,
            settlements=done,
            attempts=[attempt(d.request_id, prompt_tokens=20) for d in done],
            intervals=[
                interval(
                    1, started_at=now, busy_ns=busy, idle_ns=9_000_000_000 - busy, prompt_tokens=20 * count,
                    generated_tokens=7 * count,
                )
            ],
        )  # fmt: skip
        while roll_up(books):
            pass


def test_a_tenant_gets_a_key_that_works_until_it_is_revoked(run, database):
    made = run("tenant", "add", "acme", "--rpm", "10", "--weight", "2").output
    assert "Next: pennyweight key create --tenant acme" in made
    created = run("key", "create", "--tenant", "acme", "--tpm", "500", "--name", "ci").output
    secret = secret_in(created)
    with transaction(database) as books:
        who = authenticate(books, secret)
    assert (who.tenant_name, who.tenant_limits.rpm, who.key_limits.tpm, who.weight) == ("acme", 10, 500, 2)
    listed = run("key", "list", "--tenant", "acme").output
    assert secret[:11] in listed
    assert secret not in listed
    assert "Next: pennyweight" in run("key", "revoke", secret[:11]).output
    with transaction(database) as books:
        assert authenticate(books, secret).refusal is not None
    assert "revoked" in run("key", "list").output
    assert "acme" in run("tenant", "list").output


def test_an_admin_key_is_the_operators(run, database):
    with transaction(database) as books:
        assert authenticate(books, secret_in(run("key", "create", "--admin").output)).scopes == {Scope.ADMIN}


def test_prices_are_typed_per_million_and_kept_per_token(run, database):
    run("price", "set", "smol", "--input", "0.10", "--cached-input", "0.05", "--output", "0.4")
    with transaction(database) as books:
        (price,) = list_prices(books)
    amounts = price.amounts
    assert (amounts.input, amounts.cached_input, amounts.output) == (Decimal("1e-7"), Decimal("5e-8"), Decimal("4e-7"))
    listed = run("price", "list").output
    assert re.search(r"\* +smol +\(all\) +0\.1 +0\.05 +0\.4 ", listed), listed
    assert "million" in run("price", "set", "--help").output
    run("device-rate", "set", "cpu", "--hourly", "0.36")
    assert re.search(r"\* +cpu +0\.36 +USD", run("device-rate", "list").output)


def test_a_report_sums_what_was_served_in_every_format(run, database):
    run("tenant", "add", "acme")
    with transaction(database) as books:
        tenant_id = authenticate(books, secret_in(run("key", "create", "--tenant", "acme").output)).tenant_id
    serve(database, tenant_id)
    span = (
        "--from",
        f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}",
        "--to",
        f"{datetime.now(UTC) + timedelta(days=2):%Y-%m-%d}",
    )
    assert "3 requests have no price" in run("report", *span).output
    run("price", "set", "smol", "--input", "1.4", "--output", "4.4")
    run("device-rate", "set", "cpu", "--hourly", "0.36")
    with transaction(database) as books:
        while roll_up(books):
            pass
    table = run("report", "--tenant", "acme", *span).output
    assert "0.0001764" in table, "3 x (20 x 1.4e-6 + 7 x 4.4e-6)"
    assert "0.000003" in table, "3 x 10 ms at 0.36 an hour"
    (line,) = json.loads(run("report", *span, "--format", "json").output)["lines"]
    (row,) = csv.DictReader(io.StringIO(run("report", *span, "--format", "csv").output))
    assert {name: str(value) for name, value in line.items()} == row
    assert line["requests"] == 3
    assert re.search(r"^total +3 +60 +0 +21 ", table, re.MULTILINE), table
    assert Decimal(line["margin"]) == Decimal(line["revenue"]) - Decimal(line["cost"])
    assert "Next: pennyweight" in table
    run("tenant", "add", "idle")
    for empty in (("--tenant", "idle", *span), ("--from", "2026-01-01", "--to", "2026-01-02")):
        nothing = run("report", *empty).output
        assert "No requests in this range." in nothing
        assert "EXAMPLE" not in nothing


def test_a_tenants_limits_are_changed_one_by_one_and_lifted(run, database):
    run("tenant", "add", "acme", "--rpm", "10", "--tpm", "500")
    secret = secret_in(run("key", "create", "--tenant", "acme").output)
    run("tenant", "set", "acme", "--rpm", "20", "--weight", "3")
    run("tenant", "set", "acme", "--tpm", "0")
    with transaction(database) as books:
        who = authenticate(books, secret)
    assert (who.tenant_limits, who.weight) == (Limits(rpm=20), 3)
    assert "--rpm" in run("tenant", "set", "acme", fails=True).output
    assert "pennyweight tenant list" in run("tenant", "set", "nobody", "--rpm", "1", fails=True).output
    assert "0.001" in run("tenant", "set", "acme", "--weight", "-1", fails=True).output


def test_setting_a_price_or_rate_says_what_it_is_and_doubts_a_name_nobody_used(run, database):
    run("tenant", "add", "acme")
    said = run("price", "set", "smoll", "--input", "1", "--output", "4.50", "--tenant", "acme").output
    assert "for acme, from always on: 1 USD per million tokens in, 4.5 out." in said
    assert "Nobody has asked for a model named smoll" in said
    serve(database, origin().tenant_id)
    assert "Nobody" not in run("price", "set", "smol", "--input", "1", "--output", "4").output
    said = run("device-rate", "set", "gpuu", "--hourly", "3").output
    assert "from always on: 3 USD per hour." in said
    assert "There are: cpu" in said
    assert "There are" not in run("device-rate", "set", "cpu", "--hourly", "3").output


def test_the_next_command_can_be_run_as_it_is_printed(run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["deep/venv/bin/pennyweight", "tenant", "list"])
    assert "Next: deep/venv/bin/pennyweight tenant add NAME" in run("tenant", "list").output


def test_the_audit_prints_what_is_unaccounted_and_fails_on_a_breach(run, database):
    serve(database, origin().tenant_id)
    closed = run("audit").output
    assert "unaccounted 0 ns" in closed
    assert "0 don't close" in closed
    with transaction(database) as books:
        record(books, intervals=[interval(3)])
    broken = run("audit", fails=True)
    assert broken.exit_code == 1
    assert "OPEN" in broken.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("key", "create"), "Give either --tenant NAME or --admin"),
        (("key", "create", "--tenant", "nobody"), "pennyweight tenant list"),
        (("key", "revoke", "pw-none"), "pennyweight key list"),
        (("tenant", "add", ""), "printable"),
        (("tenant", "add", "x", "--rpm", "0"), "--rpm"),
        (("tenant", "add", "x", "--weight", "nan"), "weight"),
        (("price", "set", "smol", "--input", "cheap", "--output", "1"), "0.15"),
        (("price", "set", "smol", "--input", "-1", "--output", "1"), "0 or more"),
        (("price", "set", "smol", "--input", "1e12", "--output", "1"), None),
        (("price", "set", "smol", "--input", "1e-20", "--output", "1"), "18 decimals"),
        (("price", "set", "smol", "--input", "1"), "--output"),
        (("device-rate", "set", "cpu", "--hourly", "NaN"), "0 or more"),
        (("price", "set", "smol", "--input", "1e999999999", "--output", "1"), "0 or more"),
        (("price", "set", "", "--input", "1", "--output", "1"), "printable"),
        (("price", "set", "smol", "--input", "1", "--output", "1", "--from", "0001-01-01T00:00+10:00"), "2000"),
        (("device-rate", "set", "", "--hourly", "1"), "printable"),
        (("device-rate", "set", "cpu", "--hourly", "1", "--from", "9999-12-31T23:59-12:00"), "9000"),
        (("key", "create", "--admin", "--expires", "9999-12-31T23:59:59-14:00"), "9000"),
        (("key", "create", "--admin", "--name", "a\nb"), "printable"),
        (("tenant", "add", "x", "--weight", "1e-320"), "0.001"),
        (("report", "--from", "0001-01-01T00:00+14:00"), "2000"),
        (("report", "--to", "9999-12-31T23:59-12:00"), "9000"),
        (("audit", "--from", "2026-02-01", "--to", "2026-01-01"), "--to must be after --from"),
        (("batch", "run", __file__, "--key", "pw-x", "--tenant", "acme"), "not both"),
        (("report", "--from", "yesterday", "--to", "2026-01-01"), "2026-11-30"),
        (("report", "--from", "2026-01-02", "--to", "2026-01-01"), "--to must be after --from"),
        (("report", "--tenant", "nobody", "--from", "2026-01-01", "--to", "2026-01-02"), "pennyweight tenant list"),
    ],
)
def test_rubbish_gets_one_clear_line_and_changes_nothing(run, database, words, says):
    result = run(*words, fails=True)
    if says is not None:
        assert result.exit_code != 0
        assert says in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    with transaction(database) as books:
        assert list_prices(books) == [] or says is None


def test_a_price_that_reaches_back_is_refused_in_words(run):
    run("price", "set", "smol", "--input", "1", "--output", "1")
    again = run("price", "set", "smol", "--input", "2", "--output", "2", "--from", "2026-01-01", fails=True)
    assert again.exit_code == 1
    assert "Leave out --from" in again.output


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://user:hidden@127.0.0.1:1/x", "`pennyweight up` starts it"),
        ("postgres?://user:hidden@127.0.0.1", "PENNYWEIGHT_DATABASE_URL is not of the form"),
    ],
)
def test_a_database_that_is_not_there_is_one_line_without_its_password(redis_url, tmp_path, url, says):
    environment = {
        "PENNYWEIGHT_DATABASE_URL": url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path),
    }
    result = CliRunner(env=environment).invoke(main, ["tenant", "list"])
    assert result.exit_code == 1
    assert says in result.output
    assert "hidden" not in result.output
    assert result.output.count("\n") == 1


def test_a_database_without_tables_says_which_command_makes_them(empty_database_url, redis_url, tmp_path):
    environment = {
        "PENNYWEIGHT_DATABASE_URL": empty_database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path),
    }
    result = CliRunner(env=environment).invoke(main, ["tenant", "list"])
    assert "`pennyweight migrate`" in result.output
    assert CliRunner(env=environment).invoke(main, ["migrate"]).exit_code == 0
    assert CliRunner(env=environment).invoke(main, ["tenant", "list"]).exit_code == 0
