"""The sparse accumulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat, Unpack

import numpy.typing as npt

from redisacc._arrays import foreign
from redisacc._arrays.dtypes import DTypeLike
from redisacc._arrays.gradient import Gradient
from redisacc._arrays.leaf_values import ROWS_ARGUMENTS, sparse_section
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.slices import IndexedSlices
from redisacc._arrays.validation import Array
from redisacc._handles.accumulator import ArrayAccumulator
from redisacc._handles.options import AccumulatorOptions, with_options
from redisacc._protocol.rounds.take_wait import demand_of
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


class SparseConditionalAccumulator(ArrayAccumulator[IndexedSlices, tuple[Array, Array, Array]]):
    """Sums sparse gradients (rows and their indices), and hands out their mean or sum once there are enough of them.

    "MEAN" divides the sum of each row by the number of gradients *that held its index*, unless ``mean.rows`` is
    "round".

    Args:
        dtype: the element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16 or qint32; as a name, a numpy dtype, or torch's or TensorFlow's.
        shape: the shape of the whole array, whose rows gradients hold. None leaves it open, and None or -1 leaves
            one dimension open. Dimension 0 bounds the indices; the others are the shape of a row, and rows may
            have more dimensions than declared. () means one value for each index.
        reduction_type: "MEAN" (or None) or "SUM". ``ConditionalAccumulatorBase`` describes the arguments that are not
            listed here.

    Raises:
        InvalidArgumentError, ServerUnavailableError: as in ``ConditionalAccumulatorBase``.

    Example:
        >>> import redisacc
        >>> rows = redisacc.SparseConditionalAccumulator("float32", shape=[100, 2], shared_name="embedding")
        >>> rows.apply_grad([3, 7], [[1.0, 1.0], [5.0, 6.0]]).outcome
        'applied'
        >>> rows.apply_grad([3], [[3.0, 5.0]]).num_accumulated
        2
        >>> indices, values, shape = rows.take_grad(2)
        >>> indices, shape
        (array([3, 7]), array([100,   2]))
        >>> values
        array([[2., 3.],
               [5., 6.]], dtype=float32)
        >>> rows.delete()
    """

    @with_options(AccumulatorOptions)
    def __init__(
        self,
        dtype: DTypeLike,
        shape: object = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str | None = "MEAN",
        **options: Unpack[AccumulatorOptions],
    ) -> None:
        super().__init__("sparse", (dtype, shape), shared_name, name, reduction_type, options=options)

    def apply_grad(
        self,
        grad_indices: npt.ArrayLike,
        grad_values: npt.ArrayLike,
        grad_shape: npt.ArrayLike | None = None,
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
            grad_indices: integer vector ``[n]``, in any order and with repetitions: repeated rows are added up first,
                so each index counts once for the gradient. No index may be negative, and all must be below dimension 0
                if that was declared. A gradient with n = 0 counts as a gradient and dilutes nothing.
            grad_values: the rows, ``[n, *row]``; ``row`` fits the declared shape and, unless the round is empty, equals
                the round's. Like the indices, they may be a dense torch, JAX or TensorFlow array. Other dtypes are
                converted where numpy's "same_kind" cast allows; a number beyond a narrower floating-point type becomes
                infinite. Missing values are refused.
            grad_shape: integer vector: the shape of the whole array. It is checked against the declared shape and
                needs at least as many dimensions; -1 is not a wildcard. None means nothing is checked.
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
            InvalidArgumentError: the dtype, an index, the shape or the step is invalid. Nothing was changed.
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
        section = sparse_section(self._spec.leaves[0], grad_indices, grad_values, grad_shape, ROWS_ARGUMENTS)
        return self._apply(
            Gradient((section,)),
            section.shape[1:],
            local_step=local_step,
            name=name,
            weight=weight,
            metrics=metrics,
        )

    def apply_indexed_slices_grad(
        self,
        grad: Any,
        local_step: int = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> ApplyResult:
        """Adds a gradient that is given as one object.

        Otherwise does the same as ``apply_grad``.

        Args:
            grad: ``redisacc.IndexedSlices``, TensorFlow's class of that name, or any other object with the attributes
                ``indices``, ``values`` and ``dense_shape`` (which may be None). They are what ``apply_grad`` calls
                ``grad_indices``, ``grad_values`` and ``grad_shape``. Or a sparse array of torch, JAX (BCOO, BCSR),
                TensorFlow (SparseTensor) or scipy: if it has one sparse dimension, its entries are the rows, and
                otherwise each row that has an entry is made dense.
            local_step: as for ``apply_grad``.
            name: labels log records.
            weight: as for ``apply_grad``.
            metrics: as for ``apply_grad``.

        Returns:
            A result that is true if the gradient was accepted. Its ``outcome`` is "applied", "stale" or "repeated".

        Raises:
            InvalidArgumentError: ``grad`` is not sparse, or a part of it is invalid. Nothing was changed.
            RedisAccError: any other error that ``apply_grad`` raises.

        Example:
            >>> import redisacc
            >>> rows = redisacc.SparseConditionalAccumulator("float32", shape=[100, 2])
            >>> grad = redisacc.IndexedSlices(values=[[1.0, 2.0]], indices=[3])
            >>> rows.apply_indexed_slices_grad(grad, local_step=0).outcome
            'applied'
            >>> rows.take_indexed_slices_grad(1).to_dense()[3]
            array([1., 2.], dtype=float32)
        """
        rows = grad if type(grad) is IndexedSlices else foreign.rows_of(grad, "grad")
        if rows is None:
            raise InvalidArgumentError(
                "grad must be sparse: an object with .indices, .values and .dense_shape, or a sparse array of torch, "
                f"JAX, TensorFlow or scipy, not {shown(grad)}. IndexedSlices.from_dense() makes one of a dense array"
            )
        return self.apply_grad(
            rows.indices,
            rows.values,
            rows.dense_shape,
            local_step,
            name,
            weight=weight,
            metrics=metrics,
        )

    def as_encoded(
        self,
        grad_indices: npt.ArrayLike,
        grad_values: npt.ArrayLike,
        *,
        weight: float = 1.0,
    ) -> IndexedSlices:
        """Returns a gradient as a round gets it: its rows, or rounded if they are encoded. Sends nothing.

        The difference is the error of the encoding; you may add it to the worker's next gradient (error feedback).

        Args:
            grad_indices: as for ``apply_grad``.
            grad_values: as for ``apply_grad``.
            weight: as for ``apply_grad``. The result is not multiplied by it, but a small gradient with a weight may be
                buffered, and is then encoded.

        Returns:
            The rows, sorted by index, each index once, in their own memory.

        Raises:
            InvalidArgumentError: the gradient is invalid.
        """
        section = sparse_section(self._spec.leaves[0], grad_indices, grad_values, None, ROWS_ARGUMENTS)
        return self._as_encoded(Gradient((section,)), section.shape[1:], weight)

    def take_indexed_slices_grad(
        self,
        num_required: int | None = None,
        name: str | None = None,
        *,
        min_weight: float | None = None,
        most: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> IndexedSlices:
        """Takes a round as ``take_grad`` does, and returns it as ``IndexedSlices``.

        Args:
            num_required: as for ``take_grad``.
            name: labels log records.
            min_weight: as for ``take_grad``.
            most: as for ``take_grad``.
            grace: as for ``take_grad``.
            timeout: seconds to wait at most, 0 or more. None means forever.

        Returns:
            The ``values``, ``indices`` and ``dense_shape`` that ``take_grad`` returns one by one.

        Raises:
            RedisAccError: any error that ``take_grad`` raises.
        """
        demand = demand_of(num_required, most, grace, min_weight)
        return self._take_gradient(demand, timeout, name, lambda slices: slices)

    def _taken(self, gradient: IndexedSlices) -> tuple[Array, Array, Array]:
        assert gradient.dense_shape is not None
        return gradient.indices, gradient.values, gradient.dense_shape
