"""Starts Streamlit, with our theme and without its extras, and ends it cleanly."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

import streamlit
import structlog

from dashboard.settings import Settings
from dashboard.theme import THEME

log = structlog.get_logger()

SCRIPT: Final = Path(__file__).with_name("app.py")
_FIRST: Final = ("dashboard.login", "dashboard.charts")  # slow to import, and in need of no running Streamlit
_CALLS: Final = 5

_SERVER: Final = {
    "server.headless": True,
    "server.fileWatcherType": "none",
    "server.runOnSave": False,
    "server.enableStaticServing": False,
    "server.enableAgentApi": False,
    "server.maxUploadSize": 1,  # MB; we take no uploads
    "browser.gatherUsageStats": False,
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "client.showErrorLinks": False,
    "logger.hideWelcomeMessage": True,  # it would look up this machine's public address
    "logger.level": "warning",
    "logger.enableRich": False,
    "runner.magicEnabled": False,
}


def run(*, database_url: str, api_url: str, port: int, host: str = "127.0.0.1") -> None:
    """Serve the dashboard until SIGTERM or SIGINT, then return or exit with 0. Call it from the main thread, once.

    ``database_url`` is a ``postgresql://`` URL; ``api_url`` is the API as the reader's browser reaches it, on the same
    host name as the dashboard, because its login page sets the cookie for that name. A port in use exits with 1.
    """
    for slow in _FIRST:  # now, and not while the first reader waits
        importlib.import_module(slow)
    os.environ.update(Settings(database_url=database_url, api_url=api_url).to_environment())
    _log_as_json()
    # uvicorn raises the signal again after its own shutdown: this makes it an ordinary end.
    signal.signal(signal.SIGTERM, _end)
    application = streamlit.App(SCRIPT, on_script_error=_on_script_error)
    application.run(config={"server.port": port, "server.address": host, **_SERVER, **THEME})


def _log_as_json() -> None:
    """To stderr. Streamlit's own line about a failed page is left out: an exception's message may hold data."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.getLogger("streamlit.error_util").addFilter(lambda _record: False)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _on_script_error(error: Exception) -> bool:
    """A bug of ours: logged by its class and place, shown as a note without a traceback."""
    log.error("dashboard page failed", error=type(error).__name__, where=_where(error))
    streamlit.error(
        f"This page failed ({type(error).__name__}). Reload it; if it stays, the dashboard's log names the place.",
        icon=":material/error:",
    )
    return True


def _where(error: Exception) -> list[str]:
    """The last calls, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_CALLS:]
    return [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
