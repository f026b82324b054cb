"""The dense accumulator."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from redisacc import _arguments
from redisacc._accumulator import ApplyResult, ConditionalAccumulatorBase
from redisacc._arguments import Array, shape_text
from redisacc._parked import Gradient
from redisacc._totals import DenseTotal
from redisacc.errors import InvalidArgumentError


class ConditionalAccumulator(ConditionalAccumulatorBase[Array]):
    """Adds up dense gradients of one shape, and hands out their mean or sum once there are enough.

    Args:
        dtype: element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16, qint32; a name, a numpy dtype, or TensorFlow's.
        shape: shape of every gradient. None: any, fixed by the first gradient of a round; None or -1 for a dimension:
            likewise.
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

    _kind = "dense"

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: object = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
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

    def apply_grad(self, grad: npt.ArrayLike, local_step: int = 0, name: str | None = None) -> ApplyResult:
        """Adds a gradient to the current round if ``local_step >= global_step``; drops it otherwise.

        Does not block, except for the round trip; a server that doesn't answer is tried for 30 seconds. The gradient
        is counted once, however often the connection breaks and the request is sent again.

        Args:
            grad: the gradient, of the declared shape and, if the round is not empty, of the round's (no
                broadcasting). Scalars and arrays without elements count like any other. Any layout and byte order;
                other dtypes are converted where numpy's "same_kind" cast allows.
            local_step: integer scalar in [-2**63, 2**63 - 1]: the step that the gradient was computed for.
            name: labels log records.

        Returns:
            True-like when it was accepted; ``outcome`` says "applied" or "stale".

        Raises:
            InvalidArgumentError: wrong dtype, shape or step. Nothing was changed.
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
        given = _arguments.array(grad, "grad")
        self._check_shape(given)
        values = _arguments.cast(given, self._dtype, "grad", value=grad)
        return self._apply(Gradient(values), local_step=step, round_shape=values.shape, label=label)

    def take_grad(self, num_required: int, name: str | None = None, *, timeout: float | None = None) -> Array:
        """Takes the reduced gradient of the round once at least ``num_required`` gradients are in it.

        Blocks until then. Takers are served strictly in order of arrival: the first in the queue holds up those
        behind it even if they ask for less. On success the step grows by 1 and the next round begins empty.

        Args:
            num_required: integer scalar, at least 1. The result holds everything that had come, maybe more.
            name: labels log records.
            timeout: seconds to wait at most, 0 or more; None: without end.

        Returns:
            The sum of the gradients, for "MEAN" divided by their number (integers truncate toward zero), in the
            accumulator's dtype.

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
        return self._take_gradient(num_required, timeout, name, lambda gradient: gradient)

    def _check_shape(self, values: Array) -> None:
        declared = self._shape
        if declared is None:
            return
        if len(declared) != values.ndim or any(
            want is not None and want != have for want, have in zip(declared, values.shape, strict=True)
        ):
            raise InvalidArgumentError(
                f"grad must have the declared shape {shape_text(declared)}, not {shape_text(values.shape)}"
            )

    def _total(self, shape: tuple[int, ...]) -> DenseTotal:
        return DenseTotal(self._dtype, shape, chunk=self._chunk, where=self._keys.current.sums)

    def _result(self, total: Any, num_accumulated: int) -> Array:
        assert isinstance(total, DenseTotal)
        return total.result(self._reduction_type, num_accumulated)
