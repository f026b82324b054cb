"""`redisacc set-step`."""

from __future__ import annotations

import click

from redisacc._existing import open_existing
from redisacc.cli._common import (
    EXIT_CODES,
    confirm,
    echo_json,
    json_option,
    keys_of,
    link_of,
    name_argument,
    redis_option,
    reported,
    safe,
    yes_option,
)

__all__ = ["set_step"]


# Steps may be negative: -5 must not be taken for an option.
@click.command("set-step", epilog=EXIT_CODES, context_settings={"ignore_unknown_options": True})
@name_argument
@click.argument("step", type=click.IntRange(-(2**63), 2**63 - 1))
@redis_option
@yes_option
@json_option
@reported
def set_step(*, name: str, step: int, url: str | None, yes: bool, as_json: bool) -> None:
    """Set the global step. What has been accumulated stays.

    Gradients of earlier steps are dropped from then on. Lowering the step lets old gradients in again, so it asks.
    """
    link_of(url)
    accumulator = open_existing(keys_of(name), redis=url)
    before = accumulator.global_step()
    if step < before:
        confirm(f"The step of {safe(name)} is {before}. Lower it to {step}?", yes=yes)
    accumulator.set_global_step(step)
    if as_json:
        echo_json({"before": before, "global_step": step})
    else:
        click.echo(f"the step is {step}; it was {before}")
