"""The dashboard in a real browser: logging in, both pages, numbers that are the books', and what is away."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from datetime import timedelta

import pytest

from billing import economics, sessions
from billing.database import open_database, transaction
from billing.recording import record
from dashboard import figures
from dashboard.login import COOKIE
from dashboard.requests_page import OPEN
from tests.dashboard.business import TENANTS, Business, now

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]


@pytest.fixture
def books(database_url):
    database = open_database(database_url)
    with transaction(database) as connection:
        business = Business(seed=7)
        business.open(connection, examples=True)
        business.run(connection, now() - timedelta(hours=3), now(), per_hour=60)
    yield database, business
    database.dispose()


@pytest.fixture
def site(books, database_url):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    code = f"from dashboard.launch import run; run(database_url={database_url!r}, api_url='http://ours', port={port})"
    process = subprocess.Popen([sys.executable, "-P", "-c", code])
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/_stcore/health", timeout=1)
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
    yield url
    process.terminate()
    assert process.wait(timeout=15) == 0


@pytest.fixture
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
        started.close()


def log_in(browser, books, site):
    with transaction(books[0]) as connection:
        session = sessions.new_session(connection)
    browser.add_cookies([{"name": COOKIE, "value": session, "url": site}])


def test_nothing_is_shown_without_a_session_and_a_reload_keeps_one(browser, books, site):
    page = browser.new_page()
    page.goto(site)
    page.get_by_text("You are not logged in").wait_for(timeout=30_000)
    assert page.get_by_text("Revenue").count() == 0
    log_in(browser, books, site)
    page.reload()
    page.get_by_text("Fully loaded").first.wait_for(timeout=30_000)
    page.reload()
    page.get_by_text("Fully loaded").first.wait_for(timeout=30_000)


def test_the_numbers_on_the_page_are_the_books(browser, books, site):
    log_in(browser, books, site)
    page = browser.new_page()
    page.goto(f"{site}/?range=24+hours")
    page.get_by_text("Fully loaded").first.wait_for(timeout=30_000)
    with transaction(books[0]) as connection:
        report = economics.report(connection, now() - timedelta(hours=24), now())
    text = page.inner_text("body")
    assert figures.money(report.total.revenue, report.currency) in text
    assert figures.percent(report.device_time.utilisation) in text
    for line in report.tenants:
        page.get_by_text(line.tenant).first.wait_for()
    assert "example" in text.lower()


def test_a_finished_request_appears_by_itself_and_opens(browser, books, site):
    log_in(browser, books, site)
    page = browser.new_page()
    page.goto(f"{site}/requests")
    page.get_by_text("completed").first.wait_for(timeout=30_000)
    database, business = books
    settlement, attempts = business.request(now(), tenant=TENANTS[0])
    with transaction(database) as connection:
        record(connection, settlements=[settlement], attempts=attempts)
    page.get_by_text(figures.duration(settlement.total_ns / 1e9)).first.wait_for(timeout=10_000)
    page.goto(f"{site}/requests?{OPEN}={settlement.request_id}")
    page.get_by_text("Price and cost").wait_for(timeout=15_000)
    assert str(settlement.request_id) in page.inner_text("body")
