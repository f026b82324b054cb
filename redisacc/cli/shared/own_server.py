"""A server that a command starts for the processes of a run, and that ends with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from redisacc._text import printable_lines
from redisacc.cli.shared.failures import interrupts_raise
from redisacc.embedded import Server
from redisacc.embedded.guarded_process import status_text

__all__ = ["how_it_ended", "own_server", "problem_of"]

# The last line that a server logs when it starts.
_READY = "Ready to accept connections"
_LOG_LINES = 1000


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


def problem_of(server: Server | None) -> str | None:
    """Returns a message if the server has ended; None if it runs, or if there is none."""
    if server is None or server.running:
        return None
    return how_it_ended(server)


def how_it_ended(server: Server) -> str:
    """Returns a message about a server that has ended by itself: how, and what it has logged since it was ready.

    What it logged before, such as advice about the settings of the kernel, is not why it ended.
    """
    status = server.exit_status
    text = "the server ended unexpectedly" if status is None else f"the server {status_text(status)}"
    if status == -signal.SIGKILL:
        text += ", by somebody or by the kernel for lack of memory, which `dmesg` reports"
    log = server.log_tail(_LOG_LINES).split("\n")
    ready = max((number for number, line in enumerate(log) if _READY in line), default=-1)
    tail = "\n".join(log[ready + 1 :][-10:])
    if not tail:
        return f"{text}. It has logged nothing since it was ready"
    return f"{text}; the end of its log: {printable_lines(tail)}"
