"""The exit code of a process that `redisacc run` has started, if an error ends it that would come again."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

from redisacc._handles.environment import RESTARTED, RUN_ID
from redisacc.errors import InvalidArgumentError, RedisAccError

__all__ = ["FAILS_AGAIN", "advanced", "install"]

# EX_CONFIG of sysexits.h, after which `redisacc run` starts nothing again.
FAILS_AGAIN = 78

# Errors of a program, which it raises whatever the data are.
_OF_PROGRAMS = (
    InvalidArgumentError,
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
)
# Errors that may pass: a file that somebody is writing, or a graphics processor whose memory a dead process still has.
_OF_DATA = (ArithmeticError, LookupError, RuntimeError, ValueError)

_has_advanced = threading.Event()


def advanced() -> None:
    """Notes that a loop of this process has gone beyond its first step, so whatever ends it came later."""
    _has_advanced.set()


def install() -> None:
    """Lets a process that `redisacc run` has started end with `FAILS_AGAIN` if the error that ends it would come again.

    That is an error of the program before a loop has gone beyond its first step. Errors that also stand for what may
    pass count in the first process of a place only. The traceback is printed as ever.
    """
    if not os.environ.get(RUN_ID):
        return
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if comes_again(error):
            raise SystemExit(FAILS_AGAIN)

    sys.excepthook = report


def comes_again(error: BaseException) -> bool:
    """Returns whether a process that is started again would end with the same error."""
    if _has_advanced.is_set() or (isinstance(error, RedisAccError) and not isinstance(error, InvalidArgumentError)):
        return False
    if isinstance(error, _OF_PROGRAMS):
        return True
    # Errors of ours that are some of these were excluded above.
    return isinstance(error, _OF_DATA) and os.environ.get(RESTARTED) == "0"
