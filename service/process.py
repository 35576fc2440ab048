"""One API process: uvicorn on the parent's socket. Started by ``service.server`` with its settings on standard input.

python -m service.process LISTENING_FD
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

import msgspec
import uvicorn

from service import logs
from service.app import create_app
from service.dispatch import Dispatch
from service.protocol import BoundedProtocol
from service.server import SETTLE_S
from service.settings import Settings

_KEEP_ALIVE_S: Final = 75  # longer than the usual client keeps an idle connection


class Server(uvicorn.Server):
    """uvicorn, that drains the owner's requests while it waits for its connections to end."""

    def __init__(self, config: uvicorn.Config, dispatch: Dispatch, drain_s: float) -> None:
        super().__init__(config)
        self._dispatch = dispatch
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_reader(sys.stdin.fileno(), self._parent_gone)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drained = asyncio.create_task(self._dispatch.drain(self._drain_s))
        await super().shutdown(sockets)
        await drained

    def stop(self) -> None:
        self.should_exit = True

    def _parent_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self.stop()


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings, dec_hook=lambda kind, text: kind(text))
    logs.configure()
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_s + SETTLE_S),
    )
    Server(config, app.state.front.dispatch, settings.drain_s).run(sockets=[listening])


if __name__ == "__main__":
    main()
