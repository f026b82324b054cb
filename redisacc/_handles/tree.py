"""The accumulator of trees: the gradients of a whole model, as one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Self

from redisacc._data import validation
from redisacc._data.encodings import Wire
from redisacc._data.results import ApplyResult
from redisacc._data.spec import Normalize
from redisacc._data.tree_gradient import tree_gradient
from redisacc._data.tree_spec import TreeSpec, described_by, described_like
from redisacc._data.weights import StalenessWeight
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._protocol.requirement import Demand


class TreeAccumulator(ConditionalAccumulatorBase[Any]):
    """Sums the gradients of a whole model, and hands out their mean or sum once there are enough of them.

    A *tree* is a nested dict, list or tuple whose leaves are arrays: for example a dict from the names of a model's
    parameters to their gradients. There is one step, one count and one decision for the whole tree, so a gradient is
    in a round with all of its leaves or not at all. Results are trees of the same structure; dicts are sorted by key.
    The *path* of a leaf consists of the keys on the way to it, such as "layers/0/w"; no two leaves may have the same.

    Args:
        spec: a tree of the same structure, whose leaves are ``(dtype, shape)`` for a dense array and
            ``redisacc.Sparse(dtype, shape)`` for an array of which gradients hold rows. Shapes are known, apart from
            dimension 0 of a sparse leaf, which may be None. ``like()`` derives all this from arrays.
        shared_name: see ``ConditionalAccumulatorBase``, which describes all arguments that are not listed here.
        name: labels log records.
        reduction_type: "MEAN" (or None) or "SUM".
        missing: what the mean of a leaf is divided by if some gradients of the round lack it: "zero" for the number of
            all gradients, as if the leaf had been zero there; "skip" for the number of gradients that have the leaf,
            and then a leaf that none of them has is None in the result. Sums are the same for both.
        sparse_mean: what the mean of a row of a sparse leaf is divided by: "round" for the same number as in a dense
            leaf, which data-parallel training needs; "index" for the number of gradients that held the index, as
            TensorFlow does.

    Raises:
        InvalidArgumentError, SchemaMismatchError, ServerUnavailableError: as in ``ConditionalAccumulatorBase``. The
            message about a schema names the first leaf that differs.

    Example:
        >>> import redisacc
        >>> spec = {"embedding": redisacc.Sparse("float32", (1000, 2)), "layers": [("float32", (2,)), ("int64", ())]}
        >>> acc = redisacc.TreeAccumulator(spec, reduction_type="SUM")
        >>> rows = redisacc.IndexedSlices(values=[[1.0, 1.0]], indices=[7])
        >>> acc.apply_grad({"embedding": rows, "layers": [[1.0, 2.0], 3]}).outcome
        'applied'
        >>> acc.apply_grad({"embedding": None, "layers": [[1.0, 2.0], 4]}).num_accumulated
        2
        >>> total = acc.take_grad(2)
        >>> total["embedding"].indices, total["layers"]
        (array([7]), [array([2., 4.], dtype=float32), array(7)])
    """

    _spec: TreeSpec

    def __init__(
        self,
        spec: object,
        shared_name: str | None = None,
        name: str = "tree_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        missing: Literal["zero", "skip"] = "zero",
        sparse_mean: Literal["index", "round"] = "round",
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
            TreeSpec.of(
                *described_by(spec),
                reduction_type=validation.reduction_type(reduction_type),
                sparse_mean=validation.sparse_mean(sparse_mean),
                missing=validation.missing(missing),
            ),
            shared_name,
            name,
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

    @classmethod
    def like(
        cls, tree: object, shared_name: str | None = None, *, sparse: Collection[str] = (), **options: Any
    ) -> Self:
        """Returns an accumulator for gradients of a tree of arrays, such as the weights of a model.

        Args:
            tree: the arrays. Each leaf gets the dtype and shape that it has here; a leaf that is ``IndexedSlices``
                becomes a sparse one.
            shared_name: as for the class.
            sparse: the paths of further leaves of which gradients hold rows.
            options: the other arguments of the class.

        Raises:
            InvalidArgumentError: a leaf is not an array, or ``sparse`` names a path that the tree does not have.

        Example:
            >>> import numpy as np
            >>> import redisacc
            >>> weights = {"embedding": np.zeros((1000, 2), np.float32), "bias": np.zeros(2, np.float32)}
            >>> redisacc.TreeAccumulator.like(weights, sparse=["embedding"]).spec
            {'bias': ('float32', (2,)), 'embedding': Sparse(dtype='float32', shape=(1000, 2))}
        """
        structure, described = described_like(tree, sparse)
        spec = TreeSpec.of(structure, described, reduction_type="MEAN").tree
        return cls(spec, shared_name, **options)

    @property
    def spec(self) -> Any:
        """The tree with ``(dtype, shape)`` or ``Sparse(dtype, shape)`` as its leaves, as the class takes it."""
        return self._spec.tree

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves, in the order in which everything lists them."""
        return self._spec.structure.paths

    @property
    def _description(self) -> str:
        return self._spec.schema["shape"]

    def apply_grad(
        self,
        grad: object,
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
            grad: a tree of the structure of ``spec``. A dense leaf is an array of exactly its shape; other dtypes are
                converted where numpy's "same_kind" cast allows. A sparse leaf is ``IndexedSlices``, or a tuple of
                indices and values, with the rules of ``SparseConditionalAccumulator.apply_grad``. None in the place of
                a leaf means that the gradient lacks it (see ``missing``).
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
            InvalidArgumentError: the structure, a dtype, a shape, an index or the step is invalid. The message names
                the first path where that is so. Nothing was changed.
            NotFiniteError: the handle was opened with ``finite=True``, and an element is NaN or infinite.
            CancelledError: the handle was closed.
            AccumulatorNotFoundError: the accumulator was deleted.
            AccumulatorFullError: the buffered gradients have reached ``buffer_limit``, and compacting frees too little.
            DataLossError: an earlier gradient of this handle is lost. This one was not counted.
            NotReplicatedError: the gradient was counted, but fewer than ``min_replicas`` replicas have it so far.
            ServerOutOfMemoryError: the server has reached its maxmemory. Nothing was stored.
            ServerUnavailableError: no server could be reached. Nothing was sent.
            OutcomeUnknownError: the server stopped answering, so the gradient may or may not have been counted. Do not
                apply it again: call the error's ``retry()``. It sends large arrays from the memory where they are, so
                do not write to them before that.
        """
        label = self._own_label if name is None else self._label(name)
        step = validation.integer(local_step, "local_step")
        return self._apply(
            tree_gradient(self._spec, grad, "grad"),
            local_step=step,
            round_shape=(),
            weight=weight,
            once_per_worker=once_per_worker,
            wire=wire,
            label=label,
        )

    def as_sent(self, grad: object, *, wire: Wire | None = None, weight: float = 1.0) -> Any:
        """Returns what a round gets of a gradient: the same tree, rounded if it travels encoded. Sends nothing.

        The difference is what an encoding loses; a worker may add it to its next gradient (error feedback).

        Args:
            grad: as for ``apply_grad``.
            wire: as for ``apply_grad``.
            weight: as for ``apply_grad``. The result is not multiplied by it, but a small gradient that has one may
                be buffered, and then travels encoded.

        Returns:
            A tree like the result of ``take_grad``, in memory of its own.

        Raises:
            InvalidArgumentError: the gradient or ``wire`` is invalid.
        """
        return self._as_sent(tree_gradient(self._spec, grad, "grad"), (), wire, weight)

    def take_grad(
        self,
        num_required: int | None = None,
        name: str | None = None,
        *,
        min_weight: float | None = None,
        up_to: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> Any:
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
            A tree of the structure of ``spec``: an array for each dense leaf, and ``IndexedSlices`` with sorted unique
            indices for each sparse one, each the sum of the gradients or their mean. The arrays may be written to;
            leaves of one dtype share memory, so that a small leaf which is kept keeps all of them.

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
        return self._take_gradient(Demand.of(num_required, up_to, grace, min_weight), timeout, name, lambda tree: tree)
