"""`pennyweight health`: is this machine's process alive? For the health checks of containers.

An API or dashboard is asked over HTTP; the others, who listen nowhere, by what they leave in Redis.
"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import Final

import click
import redis

from engine.keys import RECORDER_GROUP, RECORDS, WORKERS, lease_key
from engine.protocol import WorkerState, unpack_card
from service.settings import Settings

_TIMEOUT_S: Final = 5.0
_RECORDER_IDLE_MS: Final = 10_000  # it reads twice a second


@click.command()
@click.argument("what", metavar="URL|engine|recorder|tasks")
def health(what: str) -> None:
    """End with status 0 if it is alive, and with 1 and a line that says what is wrong if it isn't."""
    wrong = _url(what) if "://" in what else _process(what)
    if wrong:
        raise click.ClickException(wrong)
    print("alive")


def _url(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):  # noqa: S310 - whoever starts us says which URL
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return f"{url} doesn't answer: {getattr(error, 'reason', error)}"


def _process(name: str) -> str:
    checks = {"engine": _engine, "recorder": _recorder, "tasks": _tasks}
    if name not in checks:
        raise click.BadParameter(f"{name!r} is neither a URL nor one of {', '.join(checks)}.", param_hint="WHAT")
    url = Settings.from_environment().redis_url
    with redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S) as connection:
        return checks[name](connection)


def _engine(connection: redis.Redis) -> str:
    cards = [unpack_card(data) for data in connection.hvals(WORKERS) if isinstance(data, bytes)]
    here = [card for card in cards if card.name.startswith(f"{socket.gethostname()}/")]
    living = [card for card in here if connection.exists(lease_key(card.worker))]
    if any(card.state is not WorkerState.LOADING for card in living):
        return ""
    if living:
        return "The engine worker of this machine is loading its model."
    return "The engine worker of this machine doesn't make progress." if here else "No engine worker here yet."


def _recorder(connection: redis.Redis) -> str:
    try:
        consumers = connection.xinfo_consumers(RECORDS, RECORDER_GROUP)
    except redis.ResponseError:
        return "No recorder has made its group yet."
    here = [c for c in consumers if c["name"].decode().startswith(socket.gethostname())]
    if any(c["idle"] < _RECORDER_IDLE_MS for c in here):
        return ""
    return "The recorder of this machine doesn't read." if here else "No recorder here yet."


def _tasks(connection: redis.Redis) -> str:
    from service.celery_app import connect, node_name  # noqa: PLC0415 - Celery is slow to import and the others don't need it

    del connection
    url = Settings.from_environment().redis_url
    answers = connect(url).control.ping(destination=[node_name()], timeout=_TIMEOUT_S)
    return "" if answers else "The Celery worker of this machine doesn't answer."
