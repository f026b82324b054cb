"""Removes an accumulator: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from redisacc._format.buffered import number_of_parts
from redisacc._format.keys import NAMES, Keys, ParameterKeys, PartitionedKeys
from redisacc._protocol.parts.sweep import remove_parts
from redisacc._protocol.rounds.record_reader import with_partitions
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._protocol.scripts.attempts import listed_attempts
from redisacc._protocol.scripts.deletion import Deletion
from redisacc._protocol.scripts.partitions import PartitionScripts
from redisacc._redis.hash_scan import Fields, scan
from redisacc._redis.reply_errors import NotPermittedError
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc.errors import CorruptDataError


def delete(transport: Transport, keys: Keys, incarnation: str, *, timeout: float = TIMEOUT) -> None:
    """Deletes an incarnation for everybody. Does nothing if it is gone, or was replaced by another one.

    Handles of other processes raise ``NotFoundError`` from the first command on.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name.
        timeout: seconds that each step tries to reach the server. The first step that fails ends the deletion.
    """
    scripts = PartitionScripts(transport, keys, incarnation=incarnation)
    delete_in_steps(
        transport,
        keys,
        lambda finish: scripts.delete(finish=finish, timeout=timeout),
        lambda: _remove_contents(transport, keys, timeout),
        sibling=ParameterKeys(keys.name),
        timeout=timeout,
    )


def delete_in_steps(
    transport: Transport,
    keys: Keys | ParameterKeys,
    run: Callable[[bool], Deletion],
    remove_contents: Callable[[], None],
    *,
    sibling: Keys | ParameterKeys,
    timeout: float,
) -> None:
    """Deletes an accumulator, or parameters. If this process dies on the way, another one can repeat the deletion.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator or of the parameters.
        run: calls the script that closes the record, or, with True, removes it.
        remove_contents: removes everything that is too much for the script. The record is closed then: until it is
            removed, nothing can be added, and nothing can be created under this name.
        sibling: the keys of the parameters or of the accumulator that may have the same name.
        timeout: seconds that each step tries to reach the server.
    """
    if run(False) != "closed":
        return
    remove_contents()
    if not transport.call("EXISTS", sibling.record, timeout=timeout):
        # Otherwise the sibling would no longer be listed. If the set of names is something else, nothing is listed
        # there.
        with contextlib.suppress(CorruptDataError, NotPermittedError):
            transport.call("SREM", NAMES, keys.name, timeout=timeout)
    run(True)


def remove_attempted(transport: Transport, keys: PartitionedKeys, *, timeout: float) -> None:
    """Removes the parts in partitions of attempts that are under way, and of those whose parts are to be removed."""
    if keys.partitions:
        # A list that redisacc did not write is removed with its key.
        with contextlib.suppress(CorruptDataError):
            remove_parts(transport, keys, listed_attempts(transport, keys, timeout=timeout), timeout=timeout)


def _remove_contents(transport: Transport, keys: Keys, timeout: float) -> None:
    with contextlib.suppress(CorruptDataError):
        # Otherwise `redisacc gc` finds the parts in partitions that this handle does not know.
        keys = with_partitions(transport, keys, timeout=timeout)
    try:
        rounds = all_rounds(transport, keys, timeout=timeout)
    except CorruptDataError:
        # The key has another type, so there is no list of rounds. Deleting must succeed nevertheless.
        rounds = [keys.current]
    for round_keys in rounds:
        for gradient, entry in _buffered(transport, round_keys.buffered, timeout).items():
            _unlink_parts(transport, keys, gradient.decode(errors="replace"), entry, timeout)
        if round_keys != keys.current:
            # The script removes the hashes of the current round. A late copy of a plain UNLINK would remove the hashes
            # of a new accumulator with the same name.
            transport.call("UNLINK", *round_keys.hashes, timeout=timeout)
    remove_attempted(transport, keys, timeout=timeout)


def _buffered(transport: Transport, key: str, timeout: float) -> Fields:
    try:
        return scan(transport, key, timeout=timeout)
    except CorruptDataError:
        return {}


def _unlink_parts(transport: Transport, keys: Keys, gradient: str, entry: bytes, timeout: float) -> None:
    number = number_of_parts(entry)
    if number is None:
        # The number of parts is unknown: look for them until one is missing.
        number = 0
        while transport.call("EXISTS", keys.part(gradient, number), timeout=timeout):
            number += 1
    # One part to a command, because freeing a large string takes the server some time: others get between.
    if number:
        transport.pipeline([("UNLINK", keys.part(gradient, k)) for k in range(number)], timeout=timeout)
