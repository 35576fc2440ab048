"""The console command `pennyweight`.

up — everything on this machine
processes — one process of the system each: what `up` and compose start
parties — tenants and their keys
rates — prices and device rates
reports — reports, and whether the books close
terminal — what those share
batch — a file of requests through the workers
health — is a process alive? for the health checks of containers
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from typing import Final

import click

from service.home.errors import HomeError
from service.settings import SettingsError

# name: (module and attribute, one line of help). A command's module is imported when that command runs, so that
# `pennyweight --help` is quick and `pennyweight key list` imports no web framework.
COMMANDS: Final = {
    "up": ("service.cli.up:up", "Run the whole system on this machine."),
    "tenant": ("service.cli.parties:tenant", "Who uses the service: add, set, list."),
    "key": ("service.cli.parties:key", "API keys: create, revoke, list."),
    "price": ("service.cli.rates:price", "What tokens cost a tenant: set, list."),
    "device-rate": ("service.cli.rates:device_rate", "What an hour of a device costs you: set, list."),
    "report": ("service.cli.reports:report", "Requests, tokens, revenue, cost and margin of a time range."),
    "audit": ("service.cli.reports:audit", "Do the books close?"),
    "batch": ("service.cli.batch:batch", "Run a file of requests at low priority."),
    "service": ("service.cli.processes:service", "Run the API."),
    "engine": ("service.cli.processes:engine", "Run an engine worker."),
    "recorder": ("service.cli.processes:recorder", "Run the recorder: records stream to Postgres."),
    "tasks": ("service.cli.processes:tasks", "Run the background work: rollups, sweeps, batches."),
    "dashboard": ("service.cli.processes:dashboard", "Run the dashboard."),
    "migrate": ("service.cli.processes:migrate", "Bring the database's tables up to date."),
    "health": ("service.cli.health:health", "Is a process alive? For health checks."),
    "bootstrap": ("service.cli.processes:bootstrap", "Make the first tenant and keys, once, and print them."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 — click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 — click's signature
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 — click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (line := explain(error)) is None:
                raise
            raise click.ClickException(line) from error


def explain(error: Exception) -> str | None:
    """One line for what a user can mend; None for a bug, whose traceback is worth more."""
    if isinstance(error, SettingsError | HomeError):
        return str(error)
    if _is(error, "billing.database", "DatabaseUrlError"):
        return f"PENNYWEIGHT_DATABASE_URL is {error}."
    if _is(error, "billing.database", "DatabaseOutdated"):
        return "The database's tables are missing or older than this version. `pennyweight migrate` mends that."
    if _is(error, "billing.database", "DatabaseUnavailable"):
        return "The database doesn't answer. Is the system running? `pennyweight up` starts it."
    if _is(error, "redis", "ConnectionError"):
        return "Redis doesn't answer. Is the system running? `pennyweight up` starts it."
    return None


def _is(error: Exception, module: str, name: str) -> bool:
    """Like isinstance, without importing what the command itself never imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(error, found)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("pennyweight"), prog_name="pennyweight")
def main() -> None:
    """Pennyweight: an inference service that knows what every token cost.

    Commands find the running system by PENNYWEIGHT_HOME, or by a .pennyweight folder here or above, or by
    PENNYWEIGHT_DATABASE_URL and PENNYWEIGHT_REDIS_URL.
    """
