"""Tells what a signal handler has raised from the errors of the code that it has interrupted.

A handler that raises ends the call that it interrupts. It may raise any exception: ``signal.alarm`` is mostly used with
a handler that raises TimeoutError, which a socket raises as well. So whatever is made of such an error, be it another
attempt or an error of redisacc's own, is preceded by a look at where it comes from.
"""

from __future__ import annotations

import contextlib
import signal
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType


def interrupt_in(error: BaseException) -> BaseException | None:
    """Returns what a signal handler has raised: the error itself, or one that a library has turned into it.

    None means no handler has raised it.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        frames = [frame for frame, _ in walk_tb(link.__traceback__)]
        if any(_is_handler(callee, caller) for caller, callee in pairwise(frames)):
            return link
        cause = link.__cause__ or link.__context__
        # An error that was caught in another function than those was being handled when the call began.
        if cause is None or cause.__traceback__ is None or cause.__traceback__.tb_frame not in frames:
            return None
        link = cause
    return None


def _is_handler(callee: FrameType, caller: FrameType) -> bool:
    """Returns whether a function was called as a signal handler.

    It is one if it got its caller's frame as an argument, as no other function does. If it has deleted an argument, it
    is one if it is still installed.
    """
    variables, code = callee.f_locals, callee.f_code
    for value in variables.values():
        if value is caller or (type(value) is tuple and any(item is caller for item in value)):
            return True
    if all(name in variables for name in code.co_varnames[: code.co_argcount]):
        return False
    return code in {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}


def _code_of(handler: object) -> CodeType | None:
    """Returns the code of a function, a method, a partial function or an object that can be called."""
    function = getattr(handler, "func", handler)
    if not hasattr(function, "__code__") and callable(function):
        function = function.__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


class suppressed(contextlib.suppress):
    """Suppresses errors as ``contextlib.suppress`` does, except for those that a signal handler raises."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(super().__exit__(kind, error, trace)) and (error is None or interrupt_in(error) is None)
