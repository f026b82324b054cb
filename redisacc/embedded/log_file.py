"""The log file of a server."""

from __future__ import annotations

import collections
import contextlib
import threading
from pathlib import Path
from typing import BinaryIO

__all__ = ["LogFile"]

_NAME = "server.log"
_LIMIT = 1 << 20  # bytes


class LogFile:
    """The part of a log that one run of a server writes.

    A log of more than 1 MiB from earlier runs is renamed to `server.log.1` first.

    Args:
        directory: the data directory, which holds the log.

    Raises:
        OSError: the log can't be opened.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / _NAME
        if path.exists() and path.stat().st_size > _LIMIT:
            path.replace(path.with_suffix(".log.1"))
        self._path = path
        with self.open_writer() as writer:
            self._start = writer.tell()
        # Opened now, because a temporary directory is gone once the server has ended. Unbuffered, because a buffer has
        # a lock, and in a forked child a thread that no longer exists may hold it.
        self._reader = path.open("rb", buffering=0)
        self._text: str | None = None  # the whole text, once the reader is closed
        # Keeps one thread from moving the reader's position, or closing it, while another one reads. Reentrant,
        # because `close` may be called by a finalizer at any moment.
        self._lock = threading.RLock()

    def open_writer(self) -> BinaryIO:
        """Opens the file to append to it, for the server to inherit."""
        return self._path.open("ab")

    def tail(self, lines: int) -> str:
        """Returns the last lines that were written since this object was created."""
        return "\n".join(collections.deque(self._read().rstrip().split("\n"), maxlen=lines))

    def close(self) -> None:
        """Closes the file, but keeps its text for `tail`. Calling it again has no effect."""
        with self._lock:
            self._text = self._read()
            self._reader.close()

    def disown(self) -> None:
        """Closes the file in a forked child, where `tail` must not be called from then on."""
        # Without the lock, which a thread of the parent may hold.
        with contextlib.suppress(OSError):
            self._reader.close()

    def _read(self) -> str:
        with self._lock:
            if self._text is not None:
                return self._text
            self._reader.seek(self._start)
            return self._reader.read().decode(errors="replace")
