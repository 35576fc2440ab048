"""The books of a home: tables, first keys and examples, whatever of it isn't there yet."""

from __future__ import annotations

from alembic.util import CommandError

from billing.bootstrap import FirstKeys, example_device_rate, example_price, first_keys
from billing.database import DatabaseUnavailable, open_database, transaction
from billing.schema import upgrade
from billing.sessions import new_login_token
from service.home.errors import HomeError
from service.home.folder import Home, Secrets


def open_books(database_url: str, home: Home, secrets: Secrets, *, model: str) -> None:
    """Migrate, and leave keys that work in ``secrets``: in the home before they are in the database, so that a crash
    in between loses none.
    """
    try:
        upgrade(database_url)
        _keep_keys(database_url, home, secrets, model=model)
    except DatabaseUnavailable as error:
        raise HomeError(
            f"The database doesn't do its work ({error}): see the log of PostgreSQL, then start again."
        ) from error
    except CommandError as error:
        raise HomeError(
            "The database was written by a newer Pennyweight: update this one, or use another home."
        ) from error


def rate_device(database_url: str, device_kind: str) -> None:
    """Without a rate the time of a device has no cost."""
    database = open_database(database_url)
    with transaction(database) as connection:
        example_device_rate(connection, device_kind)
    database.dispose()


def login_token(database_url: str) -> str:
    """What makes a link to the dashboard log in, once."""
    database = open_database(database_url)
    with transaction(database) as connection:
        token = new_login_token(connection)
    database.dispose()
    return token


def _keep_keys(database_url: str, home: Home, secrets: Secrets, *, model: str) -> None:
    database = open_database(database_url)
    held = FirstKeys(api_key=secrets.api_key, admin_key=secrets.admin_key)
    with transaction(database) as connection:
        keys = first_keys(connection, held)
        if keys != held:
            secrets.api_key, secrets.admin_key = keys.api_key, keys.admin_key
            home.keep_secrets(secrets)
        example_price(connection, model)
    database.dispose()
