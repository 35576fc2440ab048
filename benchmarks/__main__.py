"""`make bench`: the workload in-process, then through a running service, beside this machine's limits in the same run.

python -m benchmarks [--home FOLDER]      FOLDER: a system that runs already; else one is started for the run

The same prompts come again and again, so the prefix cache is off: what is compared is computing. A system of your own
must be started with PENNYWEIGHT_PREFIX_CACHE=0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from service.home.model import default_gguf

START_S = 300.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ready(home: Path) -> bool:
    try:
        api = json.loads((home / "bootstrap.json").read_bytes())["api_url"]
        return httpx.get(f"{api}/health/ready", timeout=2).status_code == 200
    except (OSError, ValueError, httpx.HTTPError):
        return False


@contextmanager
def running_system() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        command = [sys.executable, "-m", "service.cli", "up", "--no-dashboard", "--port", str(free_port())]
        environment = os.environ | {"PENNYWEIGHT_HOME": str(home), "PENNYWEIGHT_PREFIX_CACHE": "0"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_S
            while not ready(home):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"The system did not start: {' '.join(command)}")
                time.sleep(0.5)
            yield home
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def run(*module: str) -> None:
    subprocess.run([sys.executable, "-m", *module], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path)
    arguments = parser.parse_args()
    print("The engine alone, in-process, and the limits of this machine", flush=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pennyweight"
    run("benchmarks.engine", "--model", str(default_gguf(cache, print)))
    print("\nThrough the running service", flush=True)
    if arguments.home:
        run("benchmarks.service", "--home", str(arguments.home))
        return
    with running_system() as home:
        run("benchmarks.service", "--home", str(home))


if __name__ == "__main__":
    main()
