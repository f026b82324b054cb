"""The command `redisacc tail`: prints events, one on a line."""

from __future__ import annotations

import datetime
import sys

import click

from redisacc._format.keys import DELETING
from redisacc._format.record import Record
from redisacc._protocol.lifecycle.events import Event, Events
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import Seconds, json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped

__all__ = ["tail"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.option("--number", "-n", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="Stop after S seconds without an event.")
@redis_option
@json_option
@report_failures
def tail(*, name: str, number: int | None, timeout: float | None, url: str | None, as_json: bool) -> None:
    """Print the events of an accumulator as they happen, until it is deleted or Ctrl-C stops the command.

    Each event is a line; with --json, each line is an object. Times are this machine's. The event "missed" means
    that events may be missing, because the connection was lost and is back.

    \b
      redisacc tail embeddings --number 10
    """
    keys, transport = keys_of(name), transport_of(url)
    # An unknown name is an error rather than an endless silence.
    record = Record(keys, transport.call(*Record.command(keys)))
    with Events(transport, keys, record.incarnation.removeprefix(DELETING), timeout=timeout) as events:
        if sys.stderr.isatty():
            echo_wrapped(f"listening to {printable(keys.name)} at {transport.address}; Ctrl-C stops", err=True)
        for count, event in enumerate(events, 1):
            _print(event, as_json=as_json)
            if count == number:
                break


def _print(event: Event, *, as_json: bool) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if as_json:
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
