"""Programs on a terminal of 80 columns."""

import os
import pty
import re
import select
import sys
import time


def written_to_terminal(arguments, *, lines, until="(?!)", answer="\x03"):
    """Runs Python with these arguments on a terminal, and returns what it writes there.

    Args:
        arguments: those of the interpreter.
        lines: height of the terminal.
        until: a pattern; by default one that nothing matches.
        answer: typed as soon as the output matches that pattern; by default Ctrl-C.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        size = {"COLUMNS": "80", "LINES": str(lines), "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, *arguments], os.environ | size)
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
    return written
