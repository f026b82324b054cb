"""What the commands share: options, exit codes, safe text, tables, and JSON.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such accumulator, 4 timed out, 5 the gradient was stale,
6 no server answers, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
import numpy as np
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redisacc._keys import Keys
from redisacc._link import OPENING_PATIENCE, Link, link_to
from redisacc._looking import escape_glob, list_names
from redisacc.errors import (
    AccumulatorNotFoundError,
    InvalidArgumentError,
    RedisAccError,
    ServerUnavailableError,
    StepTimeoutError,
    TakeTimeoutError,
)

FAILED, USAGE, NOT_FOUND, TIMED_OUT, STALE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 4, 5, 6, 130

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such accumulator, 4 timed out, 5 the gradient was stale, "
    "6 no server answers, 130 ended by Ctrl-C."
)

P = ParamSpec("P")
R = TypeVar("R")


# Text that came from Redis: names, workers, events. Whoever can write there could otherwise send commands to the
# terminal of whoever looks.


def safe(text: str) -> str:
    """Text with everything that isn't printable (control characters, marks that turn the line round) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def bytes_text(number: float) -> str:
    """12 B, 3.4 KiB, 56 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1000 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" or number >= 99.5 else f"{number:.3g} {units[0]}"


def counted(number: int, what: str) -> str:
    """1 gradient, 2 gradients."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def seconds_text(seconds: float) -> str:
    """1.2 s, 34 s, 5 min, 6 h, 7 d."""
    seconds = max(seconds, 0.0)
    for limit, divisor, unit in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            amount = seconds / divisor
            return f"{amount:.1f} {unit}" if unit == "s" and amount < 9.95 else f"{amount:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def age_text(now: datetime.datetime, then: datetime.datetime) -> str:
    """How long ago that was."""
    return seconds_text((now - then).total_seconds())


def shape_text(shape: Sequence[int | None] | None) -> str:
    """[100,-1], or "any"."""
    return "any" if shape is None else "[" + ",".join("-1" if dim is None else str(dim) for dim in shape) + "]"


def number_text(value: Any) -> str:
    """An element as text: integers exactly, others with the digits that tell them from their neighbours."""
    if isinstance(value, (np.integer, int)):
        return str(int(value))
    if isinstance(value, (np.complexfloating, complex)):
        return str(value).strip("()")
    return str(value)


# JSON


def plain(value: Any) -> Any:  # noqa: PLR0911
    """A value as JSON can say it: times in ISO 8601, numbers that JSON lacks (nan, inf, complex) as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (complex, np.complexfloating)):
        return number_text(value)
    # bfloat16 is no subclass of numpy's floating.
    number = float(value)
    return number if math.isfinite(number) else str(number)


def echo_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints a value as JSON, in ASCII: safe for every terminal."""
    click.echo(json.dumps(plain(value), indent=indent, allow_nan=False))


# Tables


def console(*, stderr: bool = False) -> Console:
    """Where to print. No markup: brackets in a name are brackets."""
    return Console(markup=False, highlight=False, emoji=False, stderr=stderr, soft_wrap=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 0) -> None:
    """Prints columns, those that begin with ">" aligned to the right: on a terminal what fits, into a pipe all."""
    cells = [[safe(cell) for cell in row] for row in rows]
    titles = [column.lstrip(">") for column in columns]
    if console().is_terminal:
        table = Table(box=None, pad_edge=False, padding=(0, 1 if len(columns) > 6 else 2, 0, 0), header_style="bold")
        for number, (column, title) in enumerate(zip(columns, titles, strict=True)):
            # The first column, the name, gives way where there is too little room.
            table.add_column(
                Text(" " * indent * (number == 0) + title),
                justify="right" if column.startswith(">") else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=min(8, len(title)) if number == 0 else None,
            )
        for row in cells:
            table.add_row(*(Text(" " * indent * (number == 0) + cell) for number, cell in enumerate(row)))
        console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    for row in [titles, *cells]:
        padded = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        click.echo(" " * indent + "  ".join(padded).rstrip())


def say(text: str, *, err: bool = False) -> None:
    """Prints a line, broken between words where a terminal would break it anywhere. Escape what is foreign in it."""
    out = console(stderr=err)
    if out.is_terminal:
        text = click.wrap_text(text, out.width - 1, subsequent_indent="  ")
    click.echo(text, err=err)


# Options


def _names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of accumulators, for the shell. Silent where no server answers: this runs while somebody types."""
    try:
        url = context.params.get("url") or os.environ.get("REDISACC_URL")
        names = list_names(link_to(url), escape_glob(incomplete) + "*")
    except RedisAccError:
        return []
    return [CompletionItem(name) for name in names[:100] if name.isprintable()]


def redis_option(function: Callable[P, R]) -> Callable[P, R]:
    """--redis URL."""
    return click.option(
        "--redis",
        "url",
        envvar="REDISACC_URL",
        metavar="URL",
        help="The server.  [default: REDISACC_URL, else redis://localhost:6379/0]",
    )(function)


def json_option(function: Callable[P, R]) -> Callable[P, R]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def yes_option(function: Callable[P, R]) -> Callable[P, R]:
    """--yes."""
    return click.option("--yes", "-y", is_flag=True, help="Don't ask.")(function)


def name_argument(function: Callable[P, R]) -> Callable[P, R]:
    """NAME."""
    return click.argument("name", shell_complete=_names)(function)


def names_argument(function: Callable[P, R]) -> Callable[P, R]:
    """[NAME]..."""
    return click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=_names)(function)


def keys_of(name: str) -> Keys:
    """The keys of an accumulator, given by its name or by its accumulator_ref."""
    if name.startswith("redisacc:{"):
        return Keys.of_ref(name)
    if not name or any(character in "{}" for character in name):
        raise InvalidArgumentError(f"no accumulator can have the name {name!r}")
    return Keys(name)


def link_of(url: str | None) -> Link:
    """The way to the server, if it answers soon."""
    link = link_to(url)
    link.call("PING", patience=OPENING_PATIENCE)
    return link


def confirm(question: str, *, yes: bool) -> None:
    """Asks before something is destroyed. Where nobody can be asked, only --yes will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nobody can be asked here; --yes does it without asking", USAGE)
    if not click.confirm(question, err=True):
        fail("nothing was changed")


# Failures


class Failure(click.ClickException):
    """One line to stderr, and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        setattr(self, "exit_code", exit_code)  # noqa: B010 - click declares it a class variable

    def show(self, file: Any = None) -> None:  # noqa: ARG002
        say(f"redisacc: {safe(self.message)}", err=True)


def fail(message: str, exit_code: int = FAILED) -> NoReturn:
    """Ends the command."""
    raise Failure(message, exit_code)


def _code_of(error: RedisAccError) -> int:
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


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    # The library's warnings are lines like ours; a command must not fall silent while it waits for a server.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("redisacc: %(message)s"))
    logger = logging.getLogger("redisacc")
    logger.addHandler(handler)
    try:
        yield
    except RedisAccError as error:
        raise Failure(str(error), _code_of(error)) from None
    except KeyboardInterrupt:
        # The terminal has just printed ^C.
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # `redisacc tail | head`: whoever read us has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        # A full disk, say.
        raise Failure(str(error)) from None
    finally:
        logger.removeHandler(handler)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def reported(function: Callable[P, R]) -> Callable[P, R]:
    """Expected failures become one line and an exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _reporting():
            return function(*args, **kwargs)

    return run
