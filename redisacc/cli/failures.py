"""The failures of the commands: exit codes, and one line on standard error instead of a traceback."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from redisacc._protocol.similar_names import suggestion
from redisacc._redis.connect import connect
from redisacc._text import MESSAGE, printable
from redisacc.cli.output import echo_wrapped
from redisacc.errors import (
    AccumulatorNotFoundError,
    InvalidArgumentError,
    RedisAccError,
    ServerUnavailableError,
    StepTimeoutError,
    TakeTimeoutError,
)

FAILED, USAGE, NOT_FOUND, TIMED_OUT, STALE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 4, 5, 6, 130

# The last lines of each command's help.
EXIT_CODES = (
    "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such accumulator, 4 timeout, 5 gradient dropped, "
    "6 no server answers, 130 interrupted by Ctrl-C."
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


def report_failures(function: Callable[P, R]) -> Callable[P, R]:
    """Turns expected errors of a command into one line and an exit code, and Ctrl-C into exit code 130."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _reporting():
            try:
                return function(*args, **kwargs)
            except AccumulatorNotFoundError as error:
                raise AccumulatorNotFoundError(f"{error}{_similar(kwargs)}") from None

    return run


def _similar(options: Mapping[str, Any]) -> str:
    """Returns a clause with names like the one that a command was given, or nothing."""
    name = options.get("name")
    if not isinstance(name, str):
        return ""
    try:
        return suggestion(connect(options.get("url")), name)
    except RedisAccError:
        return ""


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
    except KeyboardInterrupt:
        # The terminal has just printed ^C.
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # `redisacc tail | head`: the reader has enough. Python would complain when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        # For example a full disk.
        raise Failure(str(error)) from None
    except MemoryError:
        raise Failure("there is too little memory for this") from None
    finally:
        logger.removeHandler(handler)


def _exit_code_of(error: RedisAccError) -> int:
    match error:
        case AccumulatorNotFoundError():
            return NOT_FOUND
        case TakeTimeoutError() | StepTimeoutError():
            return TIMED_OUT
        case ServerUnavailableError():
            return UNAVAILABLE
        case InvalidArgumentError():
            return USAGE
    return FAILED


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), MESSAGE)
