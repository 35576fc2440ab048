"""A whole running system: `pennyweight up` on a home of its own, as a user starts it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import psycopg
import psycopg.rows
import pytest
import redis

START_S = 180


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def eventually(what: Callable[[], Any], *, within: float = 15.0, every: float = 0.1) -> Any:
    """The first truthy answer of ``what``; its last answer is in the failure."""
    deadline = time.monotonic() + within
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {within} s"
        time.sleep(every)


@dataclass
class System:
    home: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]

    @property
    def bootstrap(self) -> dict[str, str]:
        return json.loads((self.home / "bootstrap.json").read_bytes())

    @property
    def api(self) -> str:
        return self.bootstrap["api_url"]

    @property
    def model(self) -> str:
        return self.bootstrap["model"]

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        options.setdefault("max_retries", 0)
        return openai.OpenAI(base_url=f"{self.api}/v1", api_key=key or self.bootstrap["api_key"], **options)

    def run(self, *arguments: str) -> str:
        """A `pennyweight` command, finding the home by itself."""
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def new_key(self, tenant: str, **limits: int) -> str:
        """The secret of a new key of a new tenant."""
        options = [text for name, value in limits.items() for text in (f"--{name}", str(value))]
        self.run("tenant", "add", tenant, *options)
        found = re.search(r"\bpw-\S+", self.run("key", "create", "--tenant", tenant))
        assert found
        return found[0].rstrip(".,`'\"")

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self.bootstrap["database_url"], row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(sql, values).fetchall()

    def row(self, request_id: str, *, within: float = 15.0) -> dict[str, Any]:
        """The settled and costed row of a request."""
        sql = "SELECT * FROM requests WHERE id = %s AND (cost IS NOT NULL OR status = 'failed')"
        return eventually(lambda: self.rows(sql, request_id), within=within)[0]

    def redis(self) -> redis.Redis:
        return redis.from_url(self.bootstrap["redis_url"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples over the API's /metrics."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in httpx.get(f"{self.api}/metrics").text.splitlines() if line.startswith(name)]
        found = [line for line in lines if line[len(name)] in " {" and all(label in line for label in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def processes(self, text: str) -> list[psutil.Process]:
        """Descendants whose command line contains ``text``."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if text in " ".join(_command(child))]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health/ready", timeout=2).status_code == 200
        except (httpx.HTTPError, OSError, KeyError):
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def start_system(home: Path, *options: str, **environment: str) -> System:
    """Start `pennyweight up` and wait until it is ready; its output is in ``home/../up.log``."""
    chosen = {"PENNYWEIGHT_HOME": str(home), **environment}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENNYWEIGHT_")}
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    log = (home.parent / "up.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "up", *ports, *options],
        env=inherited | chosen,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    system = System(home, process, inherited | chosen)

    def up() -> bool:
        assert process.poll() is None, (home.parent / "up.log").read_text()
        return (home / "bootstrap.json").exists() and system.ready()

    try:
        eventually(up, within=START_S)
    except AssertionError:
        process.kill()
        raise AssertionError((home.parent / "up.log").read_text()) from None
    return system


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all scenarios that leave it running."""
    running = start_system(tmp_path_factory.mktemp("system") / "home", "--no-dashboard")
    yield running
    running.stop()
