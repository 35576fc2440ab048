"""`pennyweight batch`: a file of requests, run at low priority by `pennyweight tasks`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Final
from uuid import UUID

import click
import redis
from kombu.exceptions import OperationalError
from sqlalchemy import Connection

from billing.batches import Batch, cancel_batch, find_batch, outputs, start_batch
from billing.contents import Seal, SealError
from billing.keys import Scope, authenticate, list_keys
from billing.tenants import tenant_id_of
from engine.keys import WORKERS
from engine.protocol import unpack_card
from service.batch.file import BatchFile, BatchFileError, read_batch
from service.celery_app import connect
from service.cli.terminal import books, say_next
from service.home.folder import Home
from service.jobs import nudge
from service.settings import Settings

_LOOK_S: Final = 0.5
_FINDER = click.argument("batch_id", type=click.UUID)
_OUTPUT = click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Where the results go.")


@click.group()
def batch() -> None:
    """Run a file of requests at low priority, at the price of the model."""


@batch.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--key", help="API key that pays. Default: PENNYWEIGHT_API_KEY, or the home's.")
@click.option("--tenant", help="Tenant that pays, instead of a key.")
@_OUTPUT
@click.option("--wait/--no-wait", default=True, show_default=True, help="Stay until it is done and write the results.")
def run(*, file: Path, key: str | None, tenant: str | None, output: Path | None, wait: bool) -> None:
    r"""Run FILE, which has one request a line as OpenAI's batch API takes them.

    \b
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body":
     {"model": "…", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}}     (on one line)

    The results go to a file beside it, FILE with .output.jsonl for its ending, one a line in the same order.
    """
    if key and tenant:
        raise click.UsageError("Give --key or --tenant, not both: one of them pays.")
    settings = Settings.from_environment()
    wanted = _read(file)
    _check_model(settings, wanted.model)
    seal = _seal(settings)
    with books() as connection:
        tenant_id, key_id = _payer(connection, key=key or (None if tenant else _own_key(settings)), tenant=tenant)
        batch_id = start_batch(
            connection, seal, [(line.custom_id, line.body) for line in wanted.lines],
            tenant_id=tenant_id, api_key_id=key_id, model=wanted.model, endpoint=wanted.endpoint,
        )  # fmt: skip
    _nudge(settings, batch_id)
    print(f"batch {batch_id}: {len(wanted.lines)} lines for {wanted.model}")
    if not wait:
        say_next(f"pennyweight batch status {batch_id}")
        return
    try:
        ended = _await(batch_id)
    except KeyboardInterrupt:
        print("\nIt goes on without you.")
        say_next(f"pennyweight batch output {batch_id}, or: pennyweight batch cancel {batch_id}")
        raise SystemExit(130) from None
    _write(seal, ended, output or file.with_suffix(".output.jsonl"))


@batch.command()
@_FINDER
def status(*, batch_id: UUID) -> None:
    """How far a batch is."""
    found = _find(batch_id)
    print(_progress(found))
    say_next(f"pennyweight batch {'output' if found.finished_at else 'cancel'} {batch_id}")


@batch.command()
@_FINDER
@_OUTPUT
def output(*, batch_id: UUID, output: Path | None) -> None:
    """Write the results of the lines that have ended so far."""
    settings = Settings.from_environment()
    _write(_seal(settings), _find(batch_id), output or Path(f"{batch_id}.output.jsonl"))


@batch.command()
@_FINDER
def cancel(*, batch_id: UUID) -> None:
    """Run no further lines of a batch. Those that run now come to their end."""
    _find(batch_id)
    with books() as connection:
        count = cancel_batch(connection, batch_id)
    print(f"{count} lines cancelled.")
    say_next(f"pennyweight batch output {batch_id}")


def _read(file: Path) -> BatchFile:
    try:
        with file.open("rb") as lines:
            return read_batch(lines)
    except BatchFileError as error:
        raise click.ClickException(f"{file}: {error} Nothing was run.") from None


def _check_model(settings: Settings, name: str) -> None:
    """A name that no worker has ever served is a slip of the pen."""
    with redis.Redis.from_url(settings.redis_url, socket_timeout=5) as connection:
        known = {unpack_card(data).model for data in connection.hvals(WORKERS) if isinstance(data, bytes)}
    if known and name not in known:
        raise click.ClickException(f"No worker serves the model {name!r}. There are: {', '.join(sorted(known))}.")


def _seal(settings: Settings) -> Seal:
    try:
        return Seal(settings.secret)
    except SealError as error:
        raise click.ClickException(str(error)) from None


def _own_key(settings: Settings) -> str | None:
    if key := os.environ.get("PENNYWEIGHT_API_KEY"):
        return key
    bootstrap = Home(settings.home).bootstrap()
    return bootstrap.api_key if bootstrap else None


def _payer(connection: Connection, *, key: str | None, tenant: str | None) -> tuple[UUID, UUID]:
    """Tenant and key that the requests are billed to."""
    if key:
        found = authenticate(connection, key)
        if found is None or found.refusal or found.tenant_id is None or Scope.INFERENCE not in found.scopes:
            raise click.ClickException("This key can't call models: it is unknown, revoked, expired or the operator's.")
        return found.tenant_id, found.key_id
    if not tenant:
        raise click.UsageError("Give --key or --tenant: somebody has to pay.")
    tenant_id = tenant_id_of(connection, tenant)
    now = datetime.now(UTC)
    good = [
        known
        for known in list_keys(connection, tenant_id=tenant_id)
        if known.revoked_at is None and (known.expires_at is None or known.expires_at > now)
    ]
    if not good:
        raise click.ClickException(f"{tenant} has no key. Next: pennyweight key create --tenant {shlex.quote(tenant)}")
    return tenant_id, good[-1].id


def _nudge(settings: Settings, batch_id: UUID) -> None:
    """Without one it starts some seconds later: the background work looks by itself."""
    try:
        nudge(connect(settings.redis_url), batch_id)
    except OperationalError:
        print("Redis doesn't answer; the batch starts when it does.", file=sys.stderr)


def _find(batch_id: UUID) -> Batch:
    with books() as connection:
        found = find_batch(connection, batch_id)
    if found is None:
        raise click.ClickException(f"There is no batch {batch_id}.")
    return found


def _await(batch_id: UUID) -> Batch:
    shown = ""
    while True:
        found = _find(batch_id)
        if (line := _progress(found)) != shown:
            print(line, flush=True)
            shown = line
        if found.finished_at:
            return found
        time.sleep(_LOOK_S)


def _progress(found: Batch) -> str:
    ended = found.total_lines - found.open_lines
    failed = f", {found.failed_lines} failed" if found.failed_lines else ""
    cancelled = f", {found.cancelled_lines} cancelled" if found.cancelled_lines else ""
    return f"{ended} of {found.total_lines} lines{failed}{cancelled}"


def _write(seal: Seal, found: Batch, path: Path) -> None:
    """Whole or not at all, and for its owner only: these are texts. Ends with status 1 if a line failed."""
    half = path.with_name(f"{path.name}.half")
    try:
        with books() as connection, _private(half) as file:
            for line in outputs(connection, seal, found.id):
                file.write(line + b"\n")
        half.replace(path)
    except SealError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        message = f"Can't write {path}: {error.strerror}. Next: pennyweight batch output {found.id} --output FILE"
        raise click.ClickException(message) from None
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
    print(f"Results: {path}")
    if found.failed_lines:
        raise click.ClickException(
            f"Lines that failed: {found.failed_lines}; each says why in its place of the results."
        )
    if found.finished_at is None:
        say_next(f"pennyweight batch status {found.id}")
        return
    first, last = found.created_at.astimezone(UTC).date(), found.finished_at.astimezone(UTC).date()
    say_next(f"pennyweight report --from {first} --to {last + timedelta(days=1)}")


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
