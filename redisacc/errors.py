"""Every error that redisacc raises.

::

    RedisAccError
    ├── InvalidArgumentError (ValueError)        an argument is invalid, or does not fit what is shared
    │   └── NotFiniteError                       with finite=True: a gradient holds NaN or an infinity
    ├── NotFoundError (LookupError)              there is no such accumulator, or no such parameters
    ├── AccumulatorFullError                     the buffered gradients have reached their limit
    ├── WaitTimeoutError (TimeoutError)          the step or version was not reached before the timeout
    │   └── TakeTimeoutError                     too few gradients arrived before the timeout
    ├── FinishedError                            the last version has been published
    ├── CancelledError                           the handle was closed
    ├── ConflictError                            another process has taken this one's place
    ├── DataLossError                            the server has lost data that it had acknowledged
    ├── NotReplicatedError                       done, but fewer replicas than min_replicas have it
    ├── CorruptDataError                         Redis holds data that this version did not write
    └── ServerError                              the server refused a command
        └── ServerUnavailableError (ConnectionError)   no server answers
            └── OutcomeUnknownError              the request may have been executed, or not

Any other error is a plain RedisAccError, whose message says what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redisacc._text import printable_lines

__all__ = [
    "AccumulatorFullError",
    "CancelledError",
    "ConflictError",
    "CorruptDataError",
    "DataLossError",
    "FinishedError",
    "InvalidArgumentError",
    "NotFiniteError",
    "NotFoundError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "RedisAccError",
    "ServerError",
    "ServerUnavailableError",
    "TakeTimeoutError",
    "WaitTimeoutError",
]


class RedisAccError(Exception):
    """The base class of all errors that redisacc raises.

    A message is always printable and of bounded length, whatever it quotes from Redis or from a caller.
    """

    def __init__(self, *args: object) -> None:
        # Messages escape what they quote. This is the last gate, for a key or a name that nobody thought of.
        super().__init__(*(printable_lines(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the error picklable with its attributes: a pool of processes hands errors to the parent this way."""
        return _restored, (type(self), self.args, self._state())

    def _state(self) -> dict[str, Any]:
        return dict(self.__dict__)


class InvalidArgumentError(RedisAccError, ValueError):
    """An argument is invalid. It was refused before anything changed, in this process or on the server.

    That includes a shared name that is opened with another kind, dtype, shape, reduction or buffer limit than it was
    created with, and parameters of another structure, dtype or shape than their first version.
    """


class NotFiniteError(InvalidArgumentError):
    """A gradient holds NaN or an infinity, and the accumulator was opened with ``finite=True``. Nothing was sent.

    A worker may skip such a step, or repeat it with a smaller loss scale.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], finite=True)
        >>> try:
        ...     result = acc.apply_grad([1.0, float("nan")])
        ... except redisacc.NotFiniteError as error:
        ...     print(error.path, error.index)
        None (1,)

    Attributes:
        path: the path of the leaf in a tree; None if the gradient is a single array.
        index: the first such element: its place in the array or leaf, ``()`` for a scalar. In rows of a sparse one, the
            first number is the index of the row.
    """

    def __init__(self, message: str, *, path: str | None, index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.path = path
        self.index = index


class NotFoundError(RedisAccError, LookupError):
    """There is no accumulator of this name, or nothing is published under it.

    It was never created or published; or it was deleted, and perhaps created again, since this handle was opened.
    """


class AccumulatorFullError(RedisAccError):
    """A gradient would push the buffered gradients past the accumulator's limit, and compacting does not help.

    Nothing was stored. Take the round, or create the accumulator with a larger ``limits.buffer``. With partitions and
    ``min_replicas``, compacting does not help either while replicas do not confirm what it stores.
    """


class WaitTimeoutError(RedisAccError, TimeoutError):
    """A ``timeout`` ran out before the step was reached, or before a version of parameters was published.

    Or the data changed during every attempt to read it, so no attempt was consistent.
    """


class TakeTimeoutError(WaitTimeoutError):
    """The ``timeout`` of a take ran out before enough gradients had arrived. Nothing was taken.

    There is one exception: if ``__cause__`` is a ``ServerUnavailableError``, the server did not answer at the end and
    may have granted the round nevertheless. Then ``info().unacknowledged`` lists it, and ``recover()`` returns it.

    Attributes:
        num_required: how many gradients the take required.
        num_accumulated: how many had arrived.
        workers: which workers they came from: worker's name → number of gradients in this round.
        expected: names of the workers that are expected, as the table of states in docs/explanations/concepts.md
            defines it, the most recently seen first.
        late: the same for those that are late.
        gone: the same for those that are gone.
        min_weight: the minimum sum of the weights; 0 if the take required none.
        total_weight: what it was.
    """

    def __init__(
        self,
        message: str,
        *,
        num_required: int,
        num_accumulated: int,
        workers: Mapping[str, int],
        expected: Sequence[str] = (),
        late: Sequence[str] = (),
        gone: Sequence[str] = (),
        min_weight: float = 0.0,
        total_weight: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.min_weight = min_weight
        self.total_weight = total_weight
        self.num_required = num_required
        self.num_accumulated = num_accumulated
        self.workers = dict(workers)
        self.expected, self.late, self.gone = list(expected), list(late), list(gone)


class FinishedError(RedisAccError):
    """The publisher of parameters has declared that no further version will follow.

    Attributes:
        step: the last step that was published.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class CancelledError(RedisAccError):
    """The handle was closed, either before the call or while the call was waiting. Nothing was taken."""


class ConflictError(RedisAccError):
    """Another process has taken this one's place. The message says which of these cases it is.

    - Another process leads, or has this worker's number, and keeps extending its lease.
    - This process did not extend its lease in time, and another one holds it now.
    - Other parameters are published for the same step, or parameters for a later step. Nothing was published: two
      chiefs are publishing, or a chief has continued from weights older than the published ones.
    - Another process has recovered the round before its taker acknowledged it. ``take_grad`` raises it instead of
      returning the gradient, and ``take()`` and ``recover()`` at the end of their blocks. Do not use the gradient: its
      new owner does. If the block has used it already, undo that, for example by loading the weights that were saved
      before.
    """


class DataLossError(RedisAccError):
    """The server has lost something that it had acknowledged to this handle.

    Either it restarted with older data (``appendfsync everysec``, a snapshot), or it failed over to a replica that
    lagged behind. The error is raised once; later calls continue with the data that the server has.

    From an apply or ``set_global_step``, it means that this call was not executed and that an earlier call of this
    handle is lost. From a take, it means that the round was granted but not acknowledged, so ``recover()`` returns it;
    an earlier call of this handle was undone, and if that was a take, some gradients of this round may also have been
    in the earlier one. If the message says that the round itself is no longer listed, no process has recovered it, and
    ``recover()`` does not find it. At the end of a block of ``take()``, that means that its gradients are in the
    accumulator again.

    From a take or ``recover()`` of an accumulator with partitions, it may also mean that a node has lost a part of a
    gradient that was counted. Then ``part`` and ``gradient`` name it, nothing was returned, and the round stays listed
    in ``info().unacknowledged``: ``recover(skip_lost=True)`` returns it without that gradient. ``peek()`` raises it as
    well, and changes nothing.

    From a read of parameters with partitions, it means that a node has lost a part of the published version, which
    ``part`` names. Publishing the values again, for the same step or a later one, replaces it.

    Attributes:
        part: the key of the part that is lost; None if it is something else.
        gradient: the id of its gradient; None if it is something else.
    """

    def __init__(self, message: str, *, part: str | None = None, gradient: str | None = None) -> None:
        super().__init__(message)
        self.part = part
        self.gradient = gradient


class NotReplicatedError(RedisAccError):
    """Fewer replicas than ``min_replicas`` confirmed in time, so the change may be lost if the server fails now.

    The change itself was made. An applied gradient is counted and must not be applied again. A round that was taken is
    not acknowledged: ``recover()`` returns it, and waits for the replicas as well.

    Attributes:
        replicas: how many replicas have confirmed.
        min_replicas: how many were required.
    """

    def __init__(self, message: str, *, replicas: int, min_replicas: int) -> None:
        super().__init__(message)
        self.replicas = replicas
        self.min_replicas = min_replicas


class CorruptDataError(RedisAccError):
    """The keys hold data that redisacc did not write, or that another version of it wrote. Nothing was changed."""


class ServerError(RedisAccError):
    """The server refused a command, for example because it is a read-only replica.

    If its access control list does not permit the command to the user, ``redisacc acl`` prints rules that do. If it has
    reached its ``maxmemory``, nothing was stored; takes, acknowledgments, ``recover()`` and ``delete()`` still work,
    and free memory.
    """


class ServerUnavailableError(ServerError, ConnectionError):
    """No server answers at the address."""


class OutcomeUnknownError(ServerUnavailableError):
    """The server stopped answering after a request may have reached it, so it is unknown whether it was executed.

    Do not call the method again: that would be a new request, and a gradient could be counted twice. Call ``settle()``
    instead, and until then do not modify the arrays that were passed in.

    Example:
        >>> import redisacc
        >>> accumulator = redisacc.ConditionalAccumulator("float32", shape=[2])
        >>> try:
        ...     result = accumulator.apply_grad([1.0, 2.0])
        ... except redisacc.OutcomeUnknownError as error:
        ...     result = error.settle()
        >>> result.num_accumulated
        1
    """

    def __init__(self, message: str, settle: Callable[[], Any]) -> None:
        super().__init__(message)
        self._settle: Callable[[], Any] | None = settle

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "_settle": None}

    def settle(self) -> Any:
        """Settles the request: sends it again until it is certain that it was executed, or never will be.

        The request is executed only once, even if several copies arrive, or a late one. Blocks like the method that
        raised this error. After an interrupt, when there is no such error, the accumulator's ``settle()`` does the same
        without sending the gradient again.

        Returns:
            The return value of that method: the result of ``apply_grad``, or the gradient of ``take_grad``.

        Raises:
            OutcomeUnknownError: the server still does not answer.
            RedisAccError: the request was not executed, and never will be.
            RuntimeError: this is a copy of the error that another process raised. Only that process can continue.
        """
        if self._settle is None:
            raise RuntimeError(
                "this error was copied from another process, and only that process can settle its request"
            )
        return self._settle()


def _restored(kind: type[RedisAccError], args: tuple[Any, ...], state: dict[str, Any]) -> RedisAccError:
    """Returns an error as it was when it was pickled."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
