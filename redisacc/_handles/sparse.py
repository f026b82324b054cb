"""The sparse accumulator."""

from __future__ import annotations

from typing import Any, Literal

import numpy.typing as npt

from redisacc._data import foreign, validation
from redisacc._data.dtypes import DTypeLike
from redisacc._data.encodings import Wire
from redisacc._data.gradient import Gradient, Section
from redisacc._data.results import ApplyResult
from redisacc._data.slices import IndexedSlices
from redisacc._data.sparse_rows import check_whole, sparse_section
from redisacc._data.spec import Normalize
from redisacc._data.validation import Array
from redisacc._data.weights import StalenessWeight
from redisacc._handles.array import ArrayAccumulatorBase
from redisacc._protocol.requirement import Demand
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


class SparseConditionalAccumulator(ArrayAccumulatorBase[IndexedSlices]):
    """Sums sparse gradients (rows and their indices), and hands out their mean or sum once there are enough of them.

    "MEAN" divides the sum of each row by the number of gradients *that held its index*, unless ``sparse_mean`` is
    "round".

    Args:
        dtype: the element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16 or qint32; as a name, a numpy dtype, or torch's or TensorFlow's.
        shape: the shape of the whole array, of which gradients hold rows. None leaves it open, and None or -1 leaves
            one dimension open. Dimension 0 bounds the indices; the other dimensions are those of a row, and rows may
            have more dimensions than declared. () means one value for each index.
        reduction_type: "MEAN" (or None) or "SUM". ``ConditionalAccumulatorBase`` describes the arguments that are not
            listed here.
        sparse_mean: what "MEAN" divides the sum of a row by: "index" for the number of gradients that held its index,
            as TensorFlow does; "round" for the number of all gradients of the round, as if the others had held zeros,
            which is the mean that data-parallel training needs. Without effect on "SUM".

    Raises:
        InvalidArgumentError, SchemaMismatchError, ServerUnavailableError: as in ``ConditionalAccumulatorBase``.

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

    _kind = "sparse"

    def __init__(
        self,
        dtype: DTypeLike,
        shape: object = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        sparse_mean: Literal["index", "round"] = "index",
        redis: object = None,
        worker: str | None = None,
        wire: Wire | None = None,
        finite: bool = False,
        in_place_limit: int | None = None,
        buffer_limit: int | None = None,
        once_per_worker: bool | None = None,
        max_staleness: int | None = None,
        staleness_weight: StalenessWeight | None = None,
        normalize: Normalize | None = None,
        partitions: int | Literal["auto"] | None = None,
        create: bool = True,
        min_replicas: int = 0,
    ) -> None:
        super().__init__(
            dtype,
            shape,
            shared_name,
            name,
            reduction_type=reduction_type,
            sparse_mean=sparse_mean,
            redis=redis,
            worker=worker,
            wire=wire,
            finite=finite,
            in_place_limit=in_place_limit,
            buffer_limit=buffer_limit,
            once_per_worker=once_per_worker,
            max_staleness=max_staleness,
            staleness_weight=staleness_weight,
            normalize=normalize,
            partitions=partitions,
            create=create,
            min_replicas=min_replicas,
        )

    def apply_grad(
        self,
        grad_indices: npt.ArrayLike,
        grad_values: npt.ArrayLike,
        grad_shape: npt.ArrayLike | None = None,
        local_step: int = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
        once_per_worker: bool = False,
        wire: Wire | None = None,
    ) -> ApplyResult:
        """Adds a gradient to the current round, or drops it if ``local_step < global_step - max_staleness``.

        Blocks for a round trip only, but keeps trying for 30 seconds if the server does not answer. The gradient is
        counted once, even if connections break and the request has to be sent again. If Ctrl-C interrupts the call,
        ``settle()`` tells whether the gradient was counted.

        Args:
            grad_indices: integer vector ``[n]``, in any order and with repetitions: repeated rows are added up first,
                so each index counts once for the gradient. No index may be negative, and all must be below dimension 0
                if that was declared. A gradient with n = 0 counts as a gradient and dilutes nothing.
            grad_values: the rows, ``[n, *row]``; ``row`` fits the declared shape and, unless the round is empty, equals
                the round's. Like the indices, they may be a dense array of torch, JAX or TensorFlow. Other dtypes are
                converted where numpy's "same_kind" cast allows; a number beyond a narrower floating-point type becomes
                infinite. Missing values are refused.
            grad_shape: integer vector: the shape of the whole array. It is checked against the declared shape and
                needs at least as many dimensions; -1 is not a wildcard. None: nothing is checked.
            local_step: integer scalar in [-2**63, 2**63 - 1]: the step that the gradient was computed for. Later steps
                than the accumulator's are accepted, and earlier ones by up to its ``max_staleness``, which is 0 unless
                set.
            name: labels log records.
            weight: by what the gradient is multiplied, and how much it counts in a mean: a number in [1.2e-38, 3.4e38].
                Integer dtypes accept 1 only. The server multiplies it by what ``staleness_weight`` says for the
                staleness of the gradient.
            once_per_worker: True: the gradient is dropped if the round has one of this handle's worker. The server
                decides that, so it also holds for two processes of one name. If the accumulator was created with
                ``once_per_worker``, this argument changes nothing.
            wire: how the elements of this gradient travel, instead of the handle's ``wire``. None: as that says.

        Returns:
            A result that is true if the gradient was accepted. Its ``outcome`` is "applied", "stale" or "repeated".

        Raises:
            InvalidArgumentError: the dtype, an index, the shape or the step is invalid. Nothing was changed.
            NotFiniteError: the handle was opened with ``finite=True``, and an element is NaN or infinite.
            CancelledError: the handle was closed.
            AccumulatorNotFoundError: the accumulator was deleted.
            AccumulatorFullError: the buffered gradients have reached ``buffer_limit``, and compacting frees too little.
            DataLossError: an earlier gradient of this handle is lost. This one was not counted.
            NotReplicatedError: the gradient was counted, but fewer than ``min_replicas`` replicas have it so far.
            ServerOutOfMemoryError: the server has reached its maxmemory. Nothing was stored.
            ServerUnavailableError: no server could be reached. Nothing was sent.
            OutcomeUnknownError: the server stopped answering, so the gradient may or may not have been counted. Do not
                apply it again: call the error's ``retry()``.
        """
        label = self._own_label if name is None else self._label(name)
        step = validation.integer(local_step, "local_step")
        if grad_shape is not None:
            check_whole(grad_shape, self._spec.shape, "grad_shape")
        section = self._section(grad_indices, grad_values)
        return self._apply(
            Gradient((section,)),
            local_step=step,
            round_shape=section.values.shape[1:],
            weight=weight,
            once_per_worker=once_per_worker,
            wire=wire,
            label=label,
        )

    def apply_indexed_slices_grad(
        self,
        grad: Any,
        local_step: int = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
        once_per_worker: bool = False,
        wire: Wire | None = None,
    ) -> ApplyResult:
        """Adds a gradient that is given as one object.

        Otherwise does the same as ``apply_grad``.

        Args:
            grad: ``redisacc.IndexedSlices``, TensorFlow's class of that name, or any other object with the attributes
                ``indices``, ``values`` and ``dense_shape`` (which may be None). They are what ``apply_grad`` calls
                ``grad_indices``, ``grad_values`` and ``grad_shape``. Or a sparse array of torch, JAX (BCOO, BCSR),
                TensorFlow (SparseTensor) or scipy: if it has one sparse dimension, its entries are the rows, and
                otherwise each row that has an entry is made dense.
            local_step: integer scalar in [-2**63, 2**63 - 1]: the step that the gradient was computed for. Later steps
                than the accumulator's are accepted, and earlier ones by up to its ``max_staleness``, which is 0 unless
                set.
            name: labels log records.
            weight: by what the gradient is multiplied, and how much it counts in a mean: a number in [1.2e-38, 3.4e38].
                Integer dtypes accept 1 only. The server multiplies it by what ``staleness_weight`` says for the
                staleness of the gradient.
            once_per_worker: True: the gradient is dropped if the round has one of this handle's worker. The server
                decides that, so it also holds for two processes of one name. If the accumulator was created with
                ``once_per_worker``, this argument changes nothing.
            wire: how the elements of this gradient travel, instead of the handle's ``wire``. None: as that says.

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
        rows = foreign.rows_of(grad, "grad")
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
            once_per_worker=once_per_worker,
            wire=wire,
        )

    def as_sent(
        self, grad_indices: npt.ArrayLike, grad_values: npt.ArrayLike, *, wire: Wire | None = None, weight: float = 1.0
    ) -> IndexedSlices:
        """Returns what a round gets of a gradient: its rows, rounded if they travel encoded. Sends nothing.

        The difference is what an encoding loses; a worker may add it to its next gradient (error feedback).

        Args:
            grad_indices: as for ``apply_grad``.
            grad_values: as for ``apply_grad``.
            wire: as for ``apply_grad``.
            weight: as for ``apply_grad``. The result is not multiplied by it, but a small gradient that has one may
                be buffered, and then travels encoded.

        Returns:
            The rows, sorted by index, each index once, in memory of their own.

        Raises:
            InvalidArgumentError: the gradient or ``wire`` is invalid.
        """
        section = self._section(grad_indices, grad_values)
        return self._as_sent(Gradient((section,)), section.values.shape[1:], wire, weight)

    def _section(self, grad_indices: npt.ArrayLike, grad_values: npt.ArrayLike) -> Section:
        """Returns a gradient as rows with strictly increasing indices."""
        names = ("grad_indices", "grad_values")
        return sparse_section(grad_indices, grad_values, self._spec.dtype, self._spec.shape, names)

    def take_grad(
        self,
        num_required: int | None = None,
        name: str | None = None,
        *,
        min_weight: float | None = None,
        up_to: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> tuple[Array, Array, Array]:
        """Takes the reduced gradient of the current round once it holds at least ``num_required`` gradients.

        Blocks until then. Takers are served strictly in order of arrival: the first in the queue holds up those
        behind it even if they require less. On success, the global step grows by 1 and the next round begins empty.

        If Ctrl-C, or another signal handler that raises, ends the call when the round is in memory already, the handle
        keeps the round. Its next ``take_grad`` returns that round at once, whatever it requires. A round that was
        granted and not yet read stays in ``info().unacknowledged``.

        Args:
            num_required: integer scalar, at least 1. The result includes every gradient of the round, which may be
                more than that. None: this, ``up_to`` and ``grace`` are what the settings of the accumulator say
                (``configure``), also if they change while the take waits. If they say none, it is 1, provided that
                ``min_weight`` is given.
            name: labels log records.
            min_weight: the round is not granted either while the sum of the weights of its gradients is less than this
                (apart from a part in 10^9, for rounding). None: any sum will do.
            up_to: with ``grace``, the round is granted as soon as it holds this many gradients; at least
                ``num_required``. None: however many arrive before the grace ends.
            grace: seconds to wait for more gradients after the one with which it had enough, from 0 to a week. The
                server's clock decides, and remembers the moment: a take that starts again does not start the grace
                again. None: the round is granted at once.
            timeout: seconds to wait at most, 0 or more. None: forever.

        Returns:
            ``(indices, values, shape)``: the indices as an int64 vector ``[n]``, sorted and unique; their rows
            ``[n, *row]`` in the accumulator's dtype, each the sum or, for "MEAN", the sum divided by the number of
            gradients that held the row (integers truncate toward zero); and an int64 vector of the declared
            dimension 0 (-1 if there is none) followed by the dimensions of a row.

        Raises:
            InvalidArgumentError: ``num_required``, ``min_weight``, ``up_to``, ``grace`` or ``timeout`` is invalid. Or
                ``num_required`` is None, and ``up_to`` or ``grace`` is not. Or neither it nor ``min_weight`` is given,
                and the settings do not say how many, or no longer.
            TakeTimeoutError: too few gradients arrived in time. The message says how many did, and from which workers.
                Nothing was taken.
            CancelledError: the handle was closed.
            AccumulatorNotFoundError: the accumulator was deleted.
            RoundRecoveredError: another process has recovered the round before it was acknowledged, and owns it now.
                The error names it.
            StepOverflowError: the step is 2**63 - 1. Nothing was taken.
            OutcomeUnknownError: the round has been read, but the server stopped answering before it was acknowledged.
                The error's ``retry()`` acknowledges it and returns the gradient.
            ServerUnavailableError: the server stopped answering before the round was read. If the round was granted,
                ``info().unacknowledged`` lists it and ``recover()`` hands it out.
            DataLossError, NotReplicatedError: the round was taken but not acknowledged. ``recover()`` hands it out.
            CorruptDataError: the data in Redis is inconsistent, because keys were evicted or changed. The rest of
                the round stays, listed in ``info().unacknowledged``.
        """
        return self._take_gradient(
            Demand.of(num_required, up_to, grace, min_weight),
            timeout,
            name,
            lambda slices: (slices.indices, slices.values, slices.dense_shape),
        )

    def take_indexed_slices_grad(
        self,
        num_required: int | None = None,
        name: str | None = None,
        *,
        min_weight: float | None = None,
        up_to: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> IndexedSlices:
        """Takes a round as ``take_grad`` does, and returns it as ``IndexedSlices``.

        Args:
            num_required: as for ``take_grad``.
            name: labels log records.
            min_weight: as for ``take_grad``.
            up_to: as for ``take_grad``.
            grace: as for ``take_grad``.
            timeout: seconds to wait at most, 0 or more. None: forever.

        Returns:
            The ``values``, ``indices`` and ``dense_shape`` that ``take_grad`` returns one by one.

        Raises:
            RedisAccError: any error that ``take_grad`` raises.
        """
        slices: IndexedSlices = self._take_gradient(
            Demand.of(num_required, up_to, grace, min_weight), timeout, name, lambda slices: slices
        )
        return slices
