"""`redisacc watch`: how rounds fill up, live, and who is missing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redisacc._info import AccumulatorInfo, Worker, read_info
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._looking import list_names
from redisacc.cli._common import (
    EXIT_CODES,
    NOT_FOUND,
    console,
    counted,
    echo_json,
    fail,
    json_option,
    keys_of,
    link_of,
    names_argument,
    redis_option,
    reported,
    safe,
    seconds_text,
)
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError, ServerUnavailableError

__all__ = ["watch"]

# Rates are over so many seconds.
_WINDOW = 5.0
# Who was seen within this time, in seconds, is at work and not worth naming; who was not seen for an hour has gone.
_AT_WORK, _GONE = 1.0, 3600.0
# So many missing workers are named.
_NAMED = 6
# A server that doesn't answer within this time is said to be silent.
_PATIENCE = 1.0


@click.command(epilog=EXIT_CODES)
@names_argument
@click.option(
    "--interval", type=click.FloatRange(min=0.05), default=0.5, show_default=True, metavar="S", help="Seconds."
)
@click.option("--number", "-n", type=click.IntRange(min=1), metavar="N", help="End after N looks.")
@redis_option
@json_option
@reported
def watch(*, names: tuple[str, ...], interval: float, number: int | None, url: str | None, as_json: bool) -> None:
    """Watch accumulators, live: all of them, or those that are named (globs as for ls).

    For each: the step; how full the round is for the taker at the head of the queue; how many gradients are applied
    and dropped a second, and how many rounds are taken; and the workers that haven't contributed to this round, with
    the time since they were last heard of. Ctrl-C ends it.

    Into a pipe, a line for each accumulator and look; with --json, an object.
    """
    link = link_of(url)
    board = Board(link, names)
    board.look()
    if names and not board.views:
        fail(f"there is no accumulator {', '.join(names)} at {link.address}", NOT_FOUND)
    out = console()
    looks = 1
    if as_json or not out.is_terminal:
        while True:
            _print(board, as_json=as_json)
            if looks == number:
                return
            time.sleep(interval)
            board.look()
            looks += 1
    with Live(board.render(), console=out, auto_refresh=False, transient=False) as live:
        while looks != number:
            time.sleep(interval)
            board.look()
            looks += 1
            live.update(board.render(), refresh=True)


@dataclass
class View:
    """What is known of one accumulator.

    Attributes:
        info: as it was seen last.
        history: (time, applied, stale, takes) of the last seconds, the oldest first.
        required: how many gradients the last taker that was seen waiting asked for.
    """

    info: AccumulatorInfo
    history: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    required: int | None = None

    def add(self, info: AccumulatorInfo) -> None:
        if info.incarnation != self.info.incarnation:
            self.history.clear()
            self.required = None
        self.info = info
        at = info.read_at.timestamp()
        self.history.append((at, info.applied, info.stale, info.takes))
        while len(self.history) > 2 and self.history[0][0] < at - _WINDOW:
            self.history.popleft()
        if info.waiting:
            self.required = info.waiting[0].num_required

    @property
    def rates(self) -> tuple[float, float, float]:
        """Gradients applied, gradients dropped, rounds taken, each a second."""
        first, last = self.history[0], self.history[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        applied, stale, takes = ((last[n] - first[n]) / seconds for n in (1, 2, 3))
        return applied, stale, takes

    @property
    def missing(self) -> tuple[list[tuple[Worker, float]], int]:
        """Who is missing from the round and for how long it was silent, the longest first; and how many have gone."""
        ages = [(worker, (self.info.read_at - worker.seen_at).total_seconds()) for worker in self.info.missing]
        named = sorted((pair for pair in ages if _AT_WORK <= pair[1] < _GONE), key=lambda pair: -pair[1])
        return named, sum(age >= _GONE for _, age in ages)

    def missing_text(self) -> str:
        named, gone = self.missing
        words = [f"{safe(worker.name)} ({seconds_text(age)})" for worker, age in named[:_NAMED]]
        if len(named) > _NAMED:
            words.append(f"{len(named) - _NAMED} more")
        if gone:
            words.append(f"{gone} not seen for an hour")
        return ", ".join(words)


class Board:
    """All views."""

    def __init__(self, link: Link, names: Sequence[str]) -> None:
        self._link = link
        self._patterns = [name for name in names if _is_pattern(name)] or ([] if names else ["*"])
        self._named = [keys_of(name) for name in names if not _is_pattern(name)]
        self.views: dict[str, View] = {}
        self.problem = ""

    def look(self) -> None:
        """Reads everything anew. A server that doesn't answer is a problem to be shown, and may come back."""
        try:
            self._link.call("PING", patience=_PATIENCE)
            names = {name for pattern in self._patterns for name in list_names(self._link, pattern)}
            wanted = {keys.name: keys for keys in (*map(Keys, names), *self._named)}
            self.problem = ""
            found = {}
            for _, keys in sorted(wanted.items()):
                try:
                    info = read_info(self._link, keys)
                except AccumulatorNotFoundError:
                    continue
                except CorruptDataError as error:
                    self.problem = str(error)
                    continue
                view = self.views.get(keys.name) or View(info)
                view.add(info)
                found[keys.name] = view
            self.views = found
        except ServerUnavailableError:
            self.problem = f"no answer from {self._link.address}; what stands here is old"

    def render(self) -> RenderableType:
        """For a terminal."""
        parts: list[RenderableType] = []
        for view in self.views.values():
            parts += [*_lines(view), Text("")]
        if not self.views:
            parts.append(Text(f"no accumulators at {self._link.address}"))
        if self.problem:
            parts.append(Text(safe(self.problem), style="bold red"))
        return Group(*parts)


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def _lines(view: View) -> list[RenderableType]:
    info = view.info
    applied, stale, takes = view.rates
    head = Table.grid(expand=True, padding=(0, 2, 0, 0))
    head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(Text(safe(info.name), style="bold"), Text(f"step {info.global_step}   {_rate(takes)} rounds/s"))
    bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
    bar.add_column(width=1)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, overflow="ellipsis", max_width=40)
    required = view.required
    full = min(info.num_accumulated / required, 1.0) if required else 0.0
    bar.add_row(Text(""), ProgressBar(total=1.0, completed=full), Text(_waiting(view)))
    facts = f"  {_rate(applied)} applied/s  {_rate(stale)} stale/s"
    if info.unacknowledged:
        facts += f"  {len(info.unacknowledged)} taken, not acknowledged"
    lines: list[RenderableType] = [head, bar, Text(facts, no_wrap=True, overflow="ellipsis")]
    missing = view.missing_text()
    if missing:
        # Where nobody waits for them, it's no trouble yet.
        lines.append(Text(f"  missing: {missing}", style="bold yellow" if info.waiting else "dim"))
    return lines


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _waiting(view: View) -> str:
    info = view.info
    if not info.waiting:
        return f"{counted(info.num_accumulated, 'gradient')}, nobody waits"
    head = info.waiting[0]
    behind = f" +{len(info.waiting) - 1}" if len(info.waiting) > 1 else ""
    return f"{info.num_accumulated} of {head.num_required} for {safe(head.taker)}{behind}"


def _print(board: Board, *, as_json: bool) -> None:
    if board.problem:
        click.echo(f"redisacc: {safe(board.problem)}", err=True)
    for view in board.views.values():
        info = view.info
        applied, stale, takes = view.rates
        if as_json:
            facts: dict[str, Any] = {
                "at": info.read_at,
                "name": info.name,
                "global_step": info.global_step,
                "num_accumulated": info.num_accumulated,
                "num_required": info.waiting[0].num_required if info.waiting else None,
                "waiting": len(info.waiting),
                "unacknowledged": len(info.unacknowledged),
                "applied_per_second": applied,
                "stale_per_second": stale,
                "takes_per_second": takes,
                "missing": {worker.name: (info.read_at - worker.seen_at).total_seconds() for worker in info.missing},
            }
            echo_json(facts, indent=None)
        else:
            missing = view.missing_text()
            click.echo(
                f"{info.read_at:%H:%M:%S}  {safe(info.name)}  step {info.global_step}  {_waiting(view)}  "
                f"{_rate(applied)} applied/s  {_rate(stale)} stale/s" + (f"  missing: {missing}" if missing else "")
            )
    sys.stdout.flush()
