"""The dense accumulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat, Unpack

import numpy.typing as npt

from redisacc._arrays.dtypes import DTypeLike
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.leaf_values import dense_array
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.validation import Array
from redisacc._handles.accumulator import ArrayAccumulator
from redisacc._handles.options import AccumulatorOptions, with_options


class ConditionalAccumulator(ArrayAccumulator[Array, Array]):
    """Sums dense gradients of one shape, and hands out their mean or sum once there are enough of them.

    Args:
        dtype: the element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16 or qint32; as a name, a numpy dtype, or torch's or TensorFlow's.
        shape: the shape of every gradient. None leaves it open, and None or -1 leaves one dimension open, until the
            first gradient of a round fixes it for that round.
        reduction_type: "MEAN" (or None) or "SUM". ``ConditionalAccumulatorBase`` describes the arguments that are not
            listed here.

    Raises:
        InvalidArgumentError, ServerUnavailableError: as in ``ConditionalAccumulatorBase``.

    Example:
        >>> import redisacc
        >>> weights = redisacc.ConditionalAccumulator("float32", shape=[2], shared_name="weights")
        >>> weights.apply_grad([1.0, 2.0], local_step=0).outcome
        'applied'
        >>> weights.apply_grad([3.0, 6.0], local_step=0).num_accumulated
        2
        >>> weights.take_grad(2)
        array([2., 4.], dtype=float32)
        >>> weights.global_step()
        1
        >>> weights.apply_grad([1.0, 1.0], local_step=0).outcome
        'stale'
        >>> weights.delete()
    """

    @with_options(AccumulatorOptions)
    def __init__(
        self,
        dtype: DTypeLike,
        shape: object = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str | None = "MEAN",
        **options: Unpack[AccumulatorOptions],
    ) -> None:
        super().__init__("dense", (dtype, shape), shared_name, name, reduction_type, options=options)

    def apply_grad(
        self,
        grad: npt.ArrayLike,
        local_step: int = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> ApplyResult:
        """Adds a gradient to the current round, or drops it if ``local_step < global_step - staleness``.

        Blocks for a round trip only, but keeps trying for 30 seconds if the server does not answer. The gradient is
        counted once, even if connections break and the request has to be sent again. If Ctrl-C interrupts the call,
        ``settle()`` tells you whether the gradient was counted.

        Args:
            grad: the gradient. It has the declared shape and, unless the round is empty, exactly the shape of the
                round (there is no broadcasting). Scalars and arrays without elements count like any other. Any memory
                layout and byte order is accepted, and any dense torch, JAX or TensorFlow array, which is copied only if
                it is on another device. Other dtypes are converted where numpy's "same_kind" cast allows; a number
                beyond a narrower floating-point type becomes infinite. Missing values are refused.
            local_step: integer scalar in [-2**63, 2**63 - 1]: the step that the gradient was computed for. Later steps
                than the accumulator's are accepted, and earlier ones by up to its ``staleness``, which is 0 unless
                set.
            name: labels log records.
            weight: factor applied to the gradient, and its share in a mean: a number in [1.2e-38, 3.4e38]. Integer
                dtypes accept 1 only. For a late gradient, the server multiplies it by the accumulator's
                ``staleness.weight``.
            metrics: numbers that are sent with the gradient, such as its loss: a dict of at most 32 names, each of up
                to 64 ASCII letters, digits and ``_ . / -``, and of 768 bytes as text. The round has their means: see
                ``Round.metrics``.

        Returns:
            A result that is true if the gradient was accepted. Its ``outcome`` is "applied", "stale" or "repeated".

        Raises:
            InvalidArgumentError: the dtype, shape or step is invalid. Nothing was changed.
            NotFiniteError: the handle was opened with ``finite=True``, and an element is NaN or infinite.
            CancelledError: the handle was closed.
            NotFoundError: the accumulator was deleted.
            AccumulatorFullError: the buffered gradients have reached ``limits.buffer``; compacting frees too little.
            DataLossError: an earlier gradient of this handle is lost. This one was not counted.
            NotReplicatedError: the gradient was counted, but fewer than ``min_replicas`` replicas have it so far.
            ServerError: the server has reached its maxmemory. Nothing was stored.
            ServerUnavailableError: no server could be reached. Nothing was sent.
            OutcomeUnknownError: the server stopped answering, so the gradient may or may not have been counted. Do not
                apply it again: call the error's ``settle()``.
        """
        values = dense_array(self._spec.leaves[0], grad, "grad")
        return self._apply(
            Gradient((Section(values),)),
            values.shape,
            local_step=local_step,
            name=name,
            weight=weight,
            metrics=metrics,
        )

    def as_encoded(self, grad: npt.ArrayLike, *, weight: float = 1.0) -> Array:
        """Returns a gradient as a round gets it: the same array, or rounded if it is encoded. Sends nothing.

        The difference is the error of the encoding; you may add it to the worker's next gradient (error feedback).

        Example:
            >>> import numpy as np
            >>> import redisacc
            >>> with redisacc.ConditionalAccumulator("float32", [3000], encoding="bfloat16") as acc:
            ...     float(acc.as_encoded(np.full(3000, 0.1))[0])
            0.10009765625

        Args:
            grad: as for ``apply_grad``.
            weight: as for ``apply_grad``. The result is not multiplied by it, but a small gradient with a weight may be
                buffered, and is then encoded.

        Returns:
            An array of the same shape in the accumulator's dtype, in its own memory.

        Raises:
            InvalidArgumentError: the gradient is invalid.
        """
        values = dense_array(self._spec.leaves[0], grad, "grad")
        return self._as_encoded(Gradient((Section(values),)), values.shape, weight)

    def _taken(self, gradient: Array) -> Array:
        return gradient
