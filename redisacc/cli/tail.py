"""`redisacc tail`: events as lines."""

from __future__ import annotations

import datetime
import sys

import click

from redisacc._info import Record
from redisacc._keys import DELETING
from redisacc._observing import Event, Events
from redisacc.cli._common import (
    EXIT_CODES,
    echo_json,
    json_option,
    keys_of,
    link_of,
    name_argument,
    redis_option,
    reported,
    safe,
)

__all__ = ["tail"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.option("--number", "-n", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="End after S seconds without an event.")
@redis_option
@json_option
@reported
def tail(*, name: str, number: int | None, timeout: float | None, url: str | None, as_json: bool) -> None:
    """Print what happens to an accumulator, a line for each event, until it is deleted or Ctrl-C.

    Times are this machine's. A line "missed" says that the connection was lost and is back. With --json, an object on
    each line.
    """
    link, keys = link_of(url), keys_of(name)
    # A name that nobody has is an error, not a long silence.
    found = Record(keys, link.call(*Record.command(keys)))
    with Events(link, keys, found.incarnation.removeprefix(DELETING), timeout=timeout) as events:
        if sys.stderr.isatty():
            click.echo(f"listening to {safe(keys.name)} at {link.address}, Ctrl-C ends", err=True)
        for count, event in enumerate(events, 1):
            _print(event, as_json=as_json)
            if count == number:
                break


def _print(event: Event, *, as_json: bool) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if as_json:
        known = {"step": event.global_step, "count": event.num_accumulated, "who": event.who}
        said = {key: value for key, value in known.items() if value is not None}
        echo_json({"at": now, "event": event.kind, **said, **event.details}, indent=None)
    else:
        words = [now.astimezone().strftime("%H:%M:%S.%f")[:-3], f"{event.kind:<9}"]
        if event.global_step is not None:
            words.append(f"step {event.global_step}")
        if event.num_accumulated is not None:
            words.append(f"count {event.num_accumulated}")
        words += [f"{key} {value}" for key, value in event.details.items()]
        if event.who is not None:
            words.append(event.who)
        click.echo(safe("  ".join(words)))
    sys.stdout.flush()
