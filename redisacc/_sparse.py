"""The sparse accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from redisacc import _arguments
from redisacc._accumulator import ApplyResult, ConditionalAccumulatorBase
from redisacc._arguments import Array, shape_text
from redisacc._dtypes import DType
from redisacc._parked import Gradient
from redisacc._shown import shown
from redisacc._slices import IndexedSlices
from redisacc._totals import SparseTotal
from redisacc.errors import InvalidArgumentError


class SparseConditionalAccumulator(ConditionalAccumulatorBase[IndexedSlices]):
    """Adds up sparse gradients (rows and their indices), and hands out their mean or sum once there are enough.

    "MEAN" divides the sum of each row by the number of gradients *that held its index*.

    Args:
        dtype: element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16, qint32; a name, a numpy dtype, or TensorFlow's.
        shape: shape of the whole array, of which gradients hold rows. None: any; None or -1 for a dimension: any.
            Dimension 0 bounds the indices, the others are those of a row; rows may have more dimensions. () means
            one value for each index.
        shared_name: name under which other processes find it, up to 512 bytes without braces or control characters.
            An existing accumulator of that name is opened, a new one is created. None or "": a private one, which
            goes with this handle.
        name: labels log records.
        reduction_type: "MEAN" (also None) or "SUM".
        redis: a client of redis-py, a URL (``redis://``, ``rediss://``, ``unix://``), or None: ``REDISACC_URL`` of the
            environment, else ``redis://localhost:6379/0``. A client's pool must have two connections to spare while
            a take waits: one to work with, one to listen on.
        worker: the name under which gradients of this handle are counted; None: "host:pid".
        in_place_limit: gradients of more elements than this, where each row counts for 24 more, are held whole
            ("parked") and added up by the taker, instead of by the server; 0 parks all. None: 2048, measured.
        parked_limit: bytes that the parked gradients of a round may have together, given at creation. Beyond it
            clients add some of them up to make room. None: 256 MiB, or what the accumulator was created with.
        min_replicas: an accepted gradient and a taken round wait until so many replicas of the server have them, at
            most 5 seconds, and raise NotReplicatedError if they don't. 0: replication is not waited for.

    Raises:
        InvalidArgumentError: an argument can't be right.
        SchemaMismatchError: the shared name exists with another kind, dtype, shape or reduction.
        ServerUnavailableError: no server answers; it says how to start one.
    """

    _kind = "sparse"

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: object = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        redis: object = None,
        worker: str | None = None,
        in_place_limit: int | None = None,
        parked_limit: int | None = None,
        min_replicas: int = 0,
    ) -> None:
        super().__init__(
            dtype,
            shape,
            shared_name,
            name,
            reduction_type,
            redis=redis,
            worker=worker,
            in_place_limit=in_place_limit,
            parked_limit=parked_limit,
            min_replicas=min_replicas,
        )

    def apply_grad(
        self,
        grad_indices: npt.ArrayLike,
        grad_values: npt.ArrayLike,
        grad_shape: npt.ArrayLike | None = None,
        local_step: int = 0,
        name: str | None = None,
    ) -> ApplyResult:
        """Adds a gradient to the current round if ``local_step >= global_step``; drops it otherwise.

        Does not block, except for the round trip; a server that doesn't answer is tried for 30 seconds. The gradient
        is counted once, however often the connection breaks and the request is sent again.

        Args:
            grad_indices: integer vector ``[n]``, in any order and with repetitions (whose rows are added up first:
                an index counts once a gradient). None negative, and all below a declared dimension 0. n = 0 counts
                as a gradient and dilutes nothing.
            grad_values: the rows, ``[n, *row]``; ``row`` fits the declared shape and, if the round is not empty,
                equals the round's. Other dtypes are converted where numpy's "same_kind" cast allows.
            grad_shape: integer vector: shape of the whole array, checked against the declared one (with at least as
                many dimensions; -1 is no wildcard). None: not checked.
            local_step: integer scalar in [-2**63, 2**63 - 1]: the step that the gradient was computed for.
            name: labels log records.

        Returns:
            True-like when it was accepted; ``outcome`` says "applied" or "stale".

        Raises:
            InvalidArgumentError: wrong dtype, index, shape or step. Nothing was changed.
            AccumulatorNotFoundError: the accumulator was deleted.
            AccumulatorFullError: what is parked has reached its limit, and adding it up makes no room.
            DataLossError: an earlier gradient of this handle is lost; this one was not counted.
            NotReplicatedError: it was counted, but fewer replicas than ``min_replicas`` have it yet.
            ServerOutOfMemoryError: the server has reached its maxmemory. Nothing was stored.
            ServerUnavailableError: no server could be reached. Nothing was sent.
            OutcomeUnknownError: the server fell silent after it may have counted the gradient, or before it will. Don't
                apply it again: call the error's ``retry()``.
        """
        label = self._own_label if name is None else self._label(name)
        step = _arguments.integer(local_step, "local_step")
        indices, last, are_ascending = _arguments.indices(grad_indices)
        given = _arguments.array(grad_values, "grad_values")
        self._check_rows(len(indices), last, given)
        if grad_shape is not None:
            self._check_whole(grad_shape)
        values = _arguments.cast(given, self._dtype, "grad_values", value=grad_values)
        return self._apply(
            Gradient(values, indices) if are_ascending else ascending(indices, values, self._dtype),
            local_step=step,
            round_shape=values.shape[1:],
            label=label,
        )

    def apply_indexed_slices_grad(self, grad: Any, local_step: int = 0, name: str | None = None) -> ApplyResult:
        """Adds a gradient given as ``IndexedSlices``: ours, TensorFlow's, or anything with its three attributes.

        Args:
            grad: an object with ``indices``, ``values`` and ``dense_shape`` (which may be None).
            local_step, name: as for ``apply_grad``, which also says what is returned and raised.
        """
        missing = [attribute for attribute in ("indices", "values", "dense_shape") if not hasattr(grad, attribute)]
        if missing:
            raise InvalidArgumentError(f"grad must have .indices, .values and .dense_shape, unlike {shown(grad)}")
        return self.apply_grad(grad.indices, grad.values, grad.dense_shape, local_step, name)

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> tuple[Array, Array, Array]:
        """Takes the reduced gradient of the round once at least ``num_required`` gradients are in it.

        Blocks until then. Takers are served strictly in order of arrival: the first in the queue holds up those
        behind it even if they ask for less. On success the step grows by 1 and the next round begins empty.

        Args:
            num_required: integer scalar, at least 1. The result holds everything that had come, maybe more.
            name: labels log records.
            timeout: seconds to wait at most, 0 or more; None: without end.

        Returns:
            ``(indices, values, shape)``: int64 ``[n]``, sorted and unique; ``[n, *row]`` in the accumulator's dtype:
            the sum of each row, for "MEAN" divided by the number of gradients that held it (integers truncate toward
            zero); int64 vector: the declared dimension 0, or -1, and the dimensions of a row.

        Raises:
            InvalidArgumentError: ``num_required`` or ``timeout`` can't be right.
            TakeTimeoutError: not enough came in time. It says how many did, and from whom. Nothing was taken.
            CancelledError: the handle was closed.
            AccumulatorNotFoundError: the accumulator was deleted.
            StepOverflowError: the step is 2**63 - 1. Nothing was taken.
            OutcomeUnknownError: the round was read, and the server fell silent before it was acknowledged. The error's
                ``retry()`` acknowledges it and returns the gradient.
            ServerUnavailableError: the server fell silent before the round was read. ``info().unacknowledged`` names
                the round if it was granted, and ``recover()`` gets it.
            DataLossError, NotReplicatedError: the round was taken and not acknowledged: ``recover()`` hands it out.
            CorruptDataError: what stands in Redis doesn't add up, because keys were evicted or changed. What there
                is of the round stays, listed in ``info().unacknowledged``.
        """
        return self._take_gradient(
            num_required, timeout, name, lambda slices: (slices.indices, slices.values, slices.dense_shape)
        )

    def take_indexed_slices_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> IndexedSlices:
        """As ``take_grad``, with the result as ``IndexedSlices``."""
        slices: IndexedSlices = self._take_gradient(num_required, timeout, name, lambda slices: slices)
        return slices

    def _check_rows(self, number: int, last: int, values: Array) -> None:
        """``number`` indices up to ``last``, and a row of ``values`` for each."""
        declared = self._shape or ()
        rows = declared[0] if declared else None
        if values.ndim == 0:
            raise InvalidArgumentError("grad_values must have a row for each index, and is a scalar")
        if len(values) != number:
            raise InvalidArgumentError(f"grad_indices has {number} entries and grad_values {len(values)} rows")
        if values.shape[1:] != declared[1:] and not agrees(values.shape[1:], declared[1:]):
            raise InvalidArgumentError(
                f"grad_values must be rows of the declared shape {shape_text(declared)}, not of shape "
                f"{shape_text(values.shape)}"
            )
        if rows is not None and last >= rows:
            raise InvalidArgumentError(
                f"grad_indices must be below dimension 0 of the declared shape, {rows}, and holds {last}"
            )

    def _check_whole(self, grad_shape: object) -> None:
        whole = _arguments.array(grad_shape, "grad_shape")
        if whole.ndim != 1 or (whole.size and whole.dtype.kind not in "iu"):
            raise InvalidArgumentError(f"grad_shape must be None or an integer vector, not {shown(grad_shape)}")
        declared = self._shape
        if declared is None:
            return
        dims = whole.tolist()
        if not agrees(dims, declared):
            raise InvalidArgumentError(
                f"grad_shape must agree with the declared shape {shape_text(declared)}, unlike {shown(dims)}"
            )

    def _total(self, shape: tuple[int, ...]) -> SparseTotal:
        bound = self._shape[0] if self._shape else None
        return SparseTotal(self._dtype, shape, bound=bound, where=self._keys.current.sums)

    def _result(self, total: Any, num_accumulated: int) -> IndexedSlices:
        assert isinstance(total, SparseTotal)
        indices, values = total.result(self._reduction_type, num_accumulated)
        rows = self._shape[0] if self._shape else None
        whole = np.array([-1 if rows is None else rows, *values.shape[1:]], np.int64)
        return IndexedSlices(values, indices, whole)


def agrees(dims: Sequence[int], declared: Sequence[int | None]) -> bool:
    """Whether dimensions are as declared, perhaps with further ones after them."""
    return len(dims) >= len(declared) and all(
        want is None or want == have for want, have in zip(declared, dims, strict=False)
    )


def ascending(indices: Array, values: Array, dtype: DType) -> Gradient:
    """The gradient with its indices strictly increasing: sorted, and rows of the same index added up."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    starts = np.flatnonzero(np.concatenate(([True], indices[1:] != indices[:-1])))
    if len(starts) == len(indices):
        return Gradient(values, indices)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.add.reduceat(values.astype(dtype.sum, copy=False), starts, axis=0, dtype=dtype.sum)
    return Gradient(rows, indices[starts])
