"""The command `redisacc rm`: deletes accumulators and everything in them."""

from __future__ import annotations

import click

from redisacc._format.keys import DELETING, Keys
from redisacc._protocol import deletion
from redisacc._protocol.info import AccumulatorInfo, read_info
from redisacc._text import printable
from redisacc.cli.failures import EXIT_CODES, report_failures
from redisacc.cli.options import confirm, json_option, keys_of, names_argument, redis_option, transport_of, yes_option
from redisacc.cli.output import count_text, echo_json, echo_wrapped

__all__ = ["rm"]


@click.command(epilog=EXIT_CODES)
@names_argument
@redis_option
@yes_option
@json_option
@report_failures
def rm(*, names: tuple[str, ...], url: str | None, yes: bool, as_json: bool) -> None:
    """Delete accumulators and everything in them, for every process.

    Handles on them raise AccumulatorNotFoundError from then on. If one of the names does not exist, nothing is deleted.
    """
    if not names:
        raise click.UsageError("give the name of at least one accumulator")
    transport = transport_of(url)
    found: list[tuple[Keys, AccumulatorInfo]] = [
        (keys, read_info(transport, keys)) for keys in {keys.name: keys for keys in map(keys_of, names)}.values()
    ]
    for _, info in found:
        echo_wrapped(f"{printable(info.name)}: {_contents(info)}", err=True)
    these = "this accumulator" if len(found) == 1 else f"these {len(found)} accumulators"
    confirm(f"Delete {these} for every process?", yes=yes)
    for keys, info in found:
        # The incarnation that was shown: the name may have been created again since then.
        deletion.delete(transport, keys, info.incarnation.removeprefix(DELETING))
    if as_json:
        echo_json({"removed": [info.name for _, info in found]})
    else:
        echo_wrapped(f"deleted {', '.join(printable(info.name) for _, info in found)}")


def _contents(info: AccumulatorInfo) -> str:
    text = f"step {info.global_step}, {count_text(info.num_accumulated, 'gradient')} in the round"
    if info.unacknowledged:
        text += f", {count_text(len(info.unacknowledged), 'round')} taken but not acknowledged"
    if info.waiting:
        text += f", {count_text(len(info.waiting), 'waiting taker')}"
    return text
