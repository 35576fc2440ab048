"""`pennyweight up`: everything on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from service.cli.processes import WEIGHTS
from service.home.model import DEFAULT_NAME
from service.settings import find_home


@click.command()
@click.option(
    "--home", type=click.Path(path_type=Path), help="Folder for everything that is kept. Default: ./.pennyweight"
)
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Of the API.")
@click.option("--dashboard-port", type=click.IntRange(1, 65535), default=8501, show_default=True)
@click.option("--no-dashboard", is_flag=True, help="Run without the dashboard.")
@click.option(
    "--model",
    envvar="PENNYWEIGHT_MODEL",
    help=f"A .gguf file, a Hugging Face folder or a hub id. Default: {DEFAULT_NAME}, downloaded once.",
)
@click.option(
    "--device", envvar="PENNYWEIGHT_DEVICE", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."
)
@click.option(
    "--weights",
    type=WEIGHTS,
    envvar="PENNYWEIGHT_WEIGHTS",
    default="auto",
    show_default=True,
    help="Arithmetic of the weights on a CPU; auto is fp32.",
)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="Of the API.")
def up(
    *,
    home: Path | None,
    port: int,
    dashboard_port: int,
    no_dashboard: bool,
    model: str | None,
    device: str,
    weights: str,
    processes: int,
) -> None:
    """Run the whole system on this machine: its own PostgreSQL and Valkey, engine, API, recorder, tasks, dashboard.

    A second start on the same home keeps everything. With PENNYWEIGHT_DATABASE_URL or PENNYWEIGHT_REDIS_URL set, that
    server is used instead of an own one.
    """
    from service.home.up import Options, run  # noqa: PLC0415 — `pennyweight up --help` needs none of it

    options = Options(
        home=(home or find_home()).absolute(),
        port=port,
        dashboard_port=None if no_dashboard else dashboard_port,
        processes=processes,
        model=model,
        device=device,
        weights=weights,
    )
    print(f"Pennyweight in {options.home}", flush=True)
    run(options, say=lambda line: print(f"  {line}", flush=True), show=partial(print, flush=True))
