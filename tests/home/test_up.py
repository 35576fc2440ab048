"""`pennyweight up` as a user meets it: what it says when it can't start, and what it leaves when it must end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import psycopg
import pytest

from service.home.folder import Home
from service.home.ports import free_port, is_free
from tests.home.test_servers import runs

UP = [sys.executable, "-m", "service.cli", "up"]


def up(home, *words, **environment):
    """Run to the end. (exit code, the lines on stderr)"""
    done = subprocess.run(
        [*UP, "--home", str(home), *words],
        env=clean(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.strip().splitlines()


def clean(environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENNYWEIGHT_")}
    return {**inherited, **environment}


def ports():
    return ["--port", str(free_port()), "--dashboard-port", str(free_port())]


def test_a_port_that_is_taken_is_one_line_that_names_a_free_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, (line,) = up(tmp_path / "home", "--port", str(port))
    assert code == 1
    assert f"Port {port} is taken" in line
    free = int(line.split("--port ")[1].split()[0])
    assert is_free(free)


def test_a_home_in_use_is_one_line_that_names_its_process(tmp_path):
    with Home(tmp_path / "home"):
        code, (line,) = up(tmp_path / "home", *ports())
    assert code == 1
    assert f"in use by process {os.getpid()}" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "/no/such.gguf"], "No model at /no/such.gguf"),
        (["--model", "."], "is no model"),
        (["--device", "tpu"], "takes auto, cpu, cuda or cuda:N"),
        (["--port", "8501"], "can't share port 8501"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(tmp_path, words, said):
    code, (line,) = up(tmp_path / "home", *words)
    assert code == 1
    assert said in line
    assert not (tmp_path / "home/postgres").exists()


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("PENNYWEIGHT_DATABASE_URL", "postgresql://user:hidden@127.0.0.1:1/none"),
        ("PENNYWEIGHT_DATABASE_URL", "hidden"),
        ("PENNYWEIGHT_REDIS_URL", "redis://:hidden@127.0.0.1:1/0"),
    ],
)
def test_a_server_of_ones_own_that_does_not_answer_is_one_line_without_its_password(
    tmp_path, variable, url, smollm2_gguf
):
    code, (line,) = up(tmp_path / "home", *ports(), "--model", str(smollm2_gguf), **{variable: url})
    assert code == 1
    assert variable in line
    assert "hidden" not in line


def test_cuda_without_a_gpu_is_one_line(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, (line,) = up(tmp_path / "home", *ports(), "--device", "cuda")
    assert code == 1
    assert line.startswith("Error: --device cuda: ")


class Up:
    """A running `pennyweight up`, ready for requests."""

    def __init__(self, home, *words):
        self.home = home
        self.output = home.with_suffix(".out")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*UP, "--home", str(home), *words], env=clean({}), stdout=output, stderr=subprocess.STDOUT
            )
        self.until(lambda: "Pennyweight is ready." in self.said(), within=120)
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        self.bootstrap = json.loads((home / "bootstrap.json").read_bytes())

    def said(self):
        return self.output.read_text()

    def until(self, condition, *, within):
        deadline = time.monotonic() + within
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def complete(self, **options):
        body = {"model": self.bootstrap["model"], "prompt": "Once", "max_tokens": 4, **options}
        headers = {"Authorization": f"Bearer {self.bootstrap['api_key']}"}
        return httpx.post(f"{self.bootstrap['api_url']}/v1/completions", json=body, headers=headers, timeout=60)

    def snippet(self, start, end):
        """What the greeting offers to paste."""
        said = self.said()
        return said[said.index(start, said.index("Try it")) :].split(end)[0]

    def left_after(self, number):
        self.process.send_signal(number)
        self.process.wait(60)
        deadline = time.monotonic() + 10
        while (left := list(filter(runs, self.started))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def pasted(snippet, *interpreter):
    done = subprocess.run([*interpreter, snippet], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_system_leaves_nothing_and_the_next_one_keeps_keys_and_books(open_folder, smollm2_gguf):
    words = [*ports(), "--no-dashboard", "--processes", "1", "--model", str(smollm2_gguf)]
    first = Up(open_folder / "home", *words)
    assert first.complete().json()["usage"]["completion_tokens"] == 4
    assert (open_folder / "home/bootstrap.json").stat().st_mode & 0o077 == 0
    assert set(first.bootstrap) == {
        "api_url", "api_key", "admin_key", "dashboard_url", "database_url", "redis_url", "model",
    }  # fmt: skip
    assert first.bootstrap["dashboard_url"] is None
    assert '"object":"chat.completion"' in pasted(first.snippet("curl ", "\n\n"), "/bin/sh", "-c")
    assert pasted(first.snippet("from openai", "\n\nPrices"), sys.executable, "-c")
    assert first.left_after(signal.SIGKILL) == []

    second = Up(open_folder / "home", *words)
    assert second.bootstrap == first.bootstrap
    assert second.complete().status_code == 200
    with psycopg.connect(second.bootstrap["database_url"]) as connection:
        counts = "SELECT (SELECT count(*) FROM tenants), (SELECT count(*) FROM api_keys), (SELECT count(*) FROM prices)"
        assert connection.execute(counts).fetchone() == (1, 2, 1)

    worker = next(process for process in second.started if "engine.worker" in " ".join(process.cmdline()))
    worker.kill()
    second.until(lambda: "engine       ready" in second.said().split("SIGKILL")[-1], within=30)
    assert second.complete().status_code == 200
    assert second.left_after(signal.SIGTERM) == []
    assert second.process.returncode == 0
