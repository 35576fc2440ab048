"""Free TCP ports on this machine."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def is_free(port: int, host: str = LOOPBACK) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT doesn't take a port
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def next_free_port(after: int, host: str = LOOPBACK) -> int:
    """The first free port above ``after``, for a message that names one."""
    return next((port for port in range(after + 1, min(after + 100, 1 << 16)) if is_free(port, host)), free_port())
