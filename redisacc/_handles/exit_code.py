"""The exit code of a process that `redisacc run` has started, if an error ends it that would come again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from redisacc._handles.environment import RESTARTED, RUN_ID
from redisacc.errors import InvalidArgumentError, RedisAccError

P = ParamSpec("P")
Result = TypeVar("Result")

# EX_CONFIG of sysexits.h, after which `redisacc run` starts nothing again.
FAILS_AGAIN = 78

# Errors that a program raises whatever the data are.
_OF_PROGRAMS = (InvalidArgumentError, ImportError, NameError, NotImplementedError, SyntaxError)
# Errors that it usually raises whatever the data are. In a later step, one may be the fault of data, such as an image
# that could not be read and is None.
_USUALLY_OF_PROGRAMS = (AssertionError, AttributeError, TypeError)
# Errors that may pass: a file that somebody is writing, or a graphics processor whose memory a dead process still has.
_OF_DATA = (ArithmeticError, LookupError, RuntimeError, ValueError)

_has_advanced = threading.Event()
_failures_of_first_calls: list[Exception] = []


def advanced() -> None:
    """Notes that a loop of this process has gone beyond its first step, so whatever ends it came later."""
    _has_advanced.set()


def noting_its_first_call(function: Callable[P, Result]) -> Callable[P, Result]:
    """Returns a function that does the same, and whose error in its first call comes again, however late that is."""
    has_succeeded = False

    def noting(*args: P.args, **kwargs: P.kwargs) -> Result:
        nonlocal has_succeeded
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not has_succeeded:
                _failures_of_first_calls.append(error)
            raise
        has_succeeded = True
        return result

    return noting


def install() -> None:
    """Lets a process that `redisacc run` has started end with `FAILS_AGAIN` if the error that ends it would come again.

    That is an error which cannot be the fault of data; or almost any other one, as long as what failed has never
    succeeded in this process: the first step of a loop, or the first call of a function. Errors that also stand for
    what may pass count in the first process of a place only. The traceback is printed as ever.
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
    if isinstance(error, _OF_PROGRAMS):
        return True
    # Errors of ours are also some of those below.
    if isinstance(error, RedisAccError):
        return False
    if _has_advanced.is_set() and not any(error is one for one in _failures_of_first_calls):
        return False
    return isinstance(error, _USUALLY_OF_PROGRAMS) or (isinstance(error, _OF_DATA) and os.environ.get(RESTARTED) == "0")
