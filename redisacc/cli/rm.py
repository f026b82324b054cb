"""The command `redisacc rm`: deletes accumulators and everything in them."""

from __future__ import annotations

import click

from redisacc._format.keys import DELETING, Keys
from redisacc._protocol import deletion
from redisacc._protocol.info import AccumulatorInfo, read_info
from redisacc._redis.transport import Transport
from redisacc._text import printable
from redisacc.cli.failures import EXIT_CODES, report_failures
from redisacc.cli.options import confirm, json_option, keys_of, names_argument, redis_option, transport_of, yes_option
from redisacc.cli.output import count_text, echo_json, echo_wrapped
from redisacc.errors import CorruptDataError

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
    wanted = {keys.name: keys for keys in map(keys_of, names)}.values()
    found = [(keys, *_look_at(transport, keys)) for keys in wanted]
    for keys, _, contents in found:
        echo_wrapped(f"{printable(keys.name)}: {contents}", err=True)
    these = "this accumulator" if len(found) == 1 else f"these {len(found)} accumulators"
    confirm(f"Delete {these} for every process?", yes=yes)
    for keys, incarnation, _ in found:
        # The incarnation that was shown: the name may have been created again since then.
        deletion.delete(transport, keys, incarnation.removeprefix(DELETING))
    if as_json:
        echo_json({"removed": [keys.name for keys, _, _ in found]})
    else:
        echo_wrapped(f"deleted {', '.join(printable(keys.name) for keys, _, _ in found)}")


def _look_at(transport: Transport, keys: Keys) -> tuple[str, str]:
    """Returns the incarnation of an accumulator, and what is in it."""
    try:
        info = read_info(transport, keys)
    except CorruptDataError as error:
        # What cannot be read is deleted all the same, if the record says which accumulator it belongs to.
        incarnation = transport.call("HGET", keys.record, "incarnation")
        if not incarnation or not incarnation.isascii():
            raise
        return incarnation.decode(), f"unreadable ({printable(str(error))})"
    return info.incarnation, _contents(info)


def _contents(info: AccumulatorInfo) -> str:
    text = f"step {info.global_step}, {count_text(info.num_accumulated, 'gradient')} in the round"
    if info.unacknowledged:
        text += f", {count_text(len(info.unacknowledged), 'round')} taken but not acknowledged"
    if info.waiting:
        text += f", {count_text(len(info.waiting), 'waiting taker')}"
    return text
