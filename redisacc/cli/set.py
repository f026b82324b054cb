"""The command `redisacc set`: changes the defaults for takes that pass none."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from redisacc._format.settings import LONGEST_GRACE
from redisacc._handles.existing import open_existing
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import Seconds, json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json

__all__ = ["set"]

# The name before the "=" -> the argument of `configure`, and the type of its value.
_SETTINGS: dict[str, tuple[str, click.ParamType[Any]]] = {
    "n": ("num_required", click.IntRange(min=1)),
    "up_to": ("up_to", click.IntRange(min=1)),
    "grace": ("grace", Seconds(min=0, max=LONGEST_GRACE)),
}


def _change(
    context: click.Context, parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, int | float | None]:
    """Returns the arguments of ``configure`` for words such as ``n=3``, or ends the command."""
    change: dict[str, int | float | None] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in _SETTINGS or not equals:
            expected = ", ".join(f"{known}=VALUE" for known in _SETTINGS)
            raise click.BadParameter(f"'{word}' is none of {expected}.", context, parameter)
        argument, kind = _SETTINGS[name]
        if argument in change:
            raise click.BadParameter(f"{name} is given twice.", context, parameter)
        change[argument] = None if text in ("", "none") else kind.convert(text, parameter, context)
    return change


@click.command("set", epilog=EXIT_CODES)
@name_argument
@click.argument("settings", metavar="SETTING...", nargs=-1, required=True, callback=_change)
@redis_option
@json_option
@report_failures
def set(  # noqa: A001 - named as the command
    *, name: str, settings: dict[str, Any], url: str | None, as_json: bool
) -> None:
    """Change how many gradients a step waits for, and how long.

    A step waits for n gradients. With grace, it then waits for this number of seconds longer, or until there are up_to
    gradients. A setting that is not named stays; an empty value, or none, removes it. A chief that is waiting follows
    at once, and so does any other take that does not name a number of gradients itself. When a machine is gone for
    good, for example, lower n, and the training continues:

    \b
      redisacc set embeddings n=3
      redisacc set embeddings n=3 up_to=4 grace=0.5
      redisacc set embeddings up_to=none grace=none
    """
    transport_of(url)
    accumulator = open_existing(keys_of(name), redis=url)
    before = accumulator.settings()
    accumulator.configure(**settings)
    after = accumulator.settings()
    if as_json:
        echo_json({"before": dataclasses.asdict(before), "settings": dataclasses.asdict(after)})
    else:
        click.echo(f"{printable(name)}: {after} (before: {before})")
