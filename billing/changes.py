"""The log of who changed what: one appended row per change, in the transaction that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, text

Detail = str | int | float | bool | None

_INSERT: Final = text(
    "INSERT INTO audit_log (actor, action, subject, detail) VALUES (:actor, :action, :subject, CAST(:detail AS jsonb))"
)


def log_change(connection: Connection, actor: str, action: str, *, subject: str, **detail: Detail) -> None:
    """``actor`` says who ("cli", a key's prefix), ``action`` what ("key.revoke"), ``subject`` to which row."""
    row: Mapping[str, str] = {"actor": actor, "action": action, "subject": subject, "detail": json.dumps(detail)}
    connection.execute(_INSERT, row)
