"""Logging in to the dashboard: the API sets the cookie that the dashboard reads, since Streamlit cannot set one.

    GET  /dashboard/login?token=…   a link that works once → cookie, and on to the dashboard
    GET  /dashboard/login           a form for an admin key
    POST /dashboard/login           the key → cookie, and on to the dashboard
    GET  /dashboard/logout

A cookie belongs to a host name, not to a port: so the answer leads to the dashboard under the name the reader used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Final, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

from litestar import MediaType, Request, Response, Router, get, post
from litestar.datastructures import Cookie, State
from litestar.params import FromQuery
from litestar.response import Redirect
from sqlalchemy import Connection as Database

from billing import sessions
from billing.database import DatabaseUnavailable, transaction
from billing.keys import Scope, authenticate
from service.front import Front

_T = TypeVar("_T")
_HttpRequest = Request[object, object, State]

COOKIE: Final = "pennyweight_session"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_LONGEST_FORM: Final = 4096
_LONGEST_NAME: Final = 253  # RFC 1035
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST: Final = re.compile(rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)|\[(?P<ip>[0-9A-Fa-f:.]+)\])(?::[0-9]{{1,5}})?")
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Pennyweight: log in</title><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ display: grid; place-items: center; min-height: 90vh; margin: 0 }}
form {{ display: grid; gap: .75rem; width: min(24rem, 90vw) }}
h1 {{ font-size: 1.4rem; margin: 0 }} p {{ margin: 0; opacity: .8 }} .wrong {{ color: #c0392b; opacity: 1 }}
input, button {{ font: inherit; padding: .6rem .8rem; border: 1px solid #8888; border-radius: .5rem }}
button {{ background: #1f6f54; color: #fff; border: 0; cursor: pointer }}
</style></head><body><form method="post" action="/dashboard/login">
<h1>Pennyweight</h1><p>Log in with the admin key: <code>admin_key</code> in <code>bootstrap.json</code>.</p>{wrong}
<input type="password" name="key" aria-label="Admin key" placeholder="pw-…" autocomplete="current-password" autofocus>
<button>Log in</button></form></body></html>"""


def routes(front: Front) -> Router:
    @get("/login", include_in_schema=False)
    async def page(request: _HttpRequest, token: FromQuery[str | None] = None) -> Response[str]:
        return await _by_link(front, request, token) if token else _form()

    @post("/login", include_in_schema=False)
    async def check(request: _HttpRequest) -> Response[str]:
        return await _by_key(front, request)

    @get("/logout", include_in_schema=False)
    async def leave(request: _HttpRequest) -> Response[str]:
        if session := request.cookies.get(COOKIE):
            await _books(front, lambda connection: sessions.end_session(connection, session))
        answer = _form()
        answer.delete_cookie(COOKIE)
        return answer

    return Router("/dashboard", route_handlers=[page, check, leave], exception_handlers={DatabaseUnavailable: _away})


async def _by_link(front: Front, request: _HttpRequest, token: str) -> Response[str]:
    session = await _books(front, lambda connection: sessions.redeem(connection, token))
    if session is None:
        return _form("This link was used before or is too old. Log in with the admin key.", status=401)
    return _enter(front, request, session)


async def _by_key(front: Front, request: _HttpRequest) -> Response[str]:
    body = await request.body()
    key = (parse_qs(body[:_LONGEST_FORM].decode(errors="replace")).get("key") or [""])[0].strip()
    session = await _books(front, lambda connection: _session_for(connection, key))
    if session is None:
        return _form("This is no admin key that works.", status=401)
    return _enter(front, request, session)


async def _books(front: Front, work: Callable[[Database], _T]) -> _T:
    def do() -> _T:
        with transaction(front.database) as connection:
            return work(connection)

    return await asyncio.to_thread(do)


def _away(_: _HttpRequest, __: DatabaseUnavailable) -> Response[str]:
    return _form("The database does not answer. Try again in a moment.", status=503)


def _session_for(connection: Database, key: str) -> str | None:
    principal = authenticate(connection, key)
    if principal is None or principal.refusal or Scope.ADMIN not in principal.scopes:
        return None
    return sessions.new_session(connection, api_key_id=principal.key_id)


def _form(wrong: str = "", *, status: int = 200) -> Response[str]:
    note = f'<p class="wrong" role="alert">{wrong}</p>' if wrong else ""
    return Response(_PAGE.format(wrong=note), media_type=MediaType.HTML, status_code=status)


def _enter(front: Front, request: _HttpRequest, session: str) -> Response[str]:
    cookie = Cookie(
        key=COOKIE,
        value=session,
        path="/",
        httponly=True,
        samesite="lax",
        secure=request.scope["scheme"] == "https",
        max_age=int(sessions.SESSION_LASTS.total_seconds()),
    )
    reader_host = host_of(request.headers.get("host", ""))
    return Redirect(dashboard_url(front.settings.dashboard_url, reader_host), status_code=303, cookies=[cookie])


def host_of(header: str) -> str | None:
    """The host name or IP of a Host header, without its port; None for what is neither."""
    found = _HOST.fullmatch(header)
    if found is None:
        return None
    if found["name"]:
        return found["name"] if len(found["name"]) <= _LONGEST_NAME else None
    try:
        return str(IPv6Address(found["ip"]))
    except ValueError:
        return None


def dashboard_url(configured: str, reader_host: str | None) -> str:
    """The dashboard on this machine is met under the reader's own name for the machine; one elsewhere as configured."""
    parts = urlsplit(configured)
    if parts.hostname not in _LOOPBACK or not reader_host:
        return configured
    host = f"[{reader_host}]" if ":" in reader_host else reader_host
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))
