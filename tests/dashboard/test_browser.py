"""The dashboard in a real browser: logging in, both pages, numbers that are the books', and what is away."""

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest

from billing import economics, sessions
from billing.database import open_database, transaction
from billing.recording import record
from dashboard import figures
from dashboard.login import COOKIE
from dashboard.requests_page import OPEN
from tests.conftest import _database as fresh_database
from tests.dashboard.business import TENANTS, Business, now

CHROMIUM = shutil.which("chromium")
WAIT_MS = 30_000
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]


@contextmanager
def served(database_url):
    """The dashboard as its own process; yields its URL. It must end cleanly on SIGTERM, browsers connected or not."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    code = f"from dashboard.launch import run; run(database_url={database_url!r}, api_url='http://ours', port={port})"
    process = subprocess.Popen([sys.executable, "-P", "-c", code])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url
        process.terminate()
        assert process.wait(timeout=15) == 0
    finally:
        process.kill()


@pytest.fixture(scope="module")
def books_url(postgres_server, template_database):
    yield from fresh_database(postgres_server, template_database)


@pytest.fixture(scope="module")
def books(books_url):
    database = open_database(books_url)
    with transaction(database) as connection:
        business = Business(seed=7)
        business.open(connection, examples=True)
        business.run(connection, now() - timedelta(hours=3), now(), per_hour=60)
    yield database, business
    database.dispose()


@pytest.fixture(scope="module")
def site(books, books_url):
    with served(books_url) as url:
        yield url


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def browser(chromium):
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    context.set_default_timeout(WAIT_MS)
    yield context
    context.close()


def log_in(browser, database, site):
    """Returns the session."""
    with transaction(database) as connection:
        session = sessions.new_session(connection)
    browser.add_cookies([{"name": COOKIE, "value": session, "url": site}])
    return session


def tenants_shown(page):
    return {row.split("\t")[2] for row in page.locator("tr[data-id]").all_inner_texts()}


def test_nothing_is_shown_without_a_session_that_holds_and_a_reload_keeps_one(browser, books, site):
    database, _ = books
    page = browser.new_page()
    page.goto(site)
    page.get_by_text("You are not logged in").wait_for()
    assert page.get_by_role("link", name="Log in").get_attribute("href") == "http://ours/dashboard/login"
    assert page.get_by_text("Revenue").count() == 0
    session = log_in(browser, database, site)
    page.goto(f"{site}/requests")
    page.locator("tr[data-id]").first.wait_for()
    page.reload()
    page.locator("tr[data-id]").first.wait_for()
    with transaction(database) as connection:
        sessions.end_session(connection, session)
    page.get_by_text("You are not logged in").wait_for()
    assert page.locator("tr[data-id]").count() == 0


def test_the_numbers_on_the_page_are_the_books_and_nothing_is_loaded_from_elsewhere(browser, books, site):
    log_in(browser, books[0], site)
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}/?range=24+hours")
    page.get_by_role("heading", name="By model").wait_for()
    page.locator("td").first.wait_for()
    with transaction(books[0]) as connection:
        report = economics.report(connection, now() - timedelta(hours=24), now())
    text = page.inner_text("body")
    total, loaded = report.total, report.device_time.costs.total
    for amount in (
        total.revenue,
        total.cost,
        total.margin,
        loaded,
        total.revenue - loaded,
        report.device_time.costs.idle,
    ):
        assert figures.money(amount, report.currency) in text
        assert amount != 0
    assert figures.percent(report.device_time.utilisation) in text
    assert figures.short_count(total.prompt_tokens) in text
    for line in report.tenants:
        row = page.locator("tr", has_text=line.tenant).inner_text().split("\t")
        assert row[1] == figures.count(line.requests)
        assert row[5:8] == [figures.money(a, report.currency) for a in (line.revenue, line.cost, line.loaded_cost)]
    assert "charged by example prices" in text
    assert "example device rates" in text
    assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []


def test_a_finished_request_appears_by_itself_and_opens_by_a_click(browser, books, site):
    database, business = books
    log_in(browser, database, site)
    page = browser.new_page()
    page.goto(f"{site}/requests")
    page.locator("tr[data-id]").first.wait_for()
    settlement, attempts = business.request(now(), tenant=TENANTS[0])
    with transaction(database) as connection:
        record(connection, settlements=[settlement], attempts=attempts)
    row = page.locator(f'tr[data-id="{settlement.request_id}"]')
    row.wait_for(timeout=10_000)
    row.click()
    page.get_by_text("Price and cost").wait_for()
    page.wait_for_url(re.compile(f"{OPEN}={settlement.request_id}"))
    page.get_by_text(settlement.origin.trace_id).wait_for()
    page.reload()
    page.get_by_text(settlement.origin.trace_id).wait_for()
    page.goto(f"{site}/requests?{OPEN}=rubbish")
    page.get_by_text("This is not the id of a request").wait_for()


def test_filters_and_pages_stay_through_an_opened_request_and_a_reload(browser, books, site):
    log_in(browser, books[0], site)
    page = browser.new_page()
    page.goto(f"{site}/requests?tenant={TENANTS[1].replace(' ', '+')}")
    page.locator("tr[data-id]").first.wait_for()
    assert tenants_shown(page) == {TENANTS[1]}
    page.locator("tr[data-id]").nth(1).click()
    page.get_by_role("button", name="All requests").click()
    page.locator("tr[data-id]").first.wait_for()
    assert tenants_shown(page) == {TENANTS[1]}
    page.goto(f"{site}/requests")
    page.locator("tr[data-id]").first.wait_for()
    newest = page.locator("tr[data-id]").first.get_attribute("data-id")
    page.get_by_role("button", name="Older").click()
    page.get_by_text("51 –").wait_for()
    assert page.locator(f'tr[data-id="{newest}"]').count() == 0
    page.get_by_role("button", name="Newer").click()
    page.locator(f'tr[data-id="{newest}"]').wait_for()


def test_a_database_that_goes_away_is_a_note_and_comes_back_by_itself(browser, books, site, postgres_server):
    database, _ = books
    log_in(browser, database, site)
    page = browser.new_page()
    page.goto(f"{site}/requests")
    page.locator("tr[data-id]").first.wait_for()
    name = str(database.pool.connect().driver_connection.info.dbname)
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as operator:
        operator.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        operator.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        page.get_by_text("The database does not answer").wait_for()
        assert "Traceback" not in page.inner_text("body")
        operator.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    page.locator("tr[data-id]").first.wait_for()
    assert page.get_by_text("The database does not answer").count() == 0


def test_books_without_a_request_say_what_to_do(browser, database_url):
    database = open_database(database_url)
    with served(database_url) as site:
        log_in(browser, database, site)
        page = browser.new_page()
        page.goto(site)
        page.get_by_text("No requests in this range").wait_for()
        page.goto(f"{site}/requests")
        page.get_by_text("No request in this time range").wait_for()
    database.dispose()


def test_a_database_without_tables_says_what_to_do(browser, empty_database_url):
    with served(empty_database_url) as site:
        browser.add_cookies([{"name": COOKIE, "value": "pws-any", "url": site}])
        page = browser.new_page()
        page.goto(site)
        page.get_by_text("This database has no books yet").wait_for()


def test_a_port_in_use_ends_it_with_one_line():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code = f"from dashboard.launch import run; run(database_url='', api_url='http://ours', port={port})"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert f"Port {port} is not available" in done.stderr
    assert "Traceback" not in done.stderr
