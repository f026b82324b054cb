"""Runs a command on a terminal, and a text that would change one."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time

# A worker's name that clears the screen of a terminal.
EVIL = "w\x1b[2Jx"

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*words: str, until: str = "(?!)", answer: str = "\x03", lines: int = 24) -> str:
    """Returns what a command writes to a terminal of 80 columns, without escape sequences.

    Args:
        words: the command's name, arguments and options.
        until: a pattern; by default one that nothing matches.
        answer: typed as soon as the output matches that pattern; by default Ctrl-C.
        lines: height of the terminal.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "redisacc", *words]
        size = {"COLUMNS": "80", "LINES": str(lines), "TERM": "xterm-256color"}
        os.execve(sys.executable, command, os.environ | size)
    written, answered = b"", False
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # how Linux reports that the other end is closed
                break
            written += chunk
            if not chunk:
                break
            if not answered and re.search(until, written.decode(errors="replace")):
                answered = True
                os.write(terminal, answer.encode())
    os.close(terminal)
    os.waitpid(pid, 0)
    return _ESCAPE.sub("", written.decode())
