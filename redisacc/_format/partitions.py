"""Partitions: the slots of a Redis Cluster among which an accumulator spreads the parts of its gradients.

A partition is a slot ``{NAME/p}``. Its number p was chosen when the accumulator was created, so that the partitions lie
on as many nodes as there are. Part K of every gradient is in partition K modulo their number, and gradients are cut
in such a way that the same partition has the same elements of all of them.
"""

from __future__ import annotations

import re

from redisacc._format.stored_text import of_ascii
from redisacc._wire.slot_map import SlotMap, key_slot

# The most partitions: a Redis Cluster has at most about a thousand nodes.
MOST_PARTITIONS = 1000
# The largest number of a partition. It bounds the search for numbers whose slots lie on the right nodes.
_LAST_NUMBER = 99_999

# The least bytes of a gradient for each partition if the number of partitions is chosen here. At 1 Gbit/s, with four
# workers and a node on each one's host, a step of 1 MiB takes 47 ms in one partition and 34 ms in four. Smaller pieces
# would cost more requests than the other nodes save. Beyond this many partitions, messages about parts are what takes
# time (benchmarks/results/scale.md), so that each needs more bytes.
AUTO_BYTES = 2**18
AUTO_MANY = 64
AUTO_BYTES_OF_MANY = 2**20

_TEXT = re.compile(r"(?:[0-9]{1,5},)*[0-9]{1,5}")
_LONGEST = MOST_PARTITIONS * 6


def parse_partitions(stored: bytes | str) -> tuple[int, ...]:
    """Returns the numbers that a record lists; () if the accumulator has no partitions.

    Raises:
        ValueError: redisacc writes no such text.
    """
    text = of_ascii(stored)
    if not text:
        return ()
    if len(text) > _LONGEST or _TEXT.fullmatch(text) is None:
        raise ValueError("the text is not a list of numbers")
    numbers = tuple(map(int, text.split(",")))
    if partitions_text(numbers) != text or not 2 <= len(set(numbers)) == len(numbers) <= MOST_PARTITIONS:
        raise ValueError("the numbers are not those of partitions")
    return numbers


def partitions_text(numbers: tuple[int, ...]) -> str:
    """Returns the text that a record lists."""
    return ",".join(map(str, numbers))


def choose_partitions(name: str, number: int, slot_map: SlotMap | None) -> tuple[int, ...]:
    """Returns the numbers of the partitions of a new accumulator, so that each master gets as many as any other.

    Args:
        name: the name of the accumulator.
        number: how many partitions; 1: none, because the slot of the record suffices.
        slot_map: the owners of the slots; None: a single server, which has all of them.
    """
    if number == 1:
        return ()
    if slot_map is None or len(slot_map.masters) < 2:
        return tuple(range(number))
    # The master with the record already has its work to do, so it is the last to get one more than the others.
    home = slot_map.owner(key_slot(f"{{{name}}}"))
    masters = sorted(slot_map.masters, key=lambda master: master == home)
    free = {master: number // len(masters) for master in masters}
    for master in masters[: number % len(masters)]:
        free[master] += 1
    chosen: list[int] = []
    for candidate in range(_LAST_NUMBER + 1):
        owner = slot_map.owner(key_slot(f"{{{name}/{candidate:05}}}"))
        if owner is not None and free.get(owner, 0) > 0:
            free[owner] -= 1
            chosen.append(candidate)
            if len(chosen) == number:
                break
    else:
        # A master has too few slots: the next free numbers take its place.
        chosen += [spare for spare in range(_LAST_NUMBER + 1) if spare not in chosen][: number - len(chosen)]
    return tuple(chosen)


def automatic_partitions(nbytes: int | None, slot_map: SlotMap | None) -> int:
    """Returns how many partitions a new accumulator should have.

    Args:
        nbytes: the bytes of a gradient; None if they are not known.
        slot_map: the owners of the slots; None: a single server.

    Returns:
        The number of masters, but at most one for each 256 KiB of a gradient, and of more than 64, at most one for each
        MiB; 1 on a single server.
    """
    masters = 1 if slot_map is None else len(slot_map.masters)
    return masters if nbytes is None else min(masters, most_automatic_partitions(nbytes))


def most_automatic_partitions(nbytes: int) -> int:
    """Returns among how many partitions a gradient of this many bytes is spread if there are enough masters."""
    return max(1, min(AUTO_MANY, nbytes // AUTO_BYTES), nbytes // AUTO_BYTES_OF_MANY)
