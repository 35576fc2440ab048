"""A small system in a process of its own, for tests that kill it: `python -m tests.home.standin FOLDER`.

Home, guard, PostgreSQL and Valkey are the real ones; one part with a child of its own stands for the rest. When all of
it runs it prints one line of JSON.
"""

import json
import signal
import sys
import threading
from pathlib import Path

from service.home.children import Child, Guard
from service.home.folder import Home
from service.home.stores import Stores
from service.home.supervisor import Part, Stage, Supervisor
from tests.home.test_supervisor import PARENT


def main(folder: Path) -> None:
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with Home(folder) as home:
        guard = Guard(home.run / "guard.lock", print)
        stores = Stores(home, guard, home.secrets(), {})
        stores.start(print)
        supervisor = Supervisor(print, stopping=stopping.is_set, hurried=lambda: False, buried=lambda: None)
        for part in stores.parts():
            supervisor.adopt(part)
        child = Child("rest", [sys.executable, "-c", PARENT], guard=guard, log=home.logs / "rest.log")
        stop = [(signal.SIGTERM, 5.0)]
        supervisor.start(
            Part(child=child, stage=Stage.TRAFFIC, ready=lambda _: child.output().count("here") == 2, stop=stop)
        )
        supervisor.wait_ready(lambda: True)
        print(json.dumps({"database": stores.database_url, "redis": stores.redis_url}), flush=True)
        supervisor.watch()
        supervisor.stop()
        guard.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
