"""Waits until replicas confirm a write, if the handle was opened with min_replicas."""

from __future__ import annotations

from collections.abc import Sequence

from redisacc._clock import durations
from redisacc._redis.sockets.fast_socket import Command
from redisacc._text import shown
from redisacc.errors import CorruptDataError, NotReplicatedError


def wait_commands(min_replicas: int) -> list[Command]:
    """Returns the command that waits until this many replicas have its connection's writes; 0: no command."""
    return [("WAIT", min_replicas, round(durations.replication * 1000))] if min_replicas else []


def confirmed(where: str, replies: Sequence[object]) -> int:
    """Returns how many replicas the reply to ``wait_commands`` counts; 0 if there was no command.

    Args:
        where: the key that was written, for errors.
        replies: the reply, if there was a command.

    Raises:
        CorruptDataError: it is no number.
    """
    match replies:
        case []:
            return 0
        case [int(replicas)]:
            return replicas
    raise CorruptDataError(f"{where}: WAIT replied {shown(replies)}, not a number of replicas")


def check_replicated(name: str, done: str, *, replicas: int, min_replicas: int) -> None:
    """Raises NotReplicatedError if fewer than ``min_replicas`` replicas have confirmed a write.

    Args:
        name: the accumulator.
        done: the write, as a clause: "the gradient was counted".
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
