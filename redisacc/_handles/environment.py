"""The place of this process in a run, which `redisacc run` hands to each process that it starts.

=========================  ====================================================================
variable                   meaning
=========================  ====================================================================
``REDISACC_ROLE``          ``chief`` or ``worker``
``REDISACC_WORKER_NUMBER`` the number of a worker, from 0; distinct across machines
``REDISACC_WORKERS``       the number of workers on all machines, if it is known
``REDISACC_RUN_ID``        a random id of this place in this run. A process that is started again after a death has the
                           id of its predecessor, and no other living process has it; so it may take over at once what
                           its predecessor had leased, and a worker without a number keeps its predecessor's.
``REDISACC_CHIEF_RUN_ID``  for a worker: the ``REDISACC_RUN_ID`` of the chief, if the same launcher starts it. When the
                           training is finished already, the worker waits until this chief has said whether it
                           continues it.
``REDISACC_RESTARTED``     ``0`` for the first process of this place in this run, ``1`` for its successors, and on a
                           host that comes later. On ``0``, a chief that finds nothing published begins at once; on
                           ``1``, it first asks whether workers still have parameters that the server has lost
``REDISACC_URL``           the server; `redisacc._wire.connect` reads it
=========================  ====================================================================

Any launcher may set them: a container's configuration, or a batch system. An empty variable counts as unset.

The variables of torchrun, ``RANK`` and ``WORLD_SIZE``, give the number of a worker and the number of workers where
``REDISACC_ROLE`` and ``REDISACC_WORKER_NUMBER`` are unset. `redisacc run --ranks` sets them as well, with
``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, for programs that read them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Literal, cast

from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

ROLE = "REDISACC_ROLE"
WORKER_NUMBER = "REDISACC_WORKER_NUMBER"
WORKERS = "REDISACC_WORKERS"
RUN_ID = "REDISACC_RUN_ID"
CHIEF_RUN_ID = "REDISACC_CHIEF_RUN_ID"
RESTARTED = "REDISACC_RESTARTED"

# In the order of the attributes of a place.
VARIABLES = (ROLE, WORKER_NUMBER, WORKERS, RUN_ID, CHIEF_RUN_ID)

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
# How torchrun names the number of a worker, that on this machine, and the numbers of workers there are.
TORCHRUN = (RANK, "LOCAL_RANK", WORLD_SIZE, "LOCAL_WORLD_SIZE")

# The largest number of workers on all machines. The largest number of a worker is one less.
MAX_WORKERS = 1_000_000

# It becomes a part of keys and values in Redis.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# No signs, spaces or underscores, and not enough digits to take long to read.
_NUMBER = re.compile(r"[0-9]{1,12}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in a run, as ``place()`` returns it. An attribute is None if its variable was not set.

    Example:
        >>> import redisacc
        >>> str(redisacc.place({"REDISACC_ROLE": "worker", "REDISACC_WORKER_NUMBER": "2"}))
        'worker 2'

    Attributes:
        role: "chief" or "worker".
        number: the number of a worker, at least 0, less than `workers`. None for a chief.
        workers: the number of workers on all machines, at least 1.
        run_id: the same for every process that takes this place, one after the other: 1 to 64 ASCII letters, digits,
            hyphens and underscores.
        chief_run_id: for a worker, the `run_id` of the chief that the same launcher starts.
    """

    role: Literal["chief", "worker"] | None = None
    number: int | None = None
    workers: int | None = None
    run_id: str | None = None
    chief_run_id: str | None = None

    def __str__(self) -> str:
        """Returns what people call the process: "chief", "worker 3"."""
        return (self.role or "process") + ("" if self.number is None else f" {self.number}")

    def added_to(self, environment: Mapping[str, str], local: tuple[int, int] | None = None) -> dict[str, str]:
        """Returns a copy of the environment that says this place, and nothing of any other.

        Args:
            environment: the environment.
            local: for a worker that gets torchrun's variables, too: which one it is of those on this machine, from 0,
                and how many they are.
        """
        names = (*VARIABLES, *TORCHRUN)
        others = {name: value for name, value in environment.items() if name not in names}
        of_worker = (None,) * len(TORCHRUN) if local is None else (self.number, local[0], self.workers, local[1])
        values = zip(names, (*dataclasses.astuple(self), *of_worker), strict=True)
        return others | {name: str(value) for name, value in values if value is not None}


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Returns the place that the environment gives to this process. Its fields are None where no variable is set.

    `redisacc run` sets the variables ``REDISACC_ROLE``, ``REDISACC_WORKER_NUMBER``, ``REDISACC_WORKERS``,
    ``REDISACC_RUN_ID`` and ``REDISACC_CHIEF_RUN_ID`` for each process that it starts; so may any other launcher.
    ``Chief`` and ``Worker`` read them, too. An empty variable counts as unset. Without a role and a number,
    torchrun's ``RANK`` and ``WORLD_SIZE`` are the number of a worker and the number of workers.

    Example:
        >>> import redisacc
        >>> redisacc.place({"REDISACC_ROLE": "worker", "REDISACC_WORKER_NUMBER": "2", "REDISACC_WORKERS": "4"})
        Place(role='worker', number=2, workers=4, run_id=None, chief_run_id=None)

    Args:
        environment: None means the environment of this process.

    Raises:
        InvalidArgumentError: a variable holds what it cannot hold; the message names the variable, its value and what
            was expected.
    """
    if environment is None:
        environment = os.environ
    role = environment.get(ROLE) or None
    if role not in (None, "chief", "worker"):
        raise InvalidArgumentError(f"the environment variable {ROLE} must be chief or worker, not {shown(role)}")
    of_number, of_workers = WORKER_NUMBER, WORKERS
    if role is None and not environment.get(WORKER_NUMBER) and environment.get(RANK):
        of_number, of_workers = RANK, WORKERS if environment.get(WORKERS) else WORLD_SIZE
    number = _number(environment, of_number, 0, MAX_WORKERS - 1)
    workers = _number(environment, of_workers, 1, MAX_WORKERS)
    if role == "chief" and number is not None:
        raise InvalidArgumentError(
            f"the environment variable {WORKER_NUMBER} is {number}, but {ROLE} is chief: only workers have numbers"
        )
    if number is not None and workers is not None and number >= workers:
        raise InvalidArgumentError(
            f"the environment variable {of_number} is {number}, but {of_workers} is {workers}: workers count from 0, "
            f"so the last one has the number {workers - 1}"
        )
    return Place(
        cast('Literal["chief", "worker"] | None', role),
        number,
        workers,
        _run_id(environment, RUN_ID),
        _run_id(environment, CHIEF_RUN_ID),
    )


def is_first_start() -> bool:
    """Returns whether a launcher has said that this process is the first in its place."""
    return os.environ.get(RESTARTED) == "0"


def is_started_again() -> bool:
    """Returns whether a launcher has said that this process follows another one in its place."""
    return os.environ.get(RESTARTED) == "1"


def _run_id(environment: Mapping[str, str], name: str) -> str | None:
    text = environment.get(name) or None
    if text is not None and not _RUN_ID.fullmatch(text):
        raise InvalidArgumentError(
            f"the environment variable {name} must be 1 to 64 ASCII letters, digits, hyphens or underscores, not "
            f"{shown(text)}"
        )
    return text


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = environment.get(name) or None
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise InvalidArgumentError(
            f"the environment variable {name} must be a whole number from {least} to {most}, not {shown(text)}"
        )
    return int(text)
