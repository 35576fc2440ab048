"""Who reads: a session in a cookie that the API's login page sets, looked up on every run, so it survives a reload."""

from __future__ import annotations

from typing import Final

import streamlit as st

from billing.sessions import session_holds
from dashboard.database import reading
from dashboard.settings import Settings

COOKIE: Final = "pennyweight_session"


def logged_in(settings: Settings) -> bool:
    session = st.context.cookies.get(COOKIE)
    if not session:
        return False
    with reading(settings.database_url) as connection:
        return session_holds(connection, session)


def renew(settings: Settings) -> None:
    """For a part that runs by itself: start the whole page again if the session has ended meanwhile."""
    if not logged_in(settings):
        st.rerun(scope="app")


def note(settings: Settings) -> None:
    st.info(
        f"**You are not logged in.** [Log in with the admin key]({settings.login_url}), or open the link that "
        "`pennyweight up` printed. It works once; the login then lasts a week.",
        icon=":material/lock:",
    )
