"""How an exchange with a server can fail. These errors stay inside redisacc, which tells callers what they mean.

A signal handler may raise the same errors as a socket, such as TimeoutError. OSError is therefore not among them: the
module that owns a connection raises BrokenError in its place, unless a handler has raised it.
"""

from __future__ import annotations

import functools
import re

from redisacc._text import printable

# How Redis 7 and Valkey say that a user may run a script, but not one of the commands in it, or not on that key.
_FORBIDDEN_IN_SCRIPT = re.compile(r"The user executing the script can't|ACL failure in script")
# How a server that was demoted answers WAIT. A client that was waiting already gets UNBLOCKED.
_DEMOTED = "WAIT cannot be used with replica instances"
# Servers before 7.0 wrap the refusal of a command inside a script.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -(?P<code>[A-Z]+) ")


class BrokenError(Exception):
    """The connection broke, could not be made, or carried something that cannot be a reply."""


class SilentError(BrokenError):
    """The server did not reply in time."""


class SlotMovedError(BrokenError):
    """A node of a cluster ended a subscription, because the slot of the channel has moved to another node."""


class RejectedError(Exception):
    """The server refuses the connection, because of a wrong password for example."""


# The length at which the text of a refusal is cut.
_LONGEST_REASON = 500


class ReplyError(Exception):
    """The server replied with an error. The text is the server's own, which begins with a code, but printable."""

    def __init__(self, text: bytes | str) -> None:
        super().__init__(printable(text, _LONGEST_REASON))

    @functools.cached_property
    def code(self) -> str:
        """The code of the refusal, such as "OOM", even where an old server wrapped it."""
        text = str(self)
        if _FORBIDDEN_IN_SCRIPT.search(text):
            return "NOPERM"
        if _DEMOTED in text:
            return "READONLY"
        wrapped = _IN_SCRIPT.search(text)
        return wrapped["code"] if wrapped else text.partition(" ")[0]


# How an attempt may fail.
FAULTS = (ReplyError, RejectedError, BrokenError)


def reason_of(error: BaseException) -> str:
    """Returns the text of an error, printable, or its type if it has none."""
    return printable(str(error).strip(), _LONGEST_REASON) or type(error).__name__
