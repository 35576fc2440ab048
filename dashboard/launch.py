"""Starts Streamlit, with our theme and without its extras, and ends it cleanly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import streamlit
import structlog

from dashboard.settings import Settings
from dashboard.theme import THEME

log = structlog.get_logger()

SCRIPT: Final = Path(__file__).with_name("app.py")

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
    "runner.magicEnabled": False,
}


def run(*, database_url: str, api_url: str, port: int, host: str = "127.0.0.1") -> None:
    """Serve the dashboard until SIGTERM or SIGINT, then return or exit with 0. Call it from the main thread, once.

    ``database_url`` is a ``postgresql://`` URL; ``api_url`` is the API as the reader's browser reaches it, on the same
    host name as the dashboard, because its login page sets the cookie for that name. A port in use exits with 1.
    """
    os.environ.update(Settings(database_url=database_url, api_url=api_url).to_environment())
    # uvicorn raises the signal again after its own shutdown: this makes it an ordinary end.
    signal.signal(signal.SIGTERM, _end)
    application = streamlit.App(SCRIPT, on_script_error=_on_script_error)
    application.run(config={"server.port": port, "server.address": host, **_SERVER, **THEME})


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _on_script_error(error: Exception) -> bool:
    """A bug of ours: logged by its class (a message may hold data), shown as a note without a traceback."""
    log.error("dashboard page failed", error=type(error).__name__, where=_where(error))
    streamlit.error(
        f"This page failed ({type(error).__name__}). Reload it; if it stays, the dashboard's log names the place.",
        icon=":material/error:",
    )
    return True


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
