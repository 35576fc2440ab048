"""Parts die with kill -9 while requests run: nothing is lost, nothing counts twice, no token repeats or is missing."""

import secrets
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from service.home.ports import free_port
from service.home.postgres import Postgres
from tests.scenarios.conftest import System, eventually, start_system

pytestmark = pytest.mark.slow


@pytest.fixture
def own_system(tmp_path):
    """A system that the scenario may break; short deadlines, so that the sweeper is seen at work."""
    running = start_system(
        tmp_path / "home",
        "--no-dashboard",
        PENNYWEIGHT_REQUEST_TIMEOUT_S="60",
        PENNYWEIGHT_SETTLE_GRACE_S="5",
        PENNYWEIGHT_DRAIN_S="10",
    )
    yield running
    running.stop()


def greedy(system: System, n: int, tokens: int) -> tuple[str, str, int]:
    """(request id, text, completion tokens) of one long greedy stream."""
    raw = system.client(timeout=120).completions.with_raw_response.create(
        model=system.model,
        prompt=f"Story number {n}: once upon a time",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, completion = "", 0
    for chunk in raw.parse():
        text += "".join(choice.text for choice in chunk.choices)
        completion = chunk.usage.completion_tokens if chunk.usage else completion
    return raw.headers["x-request-id"], text, completion


def kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        process.kill()


def test_streams_go_on_when_the_worker_is_killed(own_system: System):
    expected = [greedy(own_system, n, 96)[1] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(greedy, own_system, n, 96) for n in range(8)]
        time.sleep(2)
        kill(own_system.processes("engine.worker"))
        finished = [answer.result(timeout=120) for answer in answers]
    for (request_id, text, tokens), want in zip(finished, expected, strict=True):
        assert (text, tokens) == (want, 96)
        row = own_system.row(request_id, within=30)
        assert (row["status"], row["completion_tokens"], row["delivered_tokens"]) == ("completed", 96, 96)
    ids = [request_id for request_id, _, _ in finished]
    attempts = own_system.rows("SELECT max(attempts) AS n FROM requests WHERE id = ANY(%s::uuid[])", ids)
    assert attempts[0]["n"] == 2, "the kill came while they ran"


def test_requests_of_a_killed_api_process_are_settled_without_a_charge(own_system: System):
    broken = (httpx.HTTPError, openai.APIError)

    def one(n: int) -> bool:
        try:
            greedy(own_system, n, 400)
        except broken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(one, n) for n in range(8)]
        eventually(lambda: own_system.redis().zcard("pw:requests") == 8)
        kill(own_system.processes("spawn_main") or own_system.processes("service"))
        assert not any(answer.result(timeout=120) for answer in answers)

    def all_settled():
        rows = own_system.rows("SELECT status, price, count(*) AS n FROM requests GROUP BY 1, 2")
        return rows if sum(row["n"] for row in rows) == 8 else None

    (group,) = eventually(all_settled, within=90)
    assert (group["status"], group["price"]) == ("failed", 0)
    eventually(lambda: not own_system.redis().zcard("pw:requests"), within=30)
    eventually(own_system.ready, within=30)


@pytest.fixture
def postgres(server_folder, guard):
    """A Postgres that nobody restarts but the scenario."""
    server = Postgres(
        server_folder / "postgres-apart",
        secrets.token_hex(8),
        free_port(),
        log=server_folder / "postgres-apart.log",
        guard=guard,
    )
    server.start(print)
    yield server
    server.stop()


@pytest.fixture
def system_apart(postgres, tmp_path):
    running = start_system(tmp_path / "home", "--no-dashboard", PENNYWEIGHT_DATABASE_URL=postgres.url())
    yield running
    running.stop()


def test_every_request_has_one_row_though_postgres_and_redis_go_away(system_apart: System, postgres):
    answered: Counter[int] = Counter()
    lock = threading.Lock()
    body = {"model": system_apart.model, "prompt": [1, 2, 3, 4], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {system_apart.bootstrap['api_key']}"}

    def one() -> None:
        response = httpx.post(f"{system_apart.api}/v1/completions", json=body, headers=headers, timeout=90)
        with lock:
            answered[response.status_code] += 1

    def load(seconds: float) -> None:
        """Twenty requests a second."""
        with ThreadPoolExecutor(64) as pool:
            for _ in range(int(seconds * 20)):
                pool.submit(one)
                time.sleep(0.05)

    load(2)
    loader = threading.Thread(target=load, args=(40,))
    loader.start()
    time.sleep(3)
    postgres.child.stop((signal.SIGQUIT, 30))  # pg_ctl's "immediate": no checkpoint, recovery at the next start
    time.sleep(20)
    postgres.start(print)
    time.sleep(5)
    kill(system_apart.processes("valkey-server"))
    loader.join()
    # A request that failed after its admission has a row as well; a refused one has none.
    sql = "SELECT count(*) AS n, count(*) FILTER (WHERE status = 'completed') AS completed FROM requests"
    eventually(lambda: system_apart.rows(sql)[0]["completed"] >= answered[200], within=60)
    print(answered, system_apart.rows(sql))
    assert system_apart.rows(sql)[0]["completed"] == answered[200] > 600
    assert "0 don't close" in system_apart.run("audit")
