"""One round trip to Redis for everything the worker has to say and ask between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import ResponseError

Argument = str | bytes | int
Then = Callable[[Any], None]  # gets the reply as redis-py parses it


class Exchange:
    """Commands of several parts, each with what to do with its reply. Thrown away with the round trip."""

    def __init__(self, connection: redis.Redis) -> None:
        self._pipe = connection.pipeline(transaction=False)
        self._then: list[Then] = []

    def add(self, *command: Argument, then: Then) -> None:
        self._pipe.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py has no annotation there
        self._then.append(then)

    def run(self) -> None:
        """Raises redis.RedisError: when the connection fails nothing was heard, when a command fails the rest was.

        A part that heard nothing says the same again next time, so a command may take effect twice.
        """
        replies = self._pipe.execute(raise_on_error=False)
        for then, reply in zip(self._then, replies, strict=True):
            if not isinstance(reply, Exception):
                then(reply)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
