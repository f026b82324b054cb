"""Writes lines of many processes to standard output and standard error, with the name of the process in front."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Mapping

# If this many bytes wait to be written, the processes have to wait as well.
_FULL = 1024 * 1024

# A pipe or a terminal that is ready takes this many bytes without blocking.
_CHUNK = 4096

_COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"

# Control characters but for the tab, marks that reverse text, separators of lines, and bytes that are not UTF-8.
_UNSAFE = re.compile("[\0-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udcff]")


class Output:
    """A file, a pipe or a terminal to which whole lines are written. Nothing here blocks.

    On a terminal, names have colors unless NO_COLOR is set, and so may what the processes write. Everything else that
    would control the terminal is escaped, since a process that moves the cursor would write over the lines of the
    others. Into a file or a pipe, the bytes of the processes are written as they are.

    Args:
        descriptor: where to write.
        environment: this process's environment.
    """

    def __init__(self, descriptor: int, environment: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self._terminal = os.isatty(descriptor)
        self._colors = self._terminal and not environment.get("NO_COLOR") and environment.get("TERM", "dumb") != "dumb"
        self._waiting = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that no more should be read."""
        return len(self._waiting) >= _FULL

    def put(self, prefix: str, color: str, line: bytes) -> None:
        """Appends a line.

        Args:
            prefix: the text in front of it.
            color: parameters of an escape sequence for the prefix, such as "36".
            line: the line without its end.
        """
        if self._colors:
            prefix = f"\x1b[{color}m{prefix}{_RESET}"
        text = self._safe(line) if self._terminal else line
        self._waiting += prefix.encode() + b" " + text + b"\n" if text else prefix.encode() + b"\n"

    def flush(self) -> None:
        """Writes as much as can be written now.

        Raises:
            OSError: the reader is gone, or the disk is full.
        """
        while self._waiting and self._poll.poll(0):
            # Whole lines together, as many as fit.
            chunk = self._waiting[:_CHUNK]
            written = os.write(self.descriptor, chunk[: chunk.rfind(b"\n") + 1] or chunk)
            del self._waiting[:written]

    def discard(self) -> None:
        """Forgets what has not been written."""
        self._waiting.clear()

    def _safe(self, line: bytes) -> bytes:
        # Colors are at the odd places.
        parts = _COLOR.split(line.decode(errors="surrogateescape"))
        parts[::2] = [_UNSAFE.sub(_escaped, part) for part in parts[::2]]
        if not self._colors:
            parts = parts[::2]
        elif len(parts) > 1:
            # A color must not run into the next line, which is another process's.
            parts.append(_RESET)
        return "".join(parts).encode()


def outputs(environment: Mapping[str, str]) -> tuple[Output, Output]:
    """Returns this process's standard output and standard error, which are one object if they are one file.

    On one terminal, a line of one must not begin within a line of the other.
    """
    out = Output(1, environment)
    same = os.path.samestat(os.fstat(1), os.fstat(2))
    return out, out if same else Output(2, environment)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code >= 0xDC80:
        # How Python decodes a byte that is not UTF-8.
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
