"""What Streamlit runs for every reader and every change: who is it, and which page.

This folder comes first on ``sys.path`` while a page runs, so no module here may have the name of another package
(``engine``, ``requests``): pages end in ``_page``. A test holds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import streamlit as st

from dashboard import login, requests_page, unit_economics_page
from dashboard.database import guarded
from dashboard.settings import Settings

HERE: Final = Path(__file__).parent


def main() -> None:
    icon = HERE / "icon.svg"
    st.set_page_config(page_title="Pennyweight", page_icon=icon, layout="wide", initial_sidebar_state="collapsed")
    st.html(HERE / "chrome.css")
    st.logo(HERE / "wordmark.svg", size="large")
    settings = Settings.from_environment()
    page = st.navigation(
        [
            st.Page(
                lambda: unit_economics_page.show(settings), title="Unit economics", url_path="economics", default=True
            ),
            st.Page(lambda: requests_page.show(settings), title="Requests", url_path="requests"),
        ],
        position="top",
    )

    def run() -> None:
        if login.logged_in(settings):
            page.run()
        else:
            login.note(settings)

    guarded(run)


main()
