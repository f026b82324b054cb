"""Every error that redisacc raises.

::

    RedisAccError
    ├── InvalidArgumentError (ValueError)        a bad argument; nothing was changed
    │   └── SchemaMismatchError                  opened as something else than it was created as
    ├── AccumulatorNotFoundError (LookupError)   never created, deleted, or deleted and created anew
    ├── AccumulatorFullError                     the parked gradients have reached their limit
    ├── StepOverflowError (OverflowError)        a take at the last step an int64 can hold
    ├── TakeTimeoutError (TimeoutError)          not enough gradients came in time
    ├── StepTimeoutError (TimeoutError)          the step that was waited for did not come in time
    ├── PeekTimeoutError (TimeoutError)          the accumulator changed under every look at it
    ├── CancelledError                           the handle was closed
    ├── StaleSequenceError                       the server has seen a later request of this client
    ├── DataLossError                            the server has lost what it had acknowledged
    ├── NotReplicatedError                       done, but fewer replicas have it than min_replicas
    ├── CorruptDataError                         what stands under our keys is not what we wrote
    └── ServerError                              the server refused a command
        ├── NotPermittedError                    the user may not do this there
        ├── ServerOutOfMemoryError               maxmemory is reached, and nothing may be evicted
        └── ServerUnavailableError (ConnectionError)   no server answers
            └── OutcomeUnknownError              nor did it before it may have done what was asked
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "AccumulatorFullError",
    "AccumulatorNotFoundError",
    "CancelledError",
    "CorruptDataError",
    "DataLossError",
    "InvalidArgumentError",
    "NotPermittedError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "PeekTimeoutError",
    "RedisAccError",
    "SchemaMismatchError",
    "ServerError",
    "ServerOutOfMemoryError",
    "ServerUnavailableError",
    "StaleSequenceError",
    "StepOverflowError",
    "StepTimeoutError",
    "TakeTimeoutError",
]


class RedisAccError(Exception):
    """The root of everything that redisacc raises on purpose."""


class InvalidArgumentError(RedisAccError, ValueError):
    """An argument that can't be right. It was refused before anything changed, here or on the server."""


class SchemaMismatchError(InvalidArgumentError):
    """A shared name was opened with another kind, dtype, shape or reduction than it was created with."""


class AccumulatorNotFoundError(RedisAccError, LookupError):
    """The accumulator is gone: never created, deleted, or deleted and created anew since this handle was opened."""


class AccumulatorFullError(RedisAccError):
    """A gradient would take the parked ones past the accumulator's limit, and adding some up does not help.

    Nothing was stored. Take the round, or create the accumulator with a larger ``parked_limit``.
    """


class StepOverflowError(RedisAccError, OverflowError):
    """A take would move the global step past 2**63 - 1. Nothing was taken; ``set_global_step`` to go on."""


class TakeTimeoutError(RedisAccError, TimeoutError):
    """A take's ``timeout=`` ran out before enough gradients had come. Nothing was taken.

    But where its ``__cause__`` is a ``ServerUnavailableError``, the server was silent at the end, and may have granted
    a round all the same: ``info().unacknowledged`` names it then, and ``recover()`` gets it.

    Attributes:
        num_required: how many gradients the take asked for.
        num_accumulated: how many had come.
        workers: from whom: worker's name → number of gradients in this round.
        missing: names of those who applied gradients to the accumulator before and none to this round, who was seen
            last first.
    """

    def __init__(
        self,
        message: str,
        *,
        num_required: int,
        num_accumulated: int,
        workers: Mapping[str, int],
        missing: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.num_required = num_required
        self.num_accumulated = num_accumulated
        self.workers = dict(workers)
        self.missing = list(missing)


class StepTimeoutError(RedisAccError, TimeoutError):
    """A ``wait_for_step``'s ``timeout=`` ran out before the step was reached.

    Attributes:
        wanted: the step that was waited for.
        global_step: the step as it was seen last; None: no server answered.
    """

    def __init__(self, message: str, *, wanted: int, global_step: int | None) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.global_step = global_step


class PeekTimeoutError(RedisAccError, TimeoutError):
    """The accumulator changed under every look at it, so no look showed it as it was at one moment."""


class CancelledError(RedisAccError):
    """The handle was closed: before the call, or while it waited. Nothing was taken."""


class StaleSequenceError(RedisAccError):
    """The server has already seen a later request of this client, so this one was refused and not counted.

    It says that a request was delayed so long that its sender had given it up.
    """


class DataLossError(RedisAccError):
    """The server has lost something that it had acknowledged to this handle.

    It was restarted from older data (``appendfsync everysec``, a snapshot), or failed over to a replica that lagged
    behind. It is raised once, for the handle knows no more than that; later calls go on with what the server has.

    From an apply or ``set_global_step``: this call was not executed, and an earlier one of this handle is lost. From
    a take: the round that was granted is not acknowledged, and ``recover()`` hands it out; a round that was taken
    before is undone, so some of these gradients may have been in that one.
    """


class NotReplicatedError(RedisAccError):
    """Fewer replicas than ``min_replicas`` confirmed in time, so what was done may be lost if the server fails now.

    It is done all the same: an applied gradient is counted, and must not be applied again; a round that was taken is
    not acknowledged, and ``recover()`` hands it out.

    Attributes:
        replicas: how many have it.
        min_replicas: how many should.
    """

    def __init__(self, message: str, *, replicas: int, min_replicas: int) -> None:
        super().__init__(message)
        self.replicas = replicas
        self.min_replicas = min_replicas


class CorruptDataError(RedisAccError):
    """What stands under an accumulator's keys is not what redisacc writes there. Nothing was changed."""


class ServerError(RedisAccError):
    """The server refused a command: out of memory, read-only replica, missing permission, …"""


class NotPermittedError(ServerError):
    """The server's access control list doesn't let this user do that: ``redisacc acl`` prints rules that do."""


class ServerOutOfMemoryError(ServerError):
    """The server has reached its ``maxmemory`` and refuses to store more. Nothing was stored.

    Takes, acknowledgements, ``recover()`` and ``delete()`` still work, and make room.
    """


class ServerUnavailableError(ServerError, ConnectionError):
    """No server answers at the address."""


class OutcomeUnknownError(ServerUnavailableError):
    """The server fell silent after a request may have reached it, so it is not known whether it was executed.

    Calling the method again would make a new request, by which a gradient may be counted twice: call ``retry()``. Until
    then leave the arrays that were given as they are.
    """

    def __init__(self, message: str, retry: Callable[[], Any]) -> None:
        super().__init__(message)
        self._retry = retry

    def retry(self) -> Any:
        """Goes on with the same request. However often it is sent, and however late, it is executed once.

        Blocks like the method that raised this error.

        Returns:
            What that method would have returned: for ``apply_grad`` the result, for ``take_grad`` the gradient.

        Raises:
            OutcomeUnknownError: the server is still silent.
            RedisAccError: the request was not executed, and never will be.
        """
        return self._retry()
