"""`redisacc rm`: accumulators and everything in them."""

from __future__ import annotations

import click

from redisacc import _deletion
from redisacc._info import AccumulatorInfo, read_info
from redisacc._keys import DELETING, Keys
from redisacc.cli._common import (
    EXIT_CODES,
    confirm,
    counted,
    echo_json,
    json_option,
    keys_of,
    link_of,
    names_argument,
    redis_option,
    reported,
    safe,
    say,
    yes_option,
)

__all__ = ["rm"]


@click.command(epilog=EXIT_CODES)
@names_argument
@redis_option
@yes_option
@json_option
@reported
def rm(*, names: tuple[str, ...], url: str | None, yes: bool, as_json: bool) -> None:
    """Remove accumulators, with all that is in them, for everybody.

    Handles on them raise AccumulatorNotFoundError from then on. All names must exist, or nothing is removed.
    """
    if not names:
        raise click.UsageError("which accumulators?")
    link = link_of(url)
    found: list[tuple[Keys, AccumulatorInfo]] = [
        (keys, read_info(link, keys)) for keys in {keys.name: keys for keys in map(keys_of, names)}.values()
    ]
    for _, info in found:
        say(f"{safe(info.name)}: {_contents(info)}", err=True)
    confirm(f"Remove {'it' if len(found) == 1 else f'these {len(found)}'} for everybody?", yes=yes)
    for keys, info in found:
        # The incarnation that was shown, not one that somebody creates meanwhile.
        _deletion.delete(link, keys, info.incarnation.removeprefix(DELETING))
    if as_json:
        echo_json({"removed": [info.name for _, info in found]})
    else:
        say(f"removed {', '.join(safe(info.name) for _, info in found)}")


def _contents(info: AccumulatorInfo) -> str:
    text = f"step {info.global_step}, {counted(info.num_accumulated, 'gradient')} in this round"
    if info.unacknowledged:
        text += f", {counted(len(info.unacknowledged), 'round')} taken and not acknowledged"
    if info.waiting:
        text += f", {counted(len(info.waiting), 'taker')} waiting"
    return text
