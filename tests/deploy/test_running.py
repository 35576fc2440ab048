"""compose.yaml, run: every service's own command with its own environment, in the file's order, as local processes.

No Docker engine is needed: Postgres and Redis are the test's own, host names of services and ports inside containers
become this machine's, and a service's volume is a folder.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psycopg
import psycopg.rows
import pytest
import redis

from service.home.ports import free_port
from tests.deploy.composefile import Service, in_order, load

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 120


@dataclass
class Stack:
    """The services of the file as processes of this machine."""

    folder: Path
    services: list[Service]
    places: dict[str, str]  # text in the file -> text on this machine
    port: int  # of Postgres: its health check asks at the default one
    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)

    def up(self):
        for service in self.services:
            for need, condition in service.needs.items():
                self._await(need, condition)
            if service.ours:
                self._start(service)
        for service in self.services:
            if not service.ends:
                self._await(service.name, "service_healthy")

    def healthy(self, name):
        how, *command = self._service(name).spec["healthcheck"]["test"]
        if how == "CMD-SHELL":
            command = ["/bin/sh", "-c", *command]
        return self._run(self._service(name), command).returncode == 0

    def down(self):
        """SIGTERM to all, as `docker compose stop` does; the statuses they end with."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(timeout=60) for name, process in self.running.items()}

    def kill(self):
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def _service(self, name):
        return next(service for service in self.services if service.name == name)

    def _start(self, service):
        if service.ends:
            done = self._run(service, service.spec["command"])
            assert done.returncode == 0, f"{service.name}: {done.stdout}{done.stderr}"
            self.printed[service.name] = done.stdout
            return
        with (self.folder / f"{service.name}.log").open("wb") as log:
            self.running[service.name] = subprocess.Popen(
                self._here(service.spec["command"]), env=self._environment(service), cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _await(self, name, condition):
        service = self._service(name)
        if condition == "service_completed_successfully":
            assert name in self.printed, f"{name} has not run"
            return
        if not service.ours and not shutil.which(service.spec["healthcheck"]["test"][1]):
            return  # the server of the test, which is up
        deadline = time.monotonic() + START_S
        while not self.healthy(name):
            process = self.running.get(name)
            assert process is None or process.poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name)}"
            time.sleep(1)

    def _run(self, service, command):
        return subprocess.run(
            self._here(command), env=self._environment(service), cwd=self.folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip

    def _environment(self, service):
        """The file's, and of ours only what a container has, too. Its volume is a folder of its own."""
        home = self.folder / service.name
        home.mkdir(exist_ok=True)
        given = {name: self._place(str(value)) for name, value in service.spec["environment"].items()}
        if "PENNYWEIGHT_HOME" in given:
            given["PENNYWEIGHT_HOME"] = str(home)
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PGPORT": str(self.port),
            **given,
        }

    def _here(self, command):
        return [self._place(word) for word in command]

    def _place(self, text):
        for there, here in self.places.items():
            text = text.replace(there, here)
        return text


@pytest.fixture(scope="module")
def stack(postgres_server, valkey_server, tmp_path_factory, smollm2_gguf):
    """The running system. The engine's volume has the model already, as after its first start."""
    folder = tmp_path_factory.mktemp("compose")
    database = f"compose_{os.getpid()}"
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
    with redis.Redis.from_url(valkey_server.url()) as connection:
        connection.flushall()
    environment = {
        "POSTGRES_PASSWORD": postgres_server.password,
        "REDIS_PASSWORD": valkey_server.password,
        "PENNYWEIGHT_SECRET": "only-for-this-test",
    }
    postgres, valkey = urlsplit(postgres_server.url()), urlsplit(valkey_server.url())
    places = {
        "postgres:5432/pennyweight": f"{postgres.hostname}:{postgres.port}/{database}",
        "redis:6379": f"{valkey.hostname}:{valkey.port}",
        "0.0.0.0": "127.0.0.1",
        "8080": str(free_port()),
        "8501": str(free_port()),
    }
    models = folder / "engine" / "models"
    models.mkdir(parents=True)
    shutil.copy(smollm2_gguf, models)
    stack = Stack(folder, in_order(load(ROOT / "compose.yaml", environment)["services"]), places, postgres.port)
    try:
        stack.up()
        yield stack
    finally:
        stack.kill()
        with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {database} WITH (FORCE)")


def rows(stack, sql, *values):
    url = stack._environment(stack._service("service"))["PENNYWEIGHT_DATABASE_URL"]
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as connection:
        return connection.execute(sql, values).fetchall()


def eventually(look, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def test_a_request_goes_through_and_its_row_has_price_and_cost(stack):
    key = re.search(r"pw-\S+", stack.printed["bootstrap"])[0]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{stack.places['8080']}/v1", api_key=key, max_retries=0)
    model = eventually(lambda: client.models.list().data)[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content
    (row,) = eventually(lambda: rows(stack, "SELECT * FROM requests WHERE cost IS NOT NULL"))
    assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == (
        "completed", answer.usage.prompt_tokens, answer.usage.completion_tokens,
    )  # fmt: skip
    assert row["price"] > 0
    assert row["cost"] > 0
    assert eventually(lambda: rows(stack, "SELECT * FROM usage_15m")), "the background work rolled it up"


def test_bootstrap_prints_the_keys_only_once(stack):
    again = stack._run(stack._service("bootstrap"), stack._service("bootstrap").spec["command"])
    assert again.returncode == 0, again.stderr
    assert not re.search(r"pw-\S{20}", again.stdout)


def test_a_one_shot_service_writes_to_no_folder(stack):
    for service in stack.services:
        if service.ours and service.ends:
            assert list((stack.folder / service.name).iterdir()) == [], service.name


def test_every_process_drains_and_ends_by_itself_and_is_unhealthy_then(stack):
    assert stack.down() == dict.fromkeys(stack.running, 0)
    for name in stack.running:
        eventually(lambda name=name: not stack.healthy(name))
