"""A server that a command starts for the processes of a run, and that ends with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from redisacc.cli.shared.failures import interrupts_raise
from redisacc.embedded import Server

__all__ = ["own_server"]


@contextlib.contextmanager
def own_server(directory: Path | None = None, port: int | None = None, *, durable: bool = False) -> Iterator[Server]:
    """Runs a server during a block, which signals end as Ctrl-C does, also while the server loads a large file.

    Args:
        directory: where it keeps its data. None: a temporary directory.
        port: its port. None: a free one.
        durable: whether it writes every change to disk.
    """
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP), Server(directory, port=port, durable=durable) as server:
        yield server
