"""Removes an accumulator, key by key where it may be large, so that a client may die in between."""

from __future__ import annotations

from redisacc._keys import NAMES, Keys
from redisacc._link import PATIENCE, Link
from redisacc._parked import number_of_parts
from redisacc._rounds import all_rounds, scan
from redisacc._scripts import Scripts


def delete(link: Link, keys: Keys, incarnation: str, *, patience: float = PATIENCE) -> None:
    """Deletes that incarnation for everybody. One that is gone, or was replaced by another, is left alone.

    ``patience`` is that of each step, in seconds; the first that fails is the last.

    Handles of other processes raise ``AccumulatorNotFoundError`` from the first command on.
    """
    scripts = Scripts(link, keys, incarnation=incarnation)
    if scripts.delete(finish=False, patience=patience) != "closed":
        return
    # From here on nobody adds anything, and until the record goes nobody can create the name anew.
    for round_keys in all_rounds(link, keys, patience=patience):
        for gradient, entry in scan(link, round_keys.parked, patience=patience).items():
            _unlink_parts(link, keys, gradient.decode(errors="replace"), entry, patience)
        if round_keys != keys.current:
            # Not those of the current round, which the script removes: a copy of this that comes late would take them
            # from whoever has created the name anew.
            link.call(
                "UNLINK", round_keys.sums, round_keys.parked, round_keys.small, round_keys.workers, patience=patience
            )
    link.call("SREM", NAMES, keys.name, patience=patience)
    scripts.delete(finish=True, patience=patience)


def _unlink_parts(link: Link, keys: Keys, gradient: str, entry: bytes, patience: float) -> None:
    number = number_of_parts(entry)
    if number is None:
        # Nobody knows how many there were: try until none is found.
        number = 0
        while link.call("EXISTS", keys.part(gradient, number), patience=patience):
            number += 1
    # One to a command: to free a large string takes the server a while, and others shall get between.
    if number:
        link.pipeline([("UNLINK", keys.part(gradient, k)) for k in range(number)], patience=patience)
