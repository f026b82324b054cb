"""The output of the commands: texts for numbers and times, JSON, tables."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click
import numpy as np
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from redisacc._format.entries import WorkerInfo
from redisacc._text import printable
from redisacc.tools.monitoring.facts import number_text

# Options of the command that runs


def given(option: str) -> Any:
    """Returns the value of an option that many commands share: "url", "json" or "yes"; None if the command has none."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"redisacc.{option}")


# Workers


def by_name(workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Returns workers in the order of their names, "worker 2" before "worker 10": a live display stays still."""
    # Every second piece is a number, so pieces in the same place compare.
    return sorted(
        workers,
        key=lambda worker: [
            int(piece) if place % 2 else piece for place, piece in enumerate(re.split(r"([0-9]+)", worker.name))
        ],
    )


# JSON


def json_value(value: Any) -> Any:
    """Returns a value that JSON can hold: times in ISO 8601; numbers that JSON lacks (nan, inf, complex) as text."""
    return json.loads(json.dumps(value, default=_simpler), parse_constant=lambda text: str(float(text)))


def _simpler(value: Any) -> Any:
    match value:
        case np.ndarray():
            return list(value)
        case datetime.datetime():
            return value.isoformat()
        case np.integer():
            return int(value)
        case complex() | np.complexfloating():
            return number_text(value)
    # bfloat16 is no subclass of numpy's floating.
    return float(value)


def echo_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints a value as JSON, in ASCII: safe for every terminal."""
    click.echo(json.dumps(json_value(value), indent=indent))


def report(facts: Any, text: str, *, err: bool = False) -> None:
    """Prints the facts with --json, and else the line, wrapped as ``echo_wrapped`` does."""
    if given("json"):
        echo_json(facts)
    else:
        echo_wrapped(text, err=err)


# Lines and tables


def console(*, stderr: bool = False) -> Console:
    """Returns a console for standard output or standard error. It has no markup: brackets in a name stay brackets."""
    return Console(markup=False, highlight=False, emoji=False, stderr=stderr, soft_wrap=False)


def echo_wrapped(text: str, *, err: bool = False, indent: int = 2) -> None:
    """Prints a line, wrapped between words on a terminal.

    Args:
        text: the line. The caller escapes foreign text in it with `printable`.
        err: print to standard error.
        indent: number of spaces in front of each further line.
    """
    out = console(stderr=err)
    if out.is_terminal:
        text = click.wrap_text(text, out.width - 1, subsequent_indent=" " * indent)
    click.echo(text, err=err)


def print_facts(name: str, kind: str, facts: Iterable[tuple[str, str]]) -> None:
    """Prints facts about something: a title, and a line for each fact, wrapped between words on a terminal.

    Args:
        name: its name. It and all other texts are escaped here.
        kind: its kind.
        facts: labels and texts. A fact without a text is left out.
    """
    click.echo(f"{click.style(printable(name), bold=True)}  {printable(kind)}")
    for label, text in facts:
        if text:
            echo_wrapped(f"  {label:<13}{printable(text)}", indent=15)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0) -> None:
    """Prints a table: cut to the width of a terminal, whole into a pipe.

    Args:
        columns: the titles; columns whose title begins with ">" are aligned to the right.
        rows: a value for each column, which becomes a text here and is escaped.
        indent: number of spaces in front of each line.
    """
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    out = console()
    gap = 1 if out.is_terminal and len(columns) > 6 else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    titles = [column.lstrip(">") for column in columns]
    for column, title in zip(columns, titles, strict=True):
        justify: JustifyMethod = "left" if column == title else "right"
        table.add_column(Text(title), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in texts:
        table.add_row(*map(Text, row))
    widths = [max(map(cell_len, column)) + gap for column in zip(titles, *texts, strict=True)]
    if out.is_terminal:
        # The first column, a name, gives way where the others leave it too little room.
        table.columns[0].max_width = max(8, out.width - indent - sum(widths[1:]))
    else:
        out.width = sum(widths) + indent
    with out.capture() as written:
        out.print(Padding(table, (0, 0, 0, indent)))
    for line in written.get().splitlines():
        click.echo(line.rstrip())
