"""Bounded handshakes: applies the limits of other replies to what redis-py reads before it hands a connection over."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.connection import DefaultParser

from redisacc._clock import durations
from redisacc._redis.faults import BrokenError
from redisacc._redis.sockets.reply_reader import ReplyReader


class HandshakeParser(DefaultParser):  # type: ignore[misc,valid-type]
    """redis-py's parser, with bounds: refuses replies that cannot answer a handshake, or that drip in forever.

    It is for the clients that redisacc makes from a URL, which serve nothing else.
    """

    def on_connect(self, connection: Any, *args: Any, **options: Any) -> None:
        """Begins a handshake."""
        super().on_connect(connection, *args, **options)
        reader: Any = getattr(self, "_reader", None)
        # redis-py without hiredis reads an array element by element, and needs no bounds.
        if reader is not None:
            self._reader = _BoundedReader(reader, time.monotonic() + durations.handshake)


class _BoundedReader:
    """The reader inside of redis-py's parser, with a second one before it that knows what is too much."""

    def __init__(self, reader: Any, deadline: float) -> None:
        self._reader = reader
        self._deadline = deadline
        self._bounds = ReplyReader()
        self._bounds.expect([("HELLO",)])

    def feed(self, buffer: Any, start: int = 0, length: int = -1) -> None:
        if time.monotonic() >= self._deadline:
            raise redis.TimeoutError("the server took too long for the first replies of a connection")
        data = bytes(buffer[start : start + length] if length >= 0 else buffer[start:])
        try:
            self._bounds.read(data)
        except BrokenError as error:
            raise redis.ConnectionError(str(error)) from error
        self._reader.feed(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
