"""A worker of a training: it gets the parameters of each step, and applies a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, SupportsFloat

from redisacc._arrays.encodings import Encoding
from redisacc._arrays.results import ApplyResult
from redisacc._handles.environment import place
from redisacc._protocol.waiting.lifetime import Closing
from redisacc._training.follow import Follow, FollowOptions
from redisacc._training.options import Finite
from redisacc._training.upload import Upload
from redisacc.errors import InvalidArgumentError


class Worker(Closing):
    """A worker of a training: for each step it gets the parameters, and applies a gradient.

    Workers may join, leave, die and return at any moment. Each holds a number under a lease, which tells it its share
    of the data. It counts once per step, also if two processes of one number should run for a while.

    Example:
        ``Chief`` has one with both. A number is free again when its worker is closed:

        >>> import redisacc
        >>> with redisacc.Worker("docs-worker") as first, redisacc.Worker("docs-worker") as second:
        ...     first.number, second.number
        (0, 1)
        >>> with redisacc.Worker("docs-worker") as third:
        ...     third.number
        0

    Args:
        shared_name: the name of the training.
        number: the number of this worker, from 0. None means the environment variable ``REDISACC_WORKER_NUMBER``, which
            `redisacc run` sets; else the number of the predecessor with the same ``REDISACC_RUN_ID``; else the lowest
            free one.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.
        encoding: how the float32 elements of this worker's gradients travel: "float32" (or None), "bfloat16" or "int8",
            as for ``ConditionalAccumulator``. Workers may differ.
        finite: what happens to a gradient that holds NaN or an infinity. "skip": the step continues without it, as with
            ``skip``, and a warning says so. It is the default, because one such gradient would make all weights NaN,
            for all processes and for good, and refusing it would leave the others to wait. True: ``apply`` raises
            NotFiniteError; another gradient may follow, and if the loop continues without one, this worker skips the
            step. False: nothing is checked, which saves reading each gradient once more.
        patience: for how many seconds every call waits while the server does not answer. None means forever. An outage
            that lasts for some seconds is logged once, and so is its end. If no server answers at the very beginning,
            an error is raised after a few seconds.

    Attributes:
        shared_name: the name of the training.
        number: the number of this worker.
        workers: among how many workers the data is shared.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or this process is the chief.
        ConflictError: another process has this number. Its predecessor may still have it: if that is a process on this
            machine that is dead, its lease is taken at once; else it is waited for, for up to 10 seconds.
        ServerUnavailableError: no server answers.
    """

    def __init__(
        self,
        shared_name: str,
        *,
        number: int | None = None,
        redis: object = None,
        encoding: Encoding | None = None,
        finite: Finite = "skip",
        patience: float | None = None,
    ) -> None:
        here = place()
        if here.role == "chief":
            raise InvalidArgumentError("the environment says that this process is the chief, so it cannot be a worker")
        self._follow = Follow(shared_name, FollowOptions(number, redis, encoding, finite, patience, here))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, number={self.number})"

    @property
    def shared_name(self) -> str:
        """The name of the training."""
        return self._follow.shared_name

    @property
    def number(self) -> int:
        """The number of this worker."""
        return self._follow.number

    @property
    def workers(self) -> int:
        """How many workers there are, as announced by the chief.

        With it, a worker cuts its share of the data: ``data[worker.number :: worker.workers]``. A worker whose number
        is not below this one has no share of its own; a warning says so once.

        Blocks for a round trip; before the training has begun, until a chief begins it. In a loop over ``steps()``, it
        is read at most once in each step.

        Raises:
            ConflictError: another process has this worker's number now.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        return self._follow.workers

    def steps(self) -> Iterator[tuple[int, Any]]:
        """Yields each step and its parameters, for a loop that computes a gradient and applies it.

        Blocks until the parameters of a later step are published; a message after 5 seconds, and then less often, says
        who is expected, late or gone. Steps may be skipped if this worker is slow. The loop ends when the chief
        finishes the training, and at once if it has finished before, unless a chief that was started together with
        this worker may still continue it. The last parameters are not yielded, because no
        gradient of them is needed; ``Parameters(shared_name).latest()`` returns them.

        Yields:
            The step, and the parameters as a tree of read-only arrays.

        Raises:
            ConflictError: another process has this worker's number now, because this one stalled for too long.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        return self._follow.steps()

    def apply(
        self, gradient: Any, *, weight: float = 1.0, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> ApplyResult:
        """Applies the gradient of this worker for the current step of ``steps()``.

        Blocks for a round trip, and waits through an outage. However often the call is repeated, by this process or by
        another one with this number, one gradient counts: the first.

        Args:
            gradient: a tree like the parameters, as ``TreeAccumulator.apply_grad`` takes it. If the parameters are a
                single array: an array, or for a sparse one ``IndexedSlices`` or a tuple of indices and values. It must
                not be written to before the next step.
            weight: factor applied to the gradient, and its share in the mean: 0 for nothing, as ``skip`` does, whatever
                the gradient is; else a number in [1.2e-38, 3.4e38], such as the number of examples whose mean the
                gradient is. Integer dtypes accept 1 only, and 0 in sums.
            metrics: numbers that travel with the gradient, such as its loss: a dict of at most 32 names, each of up to
                64 ASCII letters, digits and ``_ . / -``, and of 768 bytes as text. The chief gets their means by
                weight, over those gradients of the step that have them.

        Returns:
            The result. Its ``outcome`` is "applied"; "repeated" if the round has a gradient of this worker; "stale" if
            the round has been taken; or "skipped", with weight 0 or because of NaN. The loop continues in all cases.

        Raises:
            InvalidArgumentError: the gradient is invalid, and the message names the first path where that is so; or the
                weight is.
            NotFiniteError: with ``finite=True``, if an element is NaN or infinite. Another gradient may follow.
            ConflictError: another process has this worker's number now.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
            RedisAccError: any other error of ``apply_grad``.
        """
        return self._follow.apply(gradient, weight=weight, metrics=metrics)

    def skip(self) -> ApplyResult:
        """Ends the current step of ``steps()`` without a gradient of this worker, which the step does not wait for.

        The mean is that of the others, to the bit, unless ``Mean(by="count")`` divides it by the number of workers. If
        every worker skips, weights and state stay as they are, and the step counts. For a ``quorum``, a skip counts as
        a gradient. Blocks as ``apply`` does, and sends as much: dense leaves as zeros, with the smallest weight.

        Returns:
            The result. Its ``outcome`` is "skipped"; or as for ``apply``, if this worker is late or has applied before.

        Raises:
            InvalidArgumentError: there is no step; or each gradient counts, in a mean of integers.
            RedisAccError: as ``apply``.
        """
        return self._follow.skip()

    def begin(self) -> Upload:
        """Begins the upload of this worker's gradient for the current step of ``steps()``, leaf by leaf.

        The first call opens the accumulator; others do not block. An upload that was begun before and has not been
        committed is abandoned, as it is when the loop continues, or by ``apply``.

        Returns:
            The upload, to which leaves are put, and which is then committed.

        Raises:
            InvalidArgumentError: there is no step.
            ConflictError, NotFoundError, ServerUnavailableError: as for ``apply``.
        """
        return self._follow.begin()

    def as_encoded(self, gradient: Any, *, weight: float = 1.0) -> Any:
        """Returns a gradient as the round gets it: the same, rounded if it travels encoded (``encoding``).

        The difference is the loss of the encoding. A worker may add it to its next gradient if ``apply`` was successful
        (error feedback). Nothing is sent, but the first call opens the accumulator.

        Args:
            gradient: as for ``apply``.
            weight: as for ``apply``. The result is not multiplied by it, but a small gradient that has one may be
                buffered, and then travels encoded.

        Returns:
            A tree like the chief's gradients, an array, or ``IndexedSlices``, in memory of its own.

        Raises:
            InvalidArgumentError: the gradient is invalid.
            NotFoundError: the training does not exist, or was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        return self._follow.as_encoded(gradient, weight=weight)

    def close(self) -> None:
        """Closes the handles, and gives the lease back. The training can be continued. Closing twice does nothing."""
        self._follow.close()
