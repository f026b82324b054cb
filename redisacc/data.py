"""Which examples each worker uses in each step, as a function of the step alone.

Example:
    >>> import redisacc
    >>> batches = redisacc.data.Batches(10, batch_size=4, shuffle=False)
    >>> batches.indices(step=0).tolist(), batches.indices(step=2).tolist()
    ([0, 1, 2, 3], [8, 9, 0, 1])
    >>> batches.indices(step=0, number=1, workers=2).tolist()
    [2, 3]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from redisacc._arrays.validation import flag, integer
from redisacc.errors import InvalidArgumentError

__all__ = ["Batches"]


class Batches:
    """Chooses the examples of each step, for data whose examples have numbers.

    The data is one endless sequence: all examples in the order of epoch 0, then all in that of epoch 1, and so on. Each
    step uses the next ``batch_size`` of them, cut among the workers. So every epoch has each example exactly once, all
    steps use equally many, and the last step of an epoch may have the first examples of the next one.

    The step alone decides which examples are used; the number of workers decides who uses them. Nothing has to be
    stored: a restarted process, on any machine, continues with the examples of its step. If the number of workers
    changes between two steps, no example is lost or repeated.

    The order of an epoch depends on ``seed`` and the number of the epoch, and is the same on every machine and with
    every version of numpy. It is made once for each epoch, and takes 8 bytes for each example.

    Args:
        size: the number of examples, such as ``len(images)``.
        batch_size: the number of examples in a step, all workers together.
        seed: a number, at least 0. Give the same in all processes.
        shuffle: whether each epoch has its own order. False: the examples in ascending order.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self._size = integer(size, "size", low=1)
        self._batch_size = integer(batch_size, "batch_size", low=1)
        self._seed = integer(seed, "seed", low=0)
        self._shuffle = flag(shuffle, "shuffle")
        # The number of an epoch, and its order.
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._size}, {self._batch_size}, seed={self._seed}, shuffle={self._shuffle})"

    def indices(self, step: int, number: int = 0, workers: int = 1) -> npt.NDArray[np.int64]:
        """Returns the numbers of a worker's examples in a step.

        Worker n of W has those from place n · batch_size // W up to (n + 1) · batch_size // W of the step's batch. If W
        does not divide ``batch_size``, some workers have one more than others, so pass ``weight=len(indices)`` to
        ``apply``: the step then has the mean over all examples.

        Args:
            step: the step of the run, from 0.
            number: the number of the worker, from 0.
            workers: how many workers share a step.

        Returns:
            An array of new memory, with numbers in [0, size).

        Raises:
            InvalidArgumentError: an argument is invalid, the worker's number is not below ``workers``, or there are
                more workers than examples in a step.
        """
        workers = integer(workers, "workers", low=1)
        if workers > self._batch_size:
            raise InvalidArgumentError(
                f"batch_size must be at least the number of workers, so that each has an example: {self._batch_size} "
                f"examples cannot be cut among {workers} workers"
            )
        number = integer(number, "number", low=0)
        if number >= workers:
            raise InvalidArgumentError(
                f"this is worker {number}, and the batch is cut among {workers} workers, 0 to {workers - 1}: pass "
                "the number of all workers"
            )
        first = integer(step, "step", low=0) * self._batch_size
        place, stop = first + number * self._batch_size // workers, first + (number + 1) * self._batch_size // workers
        found = np.empty(stop - place, np.int64)
        done = 0
        while done < len(found):
            epoch, at = divmod(place + done, self._size)
            piece = self._order_of(epoch)[at : at + len(found) - done]
            found[done : done + len(piece)] = piece
            done += len(piece)
        return found

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None:
            self._order = -1, np.arange(self._size)
        if self._shuffle and self._order[0] != epoch:
            # Not default_rng: another version of numpy may shuffle with it in another way, and hosts may differ.
            generator = np.random.MT19937(np.random.SeedSequence((self._seed, epoch)))
            self._order = epoch, np.random.RandomState(generator).permutation(self._size).astype(np.int64, copy=False)
        return self._order[1]

    def epoch(self, step: int) -> int:
        """Returns the number of the epoch, from 0, that the first example of a step belongs to.

        Args:
            step: the step of the run, from 0.

        Raises:
            InvalidArgumentError: the step is invalid.
        """
        return integer(step, "step", low=0) * self._batch_size // self._size

    def steps(self, epochs: int) -> int:
        """Returns the number of steps after which every example has been used at least this often.

        Pass it to ``steps(until=…)`` of a run. Step ``steps(e)`` is also the first one that has no example of an epoch
        before e.

        Args:
            epochs: a number of epochs, at least 0.

        Raises:
            InvalidArgumentError: the number is invalid.
        """
        return -(-integer(epochs, "epochs", low=0) * self._size // self._batch_size)
