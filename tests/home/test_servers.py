"""The embedded servers and the home they live in: real ones, killed and crowded."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from service.home.account import ELSEWHERE, database_account, reachable_binaries
from service.home.children import credentials
from service.home.errors import DiskFullError, HomeInUseError
from service.home.folder import Home
from service.home.ports import free_port
from service.home.postgres import Postgres, _install
from service.home.stores import Stores
from service.home.valkey import Valkey

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts PostgreSQL as another user")


MAIN = "import pathlib, sys; from tests.home import standin; standin.main(pathlib.Path(sys.argv[1]))"
# Root's own Python may lie where nobody can reach it: it is loaded first, and what is started later is another one.
AS_NOBODY = (
    "import encodings.idna, os, pathlib, pwd, sys; from tests.home import standin; sys.executable = {python!r}\n"
    "nobody = pwd.getpwnam('nobody'); os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)\n"
    "standin.main(pathlib.Path(sys.argv[1]))"
)


class StandIn:
    """The process of `standin.py`, and everything that it started."""

    def __init__(self, folder, code=MAIN):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("{"):
                urls = json.loads(line)
                self.database, self.redis = urls["database"], urls["redis"]
                break
        else:
            raise AssertionError("".join(self.said))
        self.started = psutil.Process(self.process.pid).children(recursive=True)

    def left_after(self, number, *, timeout=20, of=None):
        """Send a signal; what still runs when everything had time to end. Zombies of a lazy init don't run."""
        self.process.send_signal(number)
        self.process.wait(timeout)
        deadline = time.monotonic() + timeout
        while (alive := [p for p in of or self.started if runs(p)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remember(standin):
    with psycopg.connect(standin.database) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    with redis.Redis.from_url(standin.redis) as connection:
        connection.set("kept", "7")


def remembered(standin):
    with psycopg.connect(standin.database) as connection:
        row = connection.execute("SELECT n FROM kept").fetchone()
    with redis.Redis.from_url(standin.redis) as connection:
        return row[0], connection.get("kept")


def test_a_killed_supervisor_leaves_no_process_and_loses_nothing(open_folder):
    first = StandIn(open_folder / "home")
    assert len(first.started) >= 8  # guard, Valkey, PostgreSQL's own, the part and its child
    remember(first)
    assert first.left_after(signal.SIGKILL) == []
    second = StandIn(open_folder / "home")
    assert remembered(second) == (7, b"7")
    assert (second.database, second.redis) == (first.database, first.redis)  # same ports, same passwords
    assert second.left_after(signal.SIGTERM) == []
    assert second.process.returncode == 0


def test_a_supervisor_killed_with_its_guard_leaves_no_server(open_folder):
    standin = StandIn(open_folder / "home")
    (guard,) = [process for process in standin.started if "guard.py" in " ".join(process.cmdline())]
    guard.kill()
    servers = [process for process in standin.started if process.name() in {"postgres", "valkey-server"}]
    assert len(servers) >= 2
    assert standin.left_after(signal.SIGKILL, of=servers) == []
    for process in filter(runs, standin.started):  # what a part started itself is the guard's to end
        process.kill()


def test_a_folder_of_any_depth_will_do(open_folder, guard):
    deep = open_folder / ("d" * 200) / ("with space and ümlaut" * 8)
    with Home(deep) as home:
        stores = Stores(home, guard, home.secrets(), {})
        stores.start(print)
        assert psycopg.connect(stores.database_url).execute("SELECT 1").fetchone() == (1,)
        assert redis.Redis.from_url(stores.redis_url).ping()
        stores.stop()


def test_a_home_in_use_names_who_has_it(tmp_path):
    with Home(tmp_path / "home"), pytest.raises(HomeInUseError, match=f"in use by process {os.getpid()}"):
        Home(tmp_path / "home").__enter__()
    with Home(tmp_path / "home"):
        pass  # free again


def test_a_servers_port_that_somebody_took_moves_on(open_folder, guard):
    for server in (
        Postgres(open_folder / "postgres", "p", free_port(), log=open_folder / "p.log", guard=guard, durable=False),
        Valkey(open_folder / "valkey", "p", free_port(), log=open_folder / "v.log", guard=guard, durable=False),
    ):
        with socket.create_server(("127.0.0.1", server.port)):
            taken = server.port
            server.start(print)
            assert server.port != taken
            server.stop()


def test_a_pid_file_whose_number_is_now_somebody_elses_does_not_keep_the_server_down(open_folder, guard):
    server = Postgres(open_folder / "postgres", "p", free_port(), log=open_folder / "p.log", guard=guard, durable=False)
    server.start(print)
    pid_file = open_folder / "postgres/data/postmaster.pid"
    left = pid_file.read_text()
    os.kill(server.child.pid, signal.SIGKILL)
    server.child.wait(10)
    pid_file.write_text(re.sub(r"^\d+", str(os.getppid()), left))
    server.start(print)
    assert psycopg.connect(server.url()).execute("SELECT 1").fetchone() == (1,)
    server.stop()


def test_servers_listen_on_this_machine_only_and_ask_for_a_password(postgres_server, valkey_server):
    for server in (postgres_server, valkey_server):
        listening = [c.laddr.ip for c in psutil.Process(server.child.pid).net_connections() if c.status == "LISTEN"]
        assert set(listening) == {"127.0.0.1"}
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres_server.url().replace(postgres_server.password, "wrong"))
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=valkey_server.port).ping()


def test_no_file_of_a_home_can_be_read_by_others(open_folder, guard):
    with Home(open_folder / "home") as home:
        stores = Stores(home, guard, home.secrets(), {})
        stores.start(print)
        for path in home.folder.rglob("*"):
            readable = path.is_file() and "postgres" not in path.relative_to(home.folder).parts
            assert not (readable and path.stat().st_mode & 0o077), path
        assert (home.folder / "postgres").stat().st_mode & 0o077 == 0
        stores.stop()


def test_a_full_disk_is_one_clear_line(open_folder, guard):
    disk = open_folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        with Home(disk / "home") as home:
            stores = Stores(home, guard, home.secrets(), {})
            with pytest.raises(DiskFullError, match=r"^The disk is full, [^\n]*$"):
                stores.start(print)
            stores.stop()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@as_root
def test_a_home_that_the_database_user_cannot_reach_keeps_its_database_elsewhere(tmp_path, guard):
    assert tmp_path.parent.stat().st_mode & 0o077 == 0  # pytest's folders are for their owner alone
    server = Postgres(tmp_path / "postgres", "p", free_port(), log=tmp_path / "p.log", guard=guard, durable=False)
    modes = [parent.stat().st_mode for parent in tmp_path.parents]
    server.start(print)
    server.stop()
    place = (tmp_path / "postgres").readlink()
    assert place.parent == ELSEWHERE
    assert (place / "data/PG_VERSION").exists()
    assert [parent.stat().st_mode for parent in tmp_path.parents] == modes
    shutil.rmtree(place)


@as_root
def test_binaries_that_the_database_user_cannot_reach_are_copied(tmp_path):
    site = _install(None).parents[1]
    package = tmp_path / "site"
    shutil.copytree(_install(None), package / "pg")
    for path in (package / "pg").rglob("*"):
        path.chmod(0o700)
    account = database_account()
    assert reachable_binaries(site, [], probe=".", version="unused", account=account) == site
    copy = reachable_binaries(package, ["pg"], probe="pg/bin/postgres", version="test-copy", account=account)
    ran = subprocess.run(
        [copy / "pg/bin/postgres", "--version"], capture_output=True, check=False, **credentials(account)
    )
    shutil.rmtree(copy)
    assert ran.stdout.startswith(b"postgres (PostgreSQL) 18")


@as_root
def test_a_user_without_rights_starts_everything_as_themselves(open_folder):
    other_python = shutil.which("python3", path=os.defpath)
    if other_python is None or not Path(_install(None)).exists():
        pytest.skip("no Python that another user may run")
    home = open_folder / "theirs"
    home.mkdir()
    shutil.chown(home, "nobody")
    standin = StandIn(home, AS_NOBODY.format(python=other_python))
    assert {process.username() for process in standin.started if runs(process)} == {"nobody"}
    remember(standin)
    assert remembered(standin) == (7, b"7")
    assert standin.left_after(signal.SIGINT) == []
