"""Real servers and real weights for every test, started once and shared.

The servers' folders are temporary, with a name that any user of the machine can reach: PostgreSQL doesn't run as root.
No fixture touches a home of the user's.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psycopg
import pytest
import redis

from billing.schema import upgrade
from service.home.children import Guard
from service.home.model import default_gguf
from service.home.ports import free_port
from service.home.postgres import Postgres
from service.home.valkey import Valkey

TEMPLATE = "template_pennyweight"

hypothesis.settings.register_profile("no timing gates", deadline=None)
hypothesis.settings.load_profile("no timing gates")


@pytest.fixture(scope="session", autouse=True)
def _no_database_left_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of root's homes in pytest's folders, which only root can reach (`service/home/account.py`)."""
    yield
    for place in tmp_path_factory.getbasetemp().rglob("postgres"):
        if place.is_symlink():
            shutil.rmtree(place.readlink(), ignore_errors=True)


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pennyweight-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def guard(server_folder: Path) -> Iterator[Guard]:
    guard = Guard(server_folder / "guard.lock", print)
    yield guard
    guard.close()


@pytest.fixture(scope="session")
def postgres_server(server_folder: Path, guard: Guard) -> Iterator[Postgres]:
    log = server_folder / "postgres.log"
    server = Postgres(
        server_folder / "postgres", secrets.token_hex(8), free_port(), log=log, guard=guard, durable=False
    )
    server.start(print)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey_server(server_folder: Path, guard: Guard) -> Iterator[Valkey]:
    log = server_folder / "valkey.log"
    server = Valkey(server_folder / "valkey", secrets.token_hex(8), free_port(), log=log, guard=guard, durable=False)
    server.start(print)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def template_database(postgres_server: Postgres) -> str:
    """A database that the migrations made; its clones cost some 50 ms."""
    _create(postgres_server, TEMPLATE, template="template0")
    upgrade(postgres_server.url(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def database_url(postgres_server: Postgres, template_database: str) -> Iterator[str]:
    """A fresh database with every table, gone after the test."""
    yield from _database(postgres_server, template_database)


@pytest.fixture
def empty_database_url(postgres_server: Postgres) -> Iterator[str]:
    """A database without tables, gone after the test."""
    yield from _database(postgres_server, "template0")


@pytest.fixture
def redis_url(valkey_server: Valkey) -> str:
    """Empty, and shared by the tests: nothing that an earlier test started may still use it."""
    with redis.Redis.from_url(valkey_server.url()) as connection:
        connection.flushall()
        connection.script_flush()
    return valkey_server.url()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, quantised to Q4_1; downloaded once into the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return default_gguf(cache / "pennyweight", print)


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2_gguf: Path):
    """`transformers`' own reading of the same file: (model, tokenizer)."""
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        # It parses the whole file three times and makes one table of names hundreds of times: 40 seconds, else 15.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return _read_by_transformers(transformers, smollm2_gguf)


def _read_by_transformers(transformers, smollm2_gguf: Path):
    place = {"pretrained_model_name_or_path": smollm2_gguf.parent, "gguf_file": smollm2_gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype="float32").eval()
    return model, transformers.AutoTokenizer.from_pretrained(**place)


def _database(server: Postgres, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    _create(server, name, template=template)
    yield server.url(name)
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _create(server: Postgres, name: str, *, template: str) -> None:
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
