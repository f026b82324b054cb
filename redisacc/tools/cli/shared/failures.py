"""How commands end early: failures and signals become exit codes, and one line instead of a traceback."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from redisacc._text import MESSAGE, printable
from redisacc.errors import (
    InvalidArgumentError,
    NotFoundError,
    RedisAccError,
    ServerUnavailableError,
    WaitTimeoutError,
)
from redisacc.tools.cli.shared.output import echo_wrapped

FAILED, USAGE, NOT_FOUND, TIMED_OUT, STALE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 4, 5, 6, 130

# The last lines of each command's help.
EXIT_CODES = (
    "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such accumulator or parameters, 4 timeout, "
    "5 gradient dropped, 6 no server answers, 130 interrupted by Ctrl-C, 143 ended by SIGTERM."
)

P = ParamSpec("P")
R = TypeVar("R")


class Failure(click.ClickException):
    """Ends a command with one line on standard error and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        setattr(self, "exit_code", exit_code)  # noqa: B010 - click declares it a class variable

    def show(self, file: Any = None) -> None:  # noqa: ARG002
        """Prints the line."""
        echo_wrapped(f"redisacc: {printable(self.message, MESSAGE)}", err=True)


def fail(message: str, exit_code: int = FAILED) -> NoReturn:
    """Ends the command with a message and an exit code.

    Raises:
        Failure: always.
    """
    raise Failure(message, exit_code)


def refuse(is_wrong: object, text: str) -> None:
    """Ends the command as wrong usage if its options are wrong.

    Raises:
        click.UsageError: they are.
    """
    if is_wrong:
        raise click.UsageError(text)


def report_failures(function: Callable[P, R]) -> Callable[P, R]:
    """Turns expected errors of a command into one line and an exit code, and Ctrl-C into exit code 130.

    The command is ready for KeyboardInterrupt, wherever it is raised.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _reporting(), interrupts_raise(signal.SIGINT):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    # The library's warnings become lines like ours: a command must not be silent while it waits for a server.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("redisacc: %(message)s"))
    logger = logging.getLogger("redisacc")
    logger.addHandler(handler)
    try:
        yield
    except RedisAccError as error:
        raise Failure(str(error), _exit_code_of(error)) from None
    except KeyboardInterrupt as error:
        # The terminal has just printed ^C.
        raise SystemExit(exit_code_of_interrupt(error)) from None
    except BrokenPipeError:
        # `redisacc watch --events NAME | head`: the reader has enough. Python would complain when it flushes stdout at
        # its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        # For example a full disk.
        raise Failure(str(error)) from None
    except MemoryError:
        raise Failure("there is too little memory for this") from None
    finally:
        logger.removeHandler(handler)


class _Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C has arrived.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code_of_interrupt(error: KeyboardInterrupt) -> int:
    """Returns what a shell reports for a program that the signal has ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (error.number if isinstance(error, _Stopped) else signal.SIGINT)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Stopped(number) if number != signal.SIGINT else KeyboardInterrupt


@contextlib.contextmanager
def interrupts_raise(*numbers: int) -> Iterator[None]:
    """During this block, these signals raise KeyboardInterrupt, unless they are ignored or handled otherwise.

    Python drops an exception that is raised in a destructor, so that the signal would have no effect. In that case it
    is raised again a moment later, and at the latest at the end of the block.
    """
    # Elsewhere, no handler ever runs.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    hook = sys.unraisablehook
    dropped: list[KeyboardInterrupt] = []

    def raise_dropped(_number: int, _frame: FrameType | None) -> None:
        if dropped:
            raise dropped.pop()

    def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt):
            hook(unraisable)
            return
        dropped.append(error)
        signal.signal(signal.SIGALRM, raise_dropped)
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    try:
        sys.unraisablehook = raise_again
        for number in handled:
            signal.signal(number, _raise)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = hook
        if dropped:
            # Later, while Python ends, it would be a traceback without an effect.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise dropped.pop()


def _exit_code_of(error: RedisAccError) -> int:
    match error:
        case NotFoundError():
            return NOT_FOUND
        case WaitTimeoutError():
            return TIMED_OUT
        case ServerUnavailableError():
            return UNAVAILABLE
        case InvalidArgumentError():
            return USAGE
    return FAILED


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), MESSAGE)
