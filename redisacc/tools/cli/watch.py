"""The command `redisacc watch`: shows live how rounds fill up, and which workers are late or gone; or prints events."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import sys
from collections.abc import Sequence

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from redisacc._clock import clock
from redisacc._format.entries import EXPECTED, IN_THE_ROUND, WorkerInfo
from redisacc._format.keys import DELETING
from redisacc._format.record import Record
from redisacc._protocol.lifecycle.events import Event, Events
from redisacc._text import age_text, listed, printable, shown
from redisacc.errors import ServerUnavailableError
from redisacc.tools.cli.shared.failures import NOT_FOUND, fail, refuse
from redisacc.tools.cli.shared.options import Seconds, command, keys_of, names_argument, targets_of, the_server
from redisacc.tools.cli.shared.output import by_name, console, echo_json, echo_wrapped, given
from redisacc.tools.monitoring.facts import count_text, everything_of, progress_text, training_text
from redisacc.tools.monitoring.monitor import Collector, View

# Maximum number of workers of each state that are named.
_NAMED = 6
# Seconds after which a server that does not answer is reported.
_TIMEOUT = 1.0


@command()
@names_argument
@click.option("--events", is_flag=True, help="Print the events of one accumulator as they happen.")
@click.option(
    "--interval",
    type=Seconds(min=0.05, max=86400),
    metavar="S",
    help="Seconds between two refreshes.  [default: 0.5]",
)
@click.option("--number", "-n", type=click.IntRange(min=1), metavar="N", help="Stop after N refreshes, or N events.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="With --events: stop after S seconds without one.")
def watch(
    *,
    names: tuple[str, ...],
    events: bool,
    interval: float | None,
    number: int | None,
    timeout: float | None,
) -> None:
    """Watch all accumulators, or the named ones, live. NAME may be a glob, as for ls.

    For each accumulator, the display shows its step, how full the round is for the first waiting taker, the rates of
    applied gradients, stale gradients and taken rounds, whether a reducer works on it and keeps up, the metrics of the
    latest round, and the workers that are not in this round, with the time since they were last seen: those that are
    expected, late or gone. For a training run, it also shows how many of its steps are done, which process leads, the
    time of a step, and the bytes of the parameters, of the state, and of both in all versions that are stored. Ctrl-C
    stops the command.

    Into a pipe, the command prints a line for each accumulator and refresh; with --json, an object on each line.

    With --events, each line is an event of one accumulator, until it is deleted; with --json, each line is an object.
    Times are this machine's. The event "missed" means that events may be missing, because the connection was lost and
    restored.

    \b
      redisacc watch 'train-*'
      redisacc watch --json --number 1
      redisacc watch embeddings --events --number 10
    """
    refuse(
        events and (len(names) != 1 or interval is not None),
        "--events prints those of one accumulator: give its NAME, and no --interval",
    )
    refuse(timeout is not None and not events, "--timeout needs --events")
    if events:
        _print_events(names[0], number, timeout)
    else:
        _watch(names, 0.5 if interval is None else interval, number)


def _watch(names: Sequence[str], interval: float, number: int | None) -> None:
    transport = the_server()
    board = Board(transport, *targets_of(names))
    board.update()
    if names and not board.views:
        fail(f"there is no accumulator {' or '.join(map(shown, names))} at {transport.address}", NOT_FOUND)
    out = console()
    live = None if given("json") or not out.is_terminal else Live(console=out, auto_refresh=False)
    with live or contextlib.nullcontext():
        for refreshes in itertools.count(1):
            if live is None:
                _print(board)
            else:
                live.update(board.render(), refresh=True)
            if refreshes == number:
                return
            clock.sleep(interval)
            board.update()


def _names_text(view: View, workers: Sequence[WorkerInfo]) -> str:
    def text(worker: WorkerInfo) -> str:
        return f"{printable(worker.name)} (last seen {age_text(view.info.read_at, worker.seen_at)} ago)"

    return listed(by_name(workers), _NAMED, text)


class Board(Collector):
    """The watched accumulators.

    Attributes:
        problem: the error of the latest refresh; empty if there was none.
    """

    problem = ""

    def update(self) -> None:
        """Reads the server. If it does not answer, sets ``problem`` and keeps the views, because it may come back."""
        try:
            self.refresh(timeout=_TIMEOUT)
            self.problem = self.problems[-1] if self.problems else ""
        except ServerUnavailableError:
            self.problem = f"no answer from {self.address}; the figures are out of date"

    def render(self) -> RenderableType:
        """Returns the board for a terminal."""
        parts: list[RenderableType] = []
        for view in self.views.values():
            name, *others = map(Text, lines_of(view))
            name.stylize("bold")
            parts += [name, *(Padding(line, (0, 0, 0, 2)) for line in others), Text("")]
        if not self.views:
            parts.append(Text(f"no accumulators at {self.address}"))
        if self.problem:
            parts.append(Text(printable(self.problem), style="bold red"))
        return Group(*parts)


def lines_of(view: View) -> list[str]:
    """Returns what is said of an accumulator: its round, rates, run, and the workers that are not in the round."""
    info = view.info
    applied, stale, takes = view.rates
    until = None if view.parameters is None else view.parameters.until
    rates = f"{_rate(applied)} applied/s  {_rate(stale)} stale/s  {_rate(takes)} rounds/s"
    if info.reducer is not None:
        rates += f"  reducer {info.reducer.state}"
    if info.unacknowledged:
        rates += f"  {len(info.unacknowledged)} taken but not acknowledged"
    training = training_text(info, view.parameters, view.step_seconds)
    return [
        f"{printable(info.name)}  step {progress_text(info.global_step, until)}  {_waiting(view)}",
        rates,
        *([training] if training else []),
        # A line for those that are expected comes and goes with every round, and the board would jump with it.
        *(
            f"{state}: {_names_text(view, workers) or 'nobody'}"
            for state, workers in info.states.items()
            if state != IN_THE_ROUND and (workers or (state == EXPECTED and info.known_workers))
        ),
    ]


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _waiting(view: View) -> str:
    info = view.info
    if not info.waiting:
        return f"{count_text(info.num_accumulated, 'gradient')}, no taker waiting"
    head = info.waiting[0]
    behind = f" +{len(info.waiting) - 1}" if len(info.waiting) > 1 else ""
    return f"{info.num_accumulated} of {head.num_required} for {printable(head.taker)}{behind}"


def _print(board: Board) -> None:
    if board.problem:
        click.echo(f"redisacc: {printable(board.problem)}", err=True)
    for view in board.views.values():
        applied, stale, takes = view.rates
        if given("json"):
            facts = {
                **everything_of(view.info, view.parameters),
                "applied_per_second": applied,
                "stale_per_second": stale,
                "takes_per_second": takes,
                "step_seconds": view.step_seconds,
            }
            echo_json(facts, indent=None)
        else:
            click.echo("  ".join([f"{view.info.read_at:%H:%M:%S}", *lines_of(view)]))
    sys.stdout.flush()


def _print_events(name: str, number: int | None, timeout: float | None) -> None:
    keys, transport = keys_of(name), the_server()
    # An unknown name is an error rather than an endless silence.
    record = Record(keys, transport.call(*Record.command(keys)))
    with Events(transport, keys, record.incarnation.removeprefix(DELETING), timeout=timeout) as events:
        if sys.stderr.isatty():
            echo_wrapped(f"listening to {printable(keys.name)} at {transport.address}; Ctrl-C stops", err=True)
        for count, event in enumerate(events, 1):
            _print_event(event)
            if count == number:
                break


def _print_event(event: Event) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if given("json"):
        known = {"step": event.global_step, "count": event.num_accumulated, "who": event.who}
        present = {key: value for key, value in known.items() if value is not None}
        echo_json({"at": now, "event": event.kind, **present, **event.details}, indent=None)
    else:
        words = [now.astimezone().strftime("%H:%M:%S.%f")[:-3], f"{event.kind:<9}"]
        if event.global_step is not None:
            words.append(f"step {event.global_step}")
        if event.num_accumulated is not None:
            words.append(f"count {event.num_accumulated}")
        words += [f"{key} {value}" for key, value in event.details.items()]
        if event.who is not None:
            words.append(event.who)
        click.echo(printable("  ".join(words)))
    sys.stdout.flush()
