"""The dashboard's login: a link works once, a session is a cookie that ends with its key, nothing else opens it."""

import pytest
from litestar.testing import TestClient

from billing import keys, sessions
from billing.database import open_database, transaction
from service.app import create_app
from service.login import COOKIE, dashboard_url
from service.settings import Settings


@pytest.fixture
def books(database_url):
    database = open_database(database_url)
    yield database
    database.dispose()


@pytest.fixture
def client(database_url, redis_url, tmp_path):
    environment = {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path),
        "PENNYWEIGHT_DASHBOARD_URL": "http://127.0.0.1:9501",
    }
    with TestClient(create_app(Settings.from_environment(environment)), base_url="http://ours") as running:
        running.follow_redirects = False
        yield running


def holds(books, session: str | None) -> bool:
    with transaction(books) as connection:
        return session is not None and sessions.session_holds(connection, session)


def test_a_link_logs_in_once_and_leads_to_the_dashboard_under_the_readers_host(client, books):
    with transaction(books) as connection:
        token = sessions.new_login_token(connection)
    first = client.get("/dashboard/login", params={"token": token})
    assert (first.status_code, first.headers["location"]) == (303, "http://ours:9501")
    assert "httponly" in first.headers["set-cookie"].lower()
    assert holds(books, first.cookies.get(COOKIE))
    client.cookies.clear()
    again = client.get("/dashboard/login", params={"token": token})
    assert again.status_code == 401
    assert COOKIE not in again.cookies


def test_only_an_admin_key_that_works_logs_in_and_its_session_ends_with_it(client, books):
    with transaction(books) as connection:
        admin = keys.create_key(connection, tenant_id=None, name="operator", scopes=(keys.Scope.ADMIN,), actor="test")
    for wrong in ("", "pw-nothing", "pw-" + "x" * 5000):
        answer = client.post("/dashboard/login", data={"key": wrong})
        assert (answer.status_code, COOKIE in answer.cookies) == (401, False)
        assert wrong not in answer.text or not wrong
    entered = client.post("/dashboard/login", data={"key": admin.secret})
    session = entered.cookies.get(COOKIE)
    assert entered.status_code == 303
    assert holds(books, session)
    with transaction(books) as connection:
        keys.revoke_key(connection, admin.prefix, actor="test")
    assert not holds(books, session)


def test_logging_out_ends_the_session_everywhere(client, books):
    with transaction(books) as connection:
        session = sessions.new_session(connection)
    client.cookies.set(COOKIE, session)
    assert client.get("/dashboard/logout").status_code == 200
    assert not holds(books, session)


def test_a_dashboard_elsewhere_is_reached_as_configured():
    assert dashboard_url("https://costs.example/x", "api.example") == "https://costs.example/x"
    assert dashboard_url("http://127.0.0.1:8501", "::1") == "http://[::1]:8501"
