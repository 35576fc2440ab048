"""The books of a home: tables, first keys and examples, whatever of it isn't there yet."""

from __future__ import annotations

from billing.bootstrap import FirstKeys, example_device_rate, example_price, first_keys
from billing.database import open_database, transaction
from billing.schema import upgrade
from service.home.folder import Home, Secrets


def open_books(database_url: str, home: Home, secrets: Secrets, *, model: str) -> None:
    """Migrate, and leave keys that work in ``secrets``: in the home before they are in the database, so that a crash
    in between loses none.
    """
    upgrade(database_url)
    database = open_database(database_url)
    held = FirstKeys(api_key=secrets.api_key, admin_key=secrets.admin_key)
    with transaction(database) as connection:
        keys = first_keys(connection, held)
        if keys != held:
            secrets.api_key, secrets.admin_key = keys.api_key, keys.admin_key
            home.keep_secrets(secrets)
        example_price(connection, model)
    database.dispose()


def rate_device(database_url: str, device_kind: str) -> None:
    """Without a rate the time of a device has no cost."""
    database = open_database(database_url)
    with transaction(database) as connection:
        example_device_rate(connection, device_kind)
    database.dispose()
