"""The command `redisacc rm`: deletes accumulators, parameters, and everything in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from redisacc._format.keys import DELETING, Keys, ParameterKeys
from redisacc._monitoring.facts import count_text
from redisacc._protocol.lifecycle import deletion
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.deletion import delete_parameters
from redisacc._protocol.parameters.info import read_parameters_info
from redisacc._redis.transport import Transport
from redisacc._text import printable, shown
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import (
    confirm,
    json_option,
    keys_of,
    names_argument,
    redis_option,
    transport_of,
    yes_option,
)
from redisacc.cli.shared.output import echo_json, echo_wrapped
from redisacc.errors import CorruptDataError, NotFoundError

__all__ = ["rm"]

_ACCUMULATOR, _PARAMETERS = "accumulator", "parameters"


@click.command(epilog=EXIT_CODES)
@names_argument
@redis_option
@yes_option
@json_option
@report_failures
def rm(*, names: tuple[str, ...], url: str | None, yes: bool, as_json: bool) -> None:
    """Delete accumulators and parameters, and everything in them, for every process.

    Both go if they have the same name. Handles on them raise errors from then on. If one of the names does not exist,
    nothing is deleted.
    """
    if not names:
        raise click.UsageError("give the name of at least one accumulator")
    transport = transport_of(url)
    wanted = {keys.name: keys for keys in map(keys_of, names)}.values()
    found = [(keys, _look_at(transport, keys)) for keys in wanted]
    for keys, contents in found:
        echo_wrapped(f"{printable(keys.name)}: {'; '.join(text for _, _, text in contents)}", err=True)
    confirm(f"Delete {_these([kind for _, contents in found for kind, _, _ in contents])} for every process?", yes=yes)
    for _, contents in found:
        for _, delete, _ in contents:
            delete()
    if as_json:
        echo_json({"removed": [keys.name for keys, _ in found]})
    else:
        echo_wrapped(f"deleted {', '.join(printable(keys.name) for keys, _ in found)}")


def _these(kinds: list[str]) -> str:
    """Returns the words for the objects of a deletion, for the question."""
    if kinds == [_PARAMETERS]:
        return "these parameters"
    if _PARAMETERS in kinds:
        return "all of this"
    return "this accumulator" if len(kinds) == 1 else f"these {len(kinds)} accumulators"


def _look_at(transport: Transport, keys: Keys) -> list[tuple[str, Callable[[], None], str]]:
    """Returns what has this name: for each, its kind, what deletes it, and what is in it.

    Raises:
        NotFoundError: nothing has.
    """
    found: list[tuple[str, Callable[[], None], str]] = []
    parameter_keys = ParameterKeys(keys.name)
    parameters = _look_at_parameters(transport, parameter_keys)
    try:
        incarnation, contents = _look_at_accumulator(transport, keys)
    except NotFoundError:
        if parameters is None:
            raise
    else:
        # The incarnation that was shown: the name may have been created again since then.
        delete = partial(deletion.delete, transport, keys, incarnation.removeprefix(DELETING))
        found.append((_ACCUMULATOR, delete, contents))
    if parameters is not None:
        incarnation, contents = parameters
        delete = partial(delete_parameters, transport, parameter_keys, incarnation.removeprefix(DELETING))
        found.append((_PARAMETERS, delete, contents))
    return found


def _look_at_parameters(transport: Transport, keys: ParameterKeys) -> tuple[str, str] | None:
    """Returns the incarnation of parameters, and what is in them; None if there are none."""
    try:
        info = read_parameters_info(transport, keys)
    except CorruptDataError as error:
        is_readable, contents = False, f"unreadable parameters ({printable(str(error))})"
    else:
        if info is not None:
            return info.incarnation, f"parameters of step {info.step}, {count_text(info.leaves, 'leaf', 'leaves')}"
        is_readable, contents = True, "parameters that are being deleted"
    incarnation = transport.call("HGET", keys.record, "incarnation")
    if incarnation is None and not transport.call("EXISTS", keys.record):
        return None
    if not incarnation or not incarnation.isascii():
        raise CorruptDataError(f"{keys.record}: incarnation holds {shown(incarnation)}, which redisacc did not write")
    if is_readable and not incarnation.startswith(DELETING.encode()):
        contents = "parameters whose first version somebody has begun to publish"
    return incarnation.decode(), contents


def _look_at_accumulator(transport: Transport, keys: Keys) -> tuple[str, str]:
    """Returns the incarnation of an accumulator, and what is in it."""
    try:
        info = read_info(transport, keys)
    except CorruptDataError as error:
        # Unreadable data are deleted nevertheless, if the record says which accumulator they belong to.
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
