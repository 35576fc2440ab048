"""What the commands about the books share: the way to them, amounts and times as typed, tables as shown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Context, Decimal, InvalidOperation
from pathlib import Path
from typing import Final

import click
from sqlalchemy import Connection

from billing.database import open_database, transaction
from billing.keys import UnknownKeyError
from billing.moments import bounded
from billing.prices import RateError
from billing.tenants import TenantError
from service.settings import Settings

ACTOR: Final = "cli"  # in the log of changes
_LARGEST: Final = Decimal(10) ** 15  # per million tokens; the books bound the amount per token
_SHOWN: Final = Context(prec=4)


@contextmanager
def books() -> Iterator[Connection]:
    """One transaction on the running system's books; what the books refuse is one line for the user."""
    database = open_database(Settings.from_environment().database_url, pool_size=1)
    try:
        with transaction(database) as connection:
            yield connection
    except (TenantError, UnknownKeyError, RateError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        database.dispose()


class Amount(click.ParamType[Decimal]):
    name = "amount"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        try:
            amount = Decimal(str(value))
        except InvalidOperation:
            self.fail(f"{value!r} is no amount; write it like 0.15", param, ctx)
        if not amount.is_finite() or not 0 <= amount < _LARGEST:
            self.fail(f"{value!r} must be 0 or more, and below a million billions", param, ctx)
        return amount


class Moment(click.ParamType[datetime]):
    """A day or a moment, UTC unless it says otherwise."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time; write it like 2026-11-30 or 2026-11-30T12:00", param, ctx)
        try:
            return bounded(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plain(amount: Decimal) -> str:
    """Every digit, no exponent, no trailing zeros."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def rounded(amount: Decimal) -> str:
    """Four digits, for people; files hold every one."""
    return plain(_SHOWN.plus(amount))


def say_next(command: str) -> None:
    """``command`` begins with pennyweight; printed is what this shell can run."""
    print(f"\nNext: {_program()}{command.removeprefix('pennyweight')}")


def _program() -> str:
    typed = Path(sys.argv[0])
    return str(typed) if typed.name == "pennyweight" and not shutil.which("pennyweight") else "pennyweight"
