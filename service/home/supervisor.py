"""Starts the parts of a system, keeps them running, and ends them in order.

One thread does it all, in a loop that looks at every child some times a second. A part that dies is started again at
once, and when it keeps dying, after waits that double.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from signal import Signals
from typing import Final

from service.home.children import Child, Say, last_line
from service.home.errors import HomeError

_LOOK_EVERY_S: Final = 0.1
_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 30.0
_STEADY_S: Final = 60.0  # a part that ran so long starts with a clean record
_TRIES: Final = 3
_UNUSABLE: Final = 2  # exit code of a process that will not do better the next time: configuration, usage
_SHOW_LINES: Final = 5
_LOGS_EVERY_S: Final = 10.0
_HURRIED_S: Final = 1.0


class Stage(IntEnum):
    """The order in which parts end: a part may need those of a higher stage until it has ended."""

    TRAFFIC = 1
    RECORDS = 2
    STORE = 3


@dataclass(slots=True, kw_only=True)
class Part:
    """One process to keep running, and what has become of it."""

    child: Child
    stage: Stage
    ready: Callable[
        [float], bool
    ]  # quick; asked while it starts, with the time of day (seconds) at which it was started
    stop: Sequence[tuple[Signals, float]]  # each signal and the seconds it gets; then SIGKILL
    before_restart: Callable[[], None] = lambda: None
    started: float = field(default=0.0, init=False)  # monotonic
    started_at: float = field(default=0.0, init=False)  # time of day
    is_ready: bool = field(default=False, init=False)
    deaths: int = field(default=0, init=False)
    start_at: float | None = field(default=None, init=False)  # monotonic; None: running

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def hopeless(self) -> bool:
        """It was never ready since its start, and will not be."""
        return not self.is_ready and (self.deaths >= _TRIES or self.child.returncode == _UNUSABLE)

    def start(self) -> None:
        self.started, self.started_at = time.monotonic(), time.time()
        self.is_ready, self.start_at = False, None
        self.child.start()

    def died(self) -> None:
        """Note the death and when to start again: the first time at once."""
        now = time.monotonic()
        self.deaths = 1 if self.is_ready and now - self.started > _STEADY_S else self.deaths + 1
        wait_s = 0.0 if self.deaths == 1 else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (self.deaths - 2))
        self.start_at = now + wait_s


class Supervisor:
    """Owns the running parts. ``stopping`` says that the user wants an end, ``hurried`` that they want it soon."""

    def __init__(
        self, say: Say, *, stopping: Callable[[], bool], hurried: Callable[[], bool], buried: Callable[[], None]
    ) -> None:
        """``buried`` is called after each death of a child, to tidy what it left."""
        self._say = say
        self._stopping = stopping
        self._hurried = hurried
        self._buried = buried
        self._starting = True
        self._parts: list[Part] = []
        self._logs_checked = time.monotonic()

    def adopt(self, part: Part) -> None:
        """Keep a part running that somebody has started already."""
        part.started, part.is_ready = time.monotonic(), True
        self._parts.append(part)

    def start(self, part: Part) -> None:
        self._parts.append(part)
        part.start()

    def wait_ready(self, also: Callable[[], bool]) -> bool:
        """Return when every part is ready and ``also`` says so: True; or when the user wants to stop: False.

        Raises HomeError when a part ends for good before it was ever ready.
        """
        while not self._stopping():
            self._look()
            if all(part.is_ready for part in self._parts) and also():
                self._starting = False
                return True
            time.sleep(_LOOK_EVERY_S)
        return False

    def watch(self) -> None:
        """Keep everything running until the user wants to stop."""
        while not self._stopping():
            self._look()
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """End the parts, stage by stage; those of one stage together."""
        for stage in Stage:
            _end_together([part for part in self._parts if part.stage is stage], self._hurried, self._say)

    def _look(self) -> None:
        now = time.monotonic()
        for part in self._parts:
            if part.start_at is not None:
                if now >= part.start_at:
                    part.before_restart()
                    part.start()
            elif not part.child.alive():
                self._bury(part)
            elif not part.is_ready and part.ready(part.started_at):
                part.is_ready = True
                self._say(f"{part.name:<12} ready after {time.monotonic() - part.started:.1f} s")
        if now - self._logs_checked > _LOGS_EVERY_S:
            self._logs_checked = now
            for part in self._parts:
                part.child.bound_log()

    def _bury(self, part: Part) -> None:
        part.died()
        if self._starting and part.hopeless:
            raise HomeError(f"{part.name} {_ending(part)}; log: {part.child.log}")
        assert part.start_at is not None
        wait_s = part.start_at - time.monotonic()
        again = "now" if wait_s <= 0 else f"in {wait_s:.0f} s"
        self._say(f"{part.name:<12} {_ending(part)}, starting it again {again}; log: {part.child.log}")
        if part.deaths >= _TRIES:
            for line in part.child.output().splitlines()[-_SHOW_LINES:]:
                self._say(f"{'':<12} | {line[:200]}")
        self._buried()


def _ending(part: Part) -> str:
    """How it ended, and why as far as its last line tells: a killed process says nothing about it."""
    code = part.child.returncode or 0
    return f"ended by {Signals(-code).name}" if code < 0 else f"ended with exit code {code} ({_last_words(part.child)})"


def _last_words(child: Child) -> str:
    """The last line of its log, or of a line in JSON its event and why."""
    line = last_line(child.output())
    try:
        said = json.loads(line)
        line = ", ".join(str(said[name]) for name in ("event", "reason", "error") if said.get(name)) or line
    except (ValueError, AttributeError):
        pass
    return line[:200]


def _end_together(parts: Sequence[Part], hurried: Callable[[], bool], say: Say) -> None:
    """Each part gets its signals in turn, all parts at the same time."""
    running = {part.name: part for part in parts if part.child.alive()}
    steps = {name: iter(part.stop) for name, part in running.items()}
    until = dict.fromkeys(running, 0.0)
    while running:
        now = time.monotonic()
        for name, part in list(running.items()):
            if not part.child.alive():
                del running[name]
            elif now >= until[name] or (hurried() and until[name] > now + _HURRIED_S):
                step = next(steps[name], None)
                if step is None:
                    say(f"{name:<12} does not end by itself: killed")
                    part.child.stop()
                else:
                    part.child.send(step[0])
                    until[name] = now + (_HURRIED_S if hurried() else step[1])
        time.sleep(0.02)
