"""The command `redisacc finish`: ends a training."""

from __future__ import annotations

import click

from redisacc._handles.parameters import Parameters
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped

__all__ = ["finish"]


@click.command(epilog=EXIT_CODES)
@name_argument
@redis_option
@json_option
@report_failures
def finish(*, name: str, url: str | None, as_json: bool) -> None:
    """End a training: the loops of all its processes end after the same step, within a second.

    Nothing is lost: a round that is complete still counts, and the parameters stay. A chief continues the training if
    its loop goes on to a later step.
    """
    transport_of(url)
    with Parameters(keys_of(name).name, redis=url) as parameters:
        parameters.finish()
        step = parameters.step()
    if as_json:
        echo_json({"finished": True, "step": step})
    else:
        echo_wrapped(f"{printable(name)} is finished at step {step}: the loops of its processes end within a second")
