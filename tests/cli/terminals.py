"""Runs a command on a terminal, and a text that would change one."""

import re

from support.terminal import written_to_terminal

# A worker's name that clears the screen of a terminal.
EVIL = "w\x1b[2Jx"

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*words, until="(?!)", answer="\x03", lines=24):
    """Returns what a command writes to a terminal of 80 columns, without escape sequences.

    Args:
        words: the command's name, arguments and options.
        until: a pattern; by default one that nothing matches.
        answer: typed as soon as the output matches that pattern; by default Ctrl-C.
        lines: height of the terminal.
    """
    written = written_to_terminal(["-m", "redisacc", *words], lines=lines, until=until, answer=answer)
    return _ESCAPE.sub("", written.decode())
