"""Replication that somebody asked to wait for."""

from __future__ import annotations

from redisacc._text import shown
from redisacc.errors import NotReplicatedError


def check_replicated(name: str, done: str, *, replicas: int, min_replicas: int) -> None:
    """Raises NotReplicatedError if fewer replicas than ``min_replicas`` have confirmed what was done.

    Args:
        name: the accumulator.
        done: what was done, as a clause: "the gradient was counted".
        replicas: how many replicas confirmed it in time.
        min_replicas: how many should have.
    """
    if replicas < min_replicas:
        raise NotReplicatedError(
            f"{shown(name)}: {done}, but only {replicas} of the {min_replicas} replicas that should have it "
            "confirmed it in time",
            replicas=replicas,
            min_replicas=min_replicas,
        )
