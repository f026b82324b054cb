"""Shorter timeouts, for tests in which a server is silent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redisacc._redis.transport import Transport

# A call that meets a silent server costs a test this long, in seconds.
SHORT = 0.4


# The methods of a transport that send commands.
SENDING = ("call", "pipeline", "run", "run_and_read", "repeat", "fetch")


@contextlib.contextmanager
def short_timeouts(transport: Transport, seconds: float = SHORT, *, methods: Sequence[str] = SENDING) -> Iterator[None]:
    """Makes the calls of one transport give up on a silent server after that many seconds, for the length of a block.

    Put only the calls that are to fail into the block, and name their methods if others cannot be left out: others may
    take longer on a busy machine. They would be sent again, and a fault that waits for a message of a certain number
    would hit another one.
    """

    def shortened(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, timeout: float = seconds, **options: Any) -> Any:
            return method(*args, timeout=min(timeout, seconds), **options)

        return call

    for name in methods:
        setattr(transport, name, shortened(getattr(transport, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(transport, name)
