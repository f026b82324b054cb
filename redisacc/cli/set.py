"""The command `redisacc set`: changes the quorum."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from redisacc._format.quorum import LONGEST_GRACE
from redisacc._handles.existing import open_existing
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import Seconds, json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json

__all__ = ["set"]

# The name before the "=", an argument of `set_quorum` -> the type of its value.
_FIELDS: dict[str, click.ParamType[Any]] = {
    "least": click.IntRange(min=1),
    "most": click.IntRange(min=1),
    "grace": Seconds(min=0, max=LONGEST_GRACE),
}


def _change(
    context: click.Context, parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, int | float | None]:
    """Returns the arguments of ``set_quorum`` for words such as ``least=3``, or ends the command."""
    change: dict[str, int | float | None] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in _FIELDS or not equals:
            expected = ", ".join(f"{known}=VALUE" for known in _FIELDS)
            raise click.BadParameter(f"'{word}' is none of {expected}.", context, parameter)
        if name in change:
            raise click.BadParameter(f"{name} is given twice.", context, parameter)
        change[name] = None if text in ("", "none") else _FIELDS[name].convert(text, parameter, context)
    return change


@click.command("set", epilog=EXIT_CODES)
@name_argument
@click.argument("change", metavar="NUMBER...", nargs=-1, required=True, callback=_change)
@redis_option
@json_option
@report_failures
def set(  # noqa: A001 - named as the command
    *, name: str, change: dict[str, Any], url: str | None, as_json: bool
) -> None:
    """Change the quorum: how many gradients a step waits for, and how long.

    least is how many gradients a step needs, grace for how many seconds it then waits for more, and most how many end
    the grace. What is not named stays; an empty value, or none, removes it. A chief that is waiting follows at once,
    and so does any other take that does not say itself what it waits for. When a machine is gone for good, for example,
    lower least, and the training continues:

    \b
      redisacc set embeddings least=3
      redisacc set embeddings least=3 most=4 grace=0.5
      redisacc set embeddings most=none grace=none
    """
    transport_of(url)
    accumulator = open_existing(keys_of(name), redis=url)
    before = accumulator.quorum()
    accumulator.set_quorum(**change)
    after = accumulator.quorum()
    if as_json:
        echo_json({"before": dataclasses.asdict(before), "quorum": dataclasses.asdict(after)})
    else:
        click.echo(f"{printable(name)}: {str(after) or 'none'} (before: {str(before) or 'none'})")
