"""`pennyweight up`: the sequence from a folder to a running system, and back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals

from service.home import metrics, readiness, roster
from service.home.checks import check_device, check_ports
from service.home.children import Guard, Say
from service.home.folder import NO_SPACE, Bootstrap, Home, cannot_write
from service.home.greeting import greeting
from service.home.model import Model, find_model
from service.home.stores import Stores
from service.home.supervisor import Supervisor
from service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    home: Path
    port: int
    dashboard_port: int | None  # None: no dashboard
    processes: int
    model: str | None
    device: str
    weights: str = "auto"


class Stop(BaseException):
    """The user wants an end while the system is still starting. Like KeyboardInterrupt no error."""


class Wish:
    """Whether the user wants an end: the first signal says so, a second that it should be soon."""

    def __init__(self) -> None:
        self._signals = 0
        self._raises = True

    def stopping(self) -> bool:
        return self._signals > 0

    def hurried(self) -> bool:
        return self._signals > 1

    def polled(self) -> None:
        """From now on somebody looks; until now the first signal interrupts whatever runs."""
        self._raises = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take over the signals that ask for an end, but none that nohup or a shell made us ignore."""
        asking = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP)
        numbers = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, _number: int, _frame: object) -> None:
        self._signals += 1
        if self._raises and self._signals == 1:
            raise Stop


def run(options: Options, *, say: Say, show: Say, environment: Mapping[str, str] = os.environ) -> None:
    """Start everything, keep it running until a signal asks for an end, end it. Raises HomeError.

    ``say`` gets a line for each step, ``show`` the greeting when all of it runs.
    """
    os.umask(0o077)
    wish = Wish()
    with wish.heard(), suppress(Stop), Home(options.home) as home:
        guard = Guard(home.run / "guard.lock", say)
        system = System(options, home=home, guard=guard, wish=wish, say=say, show=show, environment=environment)
        try:
            system.run()
        except OSError as error:
            if error.errno in NO_SPACE:
                raise cannot_write(options.home, error) from error
            raise
        finally:
            wish.polled()
            system.stop()
            guard.close()


class System:
    """One run: what was started, and what ends it again."""

    def __init__(
        self,
        options: Options,
        *,
        home: Home,
        guard: Guard,
        wish: Wish,
        say: Say,
        show: Say,
        environment: Mapping[str, str],
    ) -> None:
        self._options = options
        self._home = home
        self._guard = guard
        self._wish = wish
        self._say = say
        self._show = show
        self._environment = environment
        self._secrets = home.secrets()
        self._started = False
        self._stores = Stores(home, guard, self._secrets, environment)
        self._supervisor = Supervisor(
            say, stopping=wish.stopping, hurried=wish.hurried, buried=partial(metrics.bury, home.metrics)
        )

    def run(self) -> None:
        """Raises HomeError; returns when the user wanted an end."""
        began = time.time()
        check_ports(self._options.port, self._options.dashboard_port)
        check_device(self._options.device)
        metrics.empty(self._home.metrics)
        model = find_model(self._options.model, self._home.models, self._say)
        if name := self._environment.get("PENNYWEIGHT_MODEL_NAME"):
            model = replace(model, name=name)
        self._started = True
        self._stores.start(self._say)
        for part in self._stores.parts():
            self._supervisor.adopt(part)
        plan = self._plan(model)
        self._supervisor.start(roster.engine(plan))  # it loads its model while the tables are made
        self._open_books(plan)
        for part in roster.others(plan):
            self._supervisor.start(part)
        self._wish.polled()
        if self._supervisor.wait_ready(partial(readiness.answers, f"{plan.api_url}/health/ready")):
            self._say(f"{'everything':<12} ready after {time.time() - began:.1f} s")
            self._greet(plan, since=began)
            self._supervisor.watch()

    def stop(self) -> None:
        if not self._started:
            return
        drains = self._wish.stopping()
        self._say("stopping; running requests are finished first (Ctrl-C again: sooner)" if drains else "stopping")
        self._supervisor.stop()
        self._stores.stop()
        self._say("stopped")

    def _open_books(self, plan: roster.Plan) -> None:
        from service.home.books import open_books  # noqa: PLC0415 — half a second, in which the engine starts already

        started = time.monotonic()
        open_books(self._stores.database_url, self._home, self._secrets, model=plan.model.name)
        self._say(f"{'books':<12} ready after {time.monotonic() - started:.1f} s")
        if self._home.bootstrap():  # the other commands find the system by it
            self._home.keep_bootstrap(self._bootstrap(plan))

    def _greet(self, plan: roster.Plan, *, since: float) -> None:
        from service.home.books import login_token, rate_device  # noqa: PLC0415 — see above

        worker = readiness.serving_worker(plan.redis_url, since)
        device_kind = worker.device_kind if worker else "cpu"
        rate_device(self._stores.database_url, device_kind)
        bootstrap = self._bootstrap(plan)
        self._home.keep_bootstrap(bootstrap)
        login_url = None
        if plan.dashboard_url:
            login_url = f"{plan.api_url}/dashboard/login?token={login_token(self._stores.database_url)}"
        self._show(greeting(bootstrap, home=self._home.folder, login_url=login_url, device_kind=device_kind))

    def _bootstrap(self, plan: roster.Plan) -> Bootstrap:
        return Bootstrap(
            api_url=plan.api_url,
            api_key=self._secrets.api_key,
            admin_key=self._secrets.admin_key,
            dashboard_url=plan.dashboard_url,
            database_url=self._stores.database_url,
            redis_url=self._stores.redis_url,
            model=plan.model.name,
        )

    def _plan(self, model: Model) -> roster.Plan:
        urls = {"PENNYWEIGHT_DATABASE_URL": self._stores.database_url, "PENNYWEIGHT_REDIS_URL": self._stores.redis_url}
        environment = {
            **self._environment,
            **urls,
            "PENNYWEIGHT_HOME": str(self._home.folder),
            "PENNYWEIGHT_SECRET": self._environment.get("PENNYWEIGHT_SECRET") or self._secrets.encryption,
            "PYTHONUNBUFFERED": "1",
            metrics.VARIABLE: str(self._home.metrics),
        }
        return roster.Plan(
            home=self._home,
            guard=self._guard,
            environment=environment,
            redis_url=self._stores.redis_url,
            api_port=self._options.port,
            dashboard_port=self._options.dashboard_port,
            processes=self._options.processes,
            model=model,
            device=self._options.device,
            weights=self._options.weights,
            drain_s=Settings.from_environment(environment).drain_s,
        )
