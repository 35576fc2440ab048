"""The supervisor with small real processes in the place of the system's own."""

import os
import signal
import sys
import time
from signal import Signals

import psutil
import pytest

from service.home.children import Child, Guard
from service.home.errors import HomeError
from service.home.supervisor import Part, Stage, Supervisor

STAY = "import time; print('here', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {STAY!r}]); {STAY}"
FAIL = "import sys; print('no such weights'); sys.exit(3)"


class Scene:
    """A supervisor, what it said, and the wish that a test steers."""

    def __init__(self, folder):
        self.said = []
        self.signals = 0
        self.folder = folder
        self.guard = Guard(folder / "guard.lock", self.said.append)
        self.buried = 0
        self.supervisor = Supervisor(
            self.said.append, stopping=lambda: self.signals > 0, hurried=lambda: self.signals > 1, buried=self.bury
        )

    def bury(self):
        self.buried += 1

    def part(self, name, code, *, stage=Stage.TRAFFIC, patience=5.0):
        child = Child(name, [sys.executable, "-c", code], guard=self.guard, log=self.folder / f"{name}.log")
        return Part(
            child=child, stage=stage, ready=lambda _: "here" in child.output(), stop=[(Signals.SIGTERM, patience)]
        )

    def start(self, *parts):
        for part in parts:
            self.supervisor.start(part)
        assert self.supervisor.wait_ready(lambda: True)

    def look_until(self, condition):
        """Let the supervisor do its rounds until the condition holds."""
        deadline = time.monotonic() + 20
        self.supervisor._stopping = lambda: condition() or time.monotonic() > deadline
        self.supervisor.watch()
        assert condition(), self.said


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path)
    yield scene
    scene.supervisor.stop()
    scene.guard.close()


def test_a_killed_part_is_back_at_once_and_one_line_tells_of_it(scene):
    part = scene.part("engine", STAY)
    scene.start(part)
    first = part.child.pid
    os.kill(first, signal.SIGKILL)
    scene.look_until(lambda: part.child.pid != first and part.is_ready)
    told = [line for line in scene.said if "SIGKILL" in line]
    assert len(told) == 1
    assert "engine" in told[0]
    assert str(part.child.log) in told[0]
    assert scene.buried == 1


def test_a_part_that_keeps_dying_waits_longer_each_time_and_shows_its_last_lines(scene):
    part = scene.part("recorder", STAY)
    scene.start(part)
    waits = []
    for _ in range(4):
        part.died()
        waits.append(round(part.start_at - time.monotonic()))
    assert waits == [0, 1, 2, 4]
    part.start_at = None
    os.kill(part.child.pid, signal.SIGKILL)
    scene.look_until(lambda: part.deaths == 5)
    assert any("| here" in line for line in scene.said)


def test_a_part_that_dies_at_every_start_ends_the_start_with_its_reason(scene):
    scene.supervisor.start(scene.part("engine", FAIL))
    with pytest.raises(HomeError, match=r"engine ended with exit code 3 \(no such weights\); log: .*engine\.log"):
        scene.supervisor.wait_ready(lambda: True)


def test_the_end_of_a_part_is_the_end_of_its_own_children(scene):
    part = scene.part("API", PARENT)
    scene.start(part)
    grandchildren = psutil.Process(part.child.pid).children()
    assert len(grandchildren) == 1
    os.kill(part.child.pid, signal.SIGKILL)
    scene.look_until(lambda: part.deaths == 1)
    gone, alive = psutil.wait_procs(grandchildren, timeout=5)
    assert (len(gone), alive) == (1, [])


def test_what_carries_traffic_ends_before_what_records_it(scene):
    ends = scene.folder / "ends"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep({delay}); open({path!r}, 'a').write('{name} '); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('here', flush=True)\n"
        "while True: time.sleep(60)"
    )
    parts = [
        scene.part(name, code.format(delay=delay, path=str(ends), name=name), stage=stage)
        for name, delay, stage in [
            ("recorder", 0, Stage.RECORDS),
            ("API", 0.3, Stage.TRAFFIC),
            ("store", 0, Stage.STORE),
        ]
    ]
    scene.start(*parts)
    scene.supervisor.stop()
    assert ends.read_text().split() == ["API", "recorder", "store"]


def test_a_part_that_ignores_sigterm_is_killed_after_its_patience_and_sooner_in_a_hurry(scene):
    patient, hurried = scene.part("tasks", DEAF, patience=0.2), scene.part("API", DEAF, patience=3600)
    scene.start(patient, hurried)
    scene.signals = 2
    scene.supervisor.stop()
    assert not patient.child.alive()
    assert not hurried.child.alive()
    assert sum("does not end by itself" in line for line in scene.said) == 2


def test_a_log_that_grows_is_moved_aside_and_the_process_writes_on(scene, monkeypatch):
    monkeypatch.setattr("service.home.children._LOG_BYTES", 10_000)
    part = scene.part(
        "API", "import time\nprint('here', 'x' * 20000, flush=True)\ntime.sleep(1)\nprint('later', flush=True)\n" + STAY
    )
    scene.start(part)
    part.child.bound_log()
    scene.look_until(lambda: "later" in part.child.output())
    assert part.child.log.stat().st_size < 1000
    assert (
        part.child.log.with_name("api.log.1" if part.child.log.name == "api.log" else "API.log.1").stat().st_size
        > 20_000
    )
