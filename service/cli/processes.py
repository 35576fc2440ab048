"""One process of the system each: what `pennyweight up`, compose and Kubernetes start.

A command imports its process when it runs. Those of other packages replace this process: service imports neither the
engine's computing half nor the dashboard.
"""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

import click

from service.settings import Settings

_DEFAULT_API_URL: Final = "http://127.0.0.1:8080"
WEIGHTS: Final = click.Choice(["auto", "fp32", "fp16", "int8", "int4"])


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True)
def service(*, host: str, port: int, processes: int) -> None:
    """Run the API: OpenAI's wire, the admin API, the dashboard's login."""
    from service.server import run  # noqa: PLC0415 — see above

    run(Settings.from_environment(), host=host, port=port, processes=processes)


@click.command()
@click.option("--model", help="A .gguf file, a Hugging Face folder or a hub id. Default: SmolLM2-135M-Instruct.")
@click.option("--name", help="Public name of the model. Default: made from the model's own.")
@click.option("--device", help="auto, cpu, cuda or cuda:N. Default: auto.")
@click.option("--weights", type=WEIGHTS, help="Arithmetic of the weights on a CPU. Default: auto, which is fp32.")
def engine(*, model: str | None, name: str | None, device: str | None, weights: str | None) -> NoReturn:
    """Run an engine worker. Every setting of docs/settings.md that the engine has may be given in the environment."""
    from service.home.model import find_model  # noqa: PLC0415 — see above

    settings = Settings.from_environment()
    wanted = model or os.environ.get("PENNYWEIGHT_MODEL")
    found = find_model(wanted, settings.home / "models", lambda line: print(line, file=sys.stderr, flush=True))
    environment = {
        "PENNYWEIGHT_MODEL_NAME": found.name,
        "PENNYWEIGHT_SPOOL": str(settings.spool / "engine"),
        **os.environ,
        "PENNYWEIGHT_REDIS_URL": settings.redis_url,
        "PENNYWEIGHT_MODEL": str(found.place),
    }
    if name:
        environment["PENNYWEIGHT_MODEL_NAME"] = name
    if device:
        environment["PENNYWEIGHT_DEVICE"] = device
    if weights:
        environment["PENNYWEIGHT_WEIGHTS"] = weights
    _become("engine.worker", environment)


@click.command()
def recorder() -> None:
    """Run the recorder: what the API and the workers report becomes rows, prices and costs in Postgres."""
    from service.recorder import run  # noqa: PLC0415 — see above

    run(Settings.from_environment())


@click.command()
def tasks() -> None:
    """Run the background work: rollups, sweeps, partitions, batches. Of several, one keeps the clock."""
    from service.jobs import run  # noqa: PLC0415 — see above

    run(Settings.from_environment())


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8501, show_default=True)
@click.option("--api-url", envvar="PENNYWEIGHT_API_URL", default=_DEFAULT_API_URL, show_default=True, show_envvar=True)
def dashboard(*, host: str, port: int, api_url: str) -> NoReturn:
    """Run the dashboard. The API's URL is the one that the reader's browser can reach, on the same host name."""
    settings = Settings.from_environment()
    environment = {**os.environ, "PENNYWEIGHT_DATABASE_URL": settings.database_url, "PENNYWEIGHT_API_URL": api_url}
    _become("dashboard", environment, "--host", host, "--port", str(port))


@click.command()
def migrate() -> None:
    """Bring the database's tables up to date. Safe to run at any time, also twice at once."""
    from billing.schema import upgrade  # noqa: PLC0415 — see above

    upgrade(Settings.from_environment().database_url)
    print("The tables are up to date. Next: pennyweight bootstrap")


@click.command()
def bootstrap() -> None:
    """Make the first tenant, its API key, the admin key, an example price and device rate. Prints the keys, once."""
    from billing.bootstrap import example_device_rate, example_price, first_keys, has_keys  # noqa: PLC0415 — see above
    from billing.database import open_database, transaction  # noqa: PLC0415 — see above
    from service.home.model import DEFAULT_NAME  # noqa: PLC0415 — see above

    database = open_database(Settings.from_environment().database_url)
    with transaction(database) as connection:
        example_price(connection, os.environ.get("PENNYWEIGHT_MODEL_NAME", DEFAULT_NAME))
        example_device_rate(connection, "cpu")
        keys = None if has_keys(connection) else first_keys(connection)
    database.dispose()
    if keys is None:
        print("This database has keys already. Next: pennyweight key list")
        return
    print(f"API key (tenant default): {keys.api_key}\nAdmin key:                {keys.admin_key}")
    print("They are shown this once. Next: pennyweight service, engine, recorder, tasks, dashboard")


def _become(module: str, environment: dict[str, str], *words: str) -> NoReturn:
    """Replace this process, so that signals and exit codes are the other's own."""
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *words], environment)  # noqa: S606 — no shell wanted
