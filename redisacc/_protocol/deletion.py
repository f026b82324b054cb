"""Removes an accumulator: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib

from redisacc._format.buffered import number_of_parts
from redisacc._format.keys import NAMES, Keys, ParameterKeys
from redisacc._protocol.attempt_scripts import listed_attempts
from redisacc._protocol.partition_scripts import PartitionScripts
from redisacc._protocol.partition_sweep import remove_parts
from redisacc._protocol.record_reader import with_partitions
from redisacc._protocol.round_reader import all_rounds
from redisacc._redis.hash_scan import Fields, scan
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc.errors import CorruptDataError


def delete(transport: Transport, keys: Keys, incarnation: str, *, timeout: float = TIMEOUT) -> None:
    """Deletes an incarnation for everybody. Does nothing if it is gone, or was replaced by another one.

    Handles of other processes raise ``AccumulatorNotFoundError`` from the first command on.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name.
        timeout: seconds that each step tries to reach the server. The first step that fails ends the deletion.
    """
    scripts = PartitionScripts(transport, keys, incarnation=incarnation)
    if scripts.delete(finish=False, timeout=timeout) != "closed":
        return
    # From here on, nothing can be added, and the name cannot be created again until the record is removed.
    keys = with_partitions(transport, keys, timeout=timeout)
    try:
        rounds = all_rounds(transport, keys, timeout=timeout)
    except CorruptDataError:
        # Another type of key is there, so there is no list of rounds. What cannot be read must still be deleted.
        rounds = [keys.current]
    for round_keys in rounds:
        for gradient, entry in _buffered(transport, round_keys.buffered, timeout).items():
            _unlink_parts(transport, keys, gradient.decode(errors="replace"), entry, timeout)
        if round_keys != keys.current:
            # The script removes the hashes of the current round. A late copy of a plain UNLINK would remove those of an
            # accumulator that has been created under the same name since.
            transport.call("UNLINK", *round_keys.hashes, timeout=timeout)
    if keys.partitions:
        # What redisacc did not write is removed with the key.
        with contextlib.suppress(CorruptDataError):
            remove_parts(transport, keys, listed_attempts(transport, keys, timeout=timeout), timeout=timeout)
    if not transport.call("EXISTS", ParameterKeys(keys.name).record, timeout=timeout):
        # Otherwise the parameters of this name are still listed.
        with contextlib.suppress(CorruptDataError):
            # If the set of names is something else, the accumulator is not listed there.
            transport.call("SREM", NAMES, keys.name, timeout=timeout)
    scripts.delete(finish=True, timeout=timeout)


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
