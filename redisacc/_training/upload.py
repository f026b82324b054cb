"""An upload of a worker's gradient: its leaves are put one by one, as a backward pass makes them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsFloat

import numpy as np

from redisacc._arrays.leaf_values import leaf_elements, leaf_rows
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._protocol.applying.upload import Upload as Streamed
from redisacc._text import listed, shown
from redisacc.errors import InvalidArgumentError

# At most this many paths are listed in an error.
LISTED = 10


class Given(NamedTuple):
    """A gradient as a program gives it.

    Attributes:
        gradient: the gradient.
        weight: its weight.
        metrics: what travels with it.
    """

    gradient: Any
    weight: float
    metrics: Mapping[str, SupportsFloat] | None


class Upload:
    """A gradient whose leaves are put one by one. ``Worker.begin`` and ``Training.begin`` return it.

    A part of the gradient is sent as soon as you have put all leaves in it, while you compute the others. The gradient
    counts only after ``commit``. The end of a ``with`` block abandons an upload that was not committed.

    Gradients of less than 512 KiB, and of parameters with sparse leaves, are only collected; ``commit`` then applies
    them as ``apply`` does.

    Example:
        >>> import numpy as np
        >>> import redisacc
        >>> weights = {"first": np.zeros(100_000, np.float32), "last": np.zeros(100_000, np.float32)}
        >>> optimizer = redisacc.optim.SGD(0.5)
        >>> with redisacc.Training("docs-upload", weights, optimizer=optimizer, workers=1) as training:
        ...     for step, weights in training.steps(until=1):
        ...         with training.begin() as upload:
        ...             for path in ("last", "first"):
        ...                 upload.put(path, np.ones_like(weights[path]))
        ...             result = upload.commit()
        ...     training.delete()
        >>> result.outcome
        'applied'
    """

    def __init__(
        self,
        spec: AccumulatorSpec,
        streamed: Streamed | None,
        commit: Callable[[Given], ApplyResult],
        abandon: Callable[[], object],
    ) -> None:
        self._spec = spec
        self._streamed = streamed
        self._commit = commit
        self._abandon = abandon
        self._pid = os.getpid()
        # Guards what follows: a backward pass may use several threads.
        self._lock = threading.Lock()
        self._values: dict[int, Any] = {}
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon()

    def put(self, path: str, array: Any) -> None:
        """Adds the gradient of a leaf. Never blocks on the network. Any thread may call it, in any order of the leaves.

        Args:
            path: the path of the leaf, such as "layers/0/w"; "." if the parameters are a single array.
            array: its gradient, as in the tree for ``apply``: an array, for a sparse leaf ``IndexedSlices``, or None if
                there is no gradient. An array of the leaf's dtype that is contiguous is not copied, so do not write to
                it before ``commit`` or ``abandon`` has returned.

        Raises:
            InvalidArgumentError: there is no such leaf, it was put before, or its dtype or shape is wrong: the message
                names the path. Or the upload has ended, or belongs to the process that this one was forked from.
        """
        number, elements = self._checked(path, array)
        self._check_process()
        with self._lock:
            if self._has_ended:
                raise InvalidArgumentError("this upload has ended: begin another one")
            if number in self._values:
                raise InvalidArgumentError(f"the gradient at {shown(path)} was put before: put each leaf once")
            self._values[number] = array
        if self._streamed is not None:
            self._streamed.put(number, elements)

    def _checked(self, path: str, array: Any) -> tuple[int, Any]:
        paths = self._spec.structure.numbers
        if not isinstance(path, str) or path not in paths:
            raise InvalidArgumentError(
                f"{shown(path)} is not the path of a leaf. The paths are {shown(self._spec.structure.paths)}"
            )
        leaf = self._spec.leaves[paths[path]]
        check = leaf_rows if leaf.is_sparse else leaf_elements
        return paths[path], check(leaf, array, "grad")

    def commit(self, *, weight: float = 1.0, metrics: Mapping[str, SupportsFloat] | None = None) -> ApplyResult:
        """Applies the gradient, exactly once, as ``apply`` does.

        Blocks until the rest is sent, and waits through an outage. If the upload was lost meanwhile, this sends the
        whole gradient.

        Args:
            weight: as for ``apply``. If it is not 1, reducers have to add up again what they added up in advance.
            metrics: as for ``apply``.

        Returns:
            The result, as of ``apply``.

        Raises:
            InvalidArgumentError: leaves are missing: the message names their paths, and the upload continues. Or the
                weight or the metrics are invalid, or the step is over. Or the upload belongs to the process that this
                one was forked from.
            RedisAccError: any other error of ``apply``.
        """
        self._check_process()
        paths = self._spec.structure.paths
        missing = [path for number, path in enumerate(paths) if number not in self._values]
        if missing:
            raise InvalidArgumentError(
                f"the gradient lacks {listed(missing, LISTED, shown)}: put each leaf, and None for one that has no "
                "gradient"
            )
        with self._lock:
            if self._has_ended:
                raise InvalidArgumentError("this upload has ended: begin another one")
            self._has_ended = True
        leaves = [self._values[number] for number in range(len(paths))]
        if self._streamed is not None and self._spec.missing == "skip":
            self._streamed.put(len(leaves), np.array([leaf is not None for leaf in leaves], np.int32))
        return self._commit(Given(self._spec.structure.build(leaves), weight, metrics))

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise InvalidArgumentError(
                f"this upload belongs to process {self._pid}, from which this one was forked: begin another one"
            )

    def abandon(self) -> None:
        """Ends the upload, and removes what was sent. ``begin`` or ``apply`` may follow, also for the same step.

        Blocks for a round trip, and for at most 2 seconds if the server does not answer. Has no effect after
        ``commit``, or in a process that was forked from the one that began it.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._abandon()
