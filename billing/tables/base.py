"""Metadata, the naming of constraints and short forms of the columns that every table has."""

from __future__ import annotations

from datetime import datetime
from typing import Final, TypeVar
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Integer, MetaData, Numeric, Text, Uuid
from sqlalchemy.types import TypeEngine

_T = TypeVar("_T")

metadata: Final = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
    }
)

Moment: Final = DateTime(timezone=True)
Money: Final = Numeric()  # unconstrained: products of exact numbers are kept whole
Seconds: Final = Numeric(20, 9)  # exact from nanoseconds
Nanoseconds: Final = BigInteger()


def texts(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False) for name in names]


def integers(*names: str) -> list[Column[int]]:
    return [Column(name, Integer, nullable=False) for name in names]


def bigints(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False) for name in names]


def uuids(*names: str) -> list[Column[UUID]]:
    return [Column(name, Uuid, nullable=False) for name in names]


def booleans(*names: str) -> list[Column[bool]]:
    return [Column(name, Boolean, nullable=False) for name in names]


def moments(*names: str) -> list[Column[datetime]]:
    return [Column(name, Moment, nullable=False) for name in names]


def optional(kind: TypeEngine[_T] | type[TypeEngine[_T]], *names: str) -> list[Column[_T]]:
    return [Column(name, kind, nullable=True) for name in names]
