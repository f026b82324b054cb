"""The command `redisacc set-step`: sets the global step."""

from __future__ import annotations

import click

from redisacc._handles.existing import open_existing
from redisacc._monitoring.facts import count_text
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import (
    confirm,
    json_option,
    keys_of,
    name_argument,
    redis_option,
    transport_of,
    yes_option,
)
from redisacc.cli.shared.output import echo_json, echo_wrapped

__all__ = ["set_step"]


# Steps may be negative, and -5 is not an option.
@click.command("set-step", epilog=EXIT_CODES, context_settings={"ignore_unknown_options": True})
@name_argument
@click.argument("step", type=click.IntRange(-(2**63), 2**63 - 1))
@redis_option
@yes_option
@json_option
@report_failures
def set_step(*, name: str, step: int, url: str | None, yes: bool, as_json: bool) -> None:
    """Set the global step.

    Gradients of earlier steps are dropped from then on; gradients that have been accumulated stay, and the next take
    hands them out as gradients of the new step. So the command asks before it passes over a round that is not empty. It
    also asks before it lowers the step, because that accepts old gradients again.
    """
    transport_of(url)
    accumulator = open_existing(keys_of(name), redis=url)
    info = accumulator.info()
    before = info.global_step
    if step < before:
        confirm(f"Lower the step of {printable(name)} from {before} to {step} and accept old gradients again?", yes=yes)
    elif step > before and info.num_accumulated:
        gradients = count_text(info.num_accumulated, "gradient")
        echo_wrapped(f"the round of step {before} has {gradients}, which would count for step {step}", err=True)
        confirm(f"Set the step of {printable(name)} to {step}?", yes=yes)
    accumulator.set_global_step(step)
    if as_json:
        echo_json({"before": before, "global_step": step})
    else:
        click.echo(f"the step is now {step}; it was {before}")
