"""Removes an accumulator: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from redisacc._format.buffered import number_of_parts
from redisacc._format.keys import NAMES, Keys, ParameterKeys, PartitionedKeys
from redisacc._protocol.parts.sweep import listed_attempts, remove_parts
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._protocol.scripts import Scripts
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.scans import Fields, scan
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError


def delete(transport: Transport, keys: Keys, incarnation: str) -> None:
    """Deletes an incarnation for everybody. Does nothing if it is gone, or was replaced by another one.

    Handles of other processes raise ``NotFoundError`` from the first command on.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name.
    """
    current = keys.current
    others = [current.sums, current.buffered, current.inline, current.workers, keys.sessions, keys.queue]
    others += [keys.takers, keys.taken, keys.recovered, keys.compacting, keys.attempts, keys.crew, *keys.reducers]
    delete_in_steps(
        transport,
        keys,
        incarnation,
        others,
        lambda: _remove_contents(transport, keys),
        sibling=ParameterKeys(keys.name),
    )


def delete_in_steps(
    transport: Transport,
    keys: Keys | ParameterKeys,
    incarnation: str,
    others: Sequence[str],
    remove_contents: Callable[[], None],
    *,
    marks: Sequence[str] = (),
    sibling: Keys | ParameterKeys,
) -> None:
    """Deletes an accumulator, or parameters. If this process dies on the way, another one can repeat the deletion.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator or of the parameters.
        incarnation: the incarnation to delete.
        others: all other keys of a fixed name that belong to it. The server refuses the script to users who may not
            touch each of them, whether it exists or not, so these keys also decide who may delete.
        marks: keys that get a mark of the deletion, from which others learn that it was no loss of data.
        remove_contents: removes everything that is too much for the script. The record is closed then: until it is
            removed, nothing can be added, and nothing can be created under this name.
        sibling: the keys of the parameters or of the accumulator that may have the same name.
    """
    wakes = isinstance(keys, Keys)
    delete = Scripts(transport, keys, {}, base=keys.record, incarnation=incarnation, wakes=wakes).delete
    if delete(finish=False, marks=marks, others=others).outcome != "closed":
        return
    remove_contents()
    if not transport.call("EXISTS", sibling.record):
        # Otherwise the sibling would no longer be listed. If the set of names is something else, nothing is listed
        # there.
        with contextlib.suppress(CorruptDataError, NotPermittedError):
            transport.call("SREM", NAMES, keys.name)
    delete(finish=True, marks=marks, others=others)


def remove_attempted(transport: Transport, keys: PartitionedKeys) -> None:
    """Removes the parts in partitions of attempts that are under way, and of those whose parts are to be removed."""
    if keys.partitions:
        # A list that redisacc did not write is removed with its key.
        with contextlib.suppress(CorruptDataError):
            remove_parts(transport, keys, listed_attempts(transport, keys))


def _remove_contents(transport: Transport, keys: Keys) -> None:
    with contextlib.suppress(CorruptDataError):
        # Otherwise `redisacc doctor --fix` finds the parts in partitions that this handle does not know.
        keys = with_partitions(transport, keys)
    try:
        rounds = all_rounds(transport, keys)
    except CorruptDataError:
        # The key has another type, so there is no list of rounds. Deleting must succeed nevertheless.
        rounds = [keys.current]
    for round_keys in rounds:
        buffered: Fields = {}
        with contextlib.suppress(CorruptDataError):
            buffered = scan(transport, round_keys.buffered)
        for gradient, entry in buffered.items():
            _unlink_parts(transport, keys, gradient.decode(errors="replace"), entry)
        if round_keys != keys.current:
            # The script removes the hashes of the current round. A late copy of a plain UNLINK would remove the hashes
            # of a new accumulator with the same name.
            transport.call("UNLINK", *round_keys.hashes)
    remove_attempted(transport, keys)


def _unlink_parts(transport: Transport, keys: Keys, gradient: str, entry: bytes) -> None:
    number = number_of_parts(entry)
    if number is None:
        # The number of parts is unknown: look for them until one is missing.
        number = 0
        while transport.call("EXISTS", keys.part(gradient, number)):
            number += 1
    # One part to a command, because freeing a large string takes the server some time: others get between.
    if number:
        transport.pipeline([("UNLINK", keys.part(gradient, k)) for k in range(number)])
