"""The accumulator of trees: the gradients of a whole model, as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Self, SupportsFloat, Unpack

from redisacc._arrays.finite import check_finite
from redisacc._arrays.leaf_values import tree_gradient
from redisacc._arrays.metrics import metric_notes
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.spec import AccumulatorSpec, described_by, described_like
from redisacc._handles.accumulator import Accumulator
from redisacc._handles.options import AccumulatorOptions, checked_mean, with_options
from redisacc._protocol.applying.upload import Upload


class TreeAccumulator(Accumulator[Any, Any]):
    """Sums the gradients of a whole model, and hands out their mean or sum once there are enough of them.

    A *tree* is a nested dict, list or tuple whose leaves are arrays: for example a dict from the names of a model's
    parameters to their gradients. There is one step, one count and one decision for the whole tree, so a gradient is
    in a round with all of its leaves or not at all. Results have the same structure, and the form of ``spec``: the
    order of dicts, the classes of named tuples.
    The *path* of a leaf consists of the keys that lead to it, such as "layers/0/w"; no two leaves may have the same.

    Args:
        spec: a tree of the same structure, whose leaves are ``(dtype, shape)`` for a dense array and
            ``redisacc.Sparse(dtype, shape)`` for an array whose gradients hold rows only. Shapes are known, apart from
            dimension 0 of a sparse leaf, which may be None. ``like()`` derives all this from arrays.
        shared_name: see ``ConditionalAccumulatorBase``, which describes all arguments that are not listed here.
        name: labels log records.
        reduction_type: "MEAN" (or None) or "SUM".

    Raises:
        InvalidArgumentError, ServerUnavailableError: as in ``ConditionalAccumulatorBase``. The
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

    # The upload of a gradient that is under way.
    _upload: Upload | None = None

    @with_options(AccumulatorOptions)
    def __init__(
        self,
        spec: object,
        shared_name: str | None = None,
        name: str = "tree_accumulator",
        reduction_type: str | None = "MEAN",
        **options: Unpack[AccumulatorOptions],
    ) -> None:
        mean = checked_mean("tree", reduction_type, options.get("mean"))
        super().__init__(AccumulatorSpec.of_tree(*described_by(spec), **mean), shared_name, name, options)

    @classmethod
    @with_options(AccumulatorOptions)
    def like(
        cls,
        tree: object,
        shared_name: str | None = None,
        name: str = "tree_accumulator",
        reduction_type: str | None = "MEAN",
        sparse: Collection[str] = (),
        **options: Unpack[AccumulatorOptions],
    ) -> Self:
        """Returns an accumulator for gradients of a tree of arrays, such as the weights of a model.

        Args:
            tree: the arrays. Each leaf gets the dtype and shape that it has here; a leaf that is ``IndexedSlices``
                becomes a sparse one.
            shared_name: as for the class.
            name: as for the class.
            reduction_type: as for the class.
            sparse: the paths of further leaves whose gradients hold rows only.
            options: as for the class.

        Raises:
            InvalidArgumentError: a leaf is not an array, or ``sparse`` names a path that the tree does not have.

        Example:
            >>> import numpy as np
            >>> import redisacc
            >>> weights = {"embedding": np.zeros((1000, 2), np.float32), "bias": np.zeros(2, np.float32)}
            >>> redisacc.TreeAccumulator.like(weights, sparse=["embedding"]).spec
            {'embedding': Sparse(dtype='float32', shape=(1000, 2)), 'bias': ('float32', (2,))}
        """
        spec = AccumulatorSpec.of_tree(*described_like(tree, sparse), reduction_type="MEAN").tree
        return cls(spec, shared_name, name, reduction_type, **options)

    @property
    def spec(self) -> Any:
        """The tree with ``(dtype, shape)`` or ``Sparse(dtype, shape)`` as its leaves, as the class takes it."""
        return self._spec.tree

    def apply_grad(
        self,
        grad: object,
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
            grad: a tree of the structure of ``spec``. A dense leaf is an array of exactly its shape; other dtypes are
                converted where numpy's "same_kind" cast allows. A sparse leaf is ``IndexedSlices``, or a tuple of
                indices and values, with the rules of ``SparseConditionalAccumulator.apply_grad``. None instead of a
                leaf means that the gradient lacks it (see ``Mean``).
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
            InvalidArgumentError: the structure, a dtype, a shape, an index or the step is invalid. The message names
                the first path that is. Nothing was changed.
            NotFiniteError: the handle was opened with ``finite=True``, and an element is NaN or infinite.
            CancelledError: the handle was closed.
            NotFoundError: the accumulator was deleted.
            AccumulatorFullError: the buffered gradients have reached ``limits.buffer``; compacting frees too little.
            DataLossError: an earlier gradient of this handle is lost. This one was not counted.
            NotReplicatedError: the gradient was counted, but fewer than ``min_replicas`` replicas have it so far.
            ServerError: the server has reached its maxmemory. Nothing was stored.
            ServerUnavailableError: no server could be reached. Nothing was sent.
            OutcomeUnknownError: the server stopped answering, so the gradient may or may not have been counted. Do not
                apply it again: call the error's ``settle()``. It sends large arrays without a copy, so do not write to
                them before that.
        """
        return self._apply(
            tree_gradient(self._spec, grad, "grad"),
            (),
            local_step=local_step,
            name=name,
            weight=weight,
            metrics=metrics,
        )

    def as_encoded(self, grad: object, *, weight: float = 1.0) -> Any:
        """Returns a gradient as a round gets it: the same tree, or rounded if it is encoded. Sends nothing.

        The difference is the error of the encoding; you may add it to the worker's next gradient (error feedback).

        Args:
            grad: as for ``apply_grad``.
            weight: as for ``apply_grad``. The result is not multiplied by it, but a small gradient with a weight may be
                buffered, and is then encoded.

        Returns:
            A tree like the result of ``take_grad``, in its own memory.

        Raises:
            InvalidArgumentError: the gradient is invalid.
        """
        return self._as_encoded(tree_gradient(self._spec, grad, "grad"), (), weight)

    def _begin(self, local_step: int) -> Upload | None:
        """Begins the upload of a gradient for a step, whose leaves follow one by one, in the background.

        Returns None if such gradients are only sent whole: they are small, or some leaves are sparse.
        """
        self._abandon()
        self._lifetime.check()
        self._upload = self._applier.begin(local_step=local_step, worker=self._worker)
        return self._upload

    def _commit(self, tree: Any, weight: object, metrics: Mapping[str, SupportsFloat] | None) -> ApplyResult:
        """Counts the gradient of the upload that is under way, once: a second attempt has to send the whole gradient.

        Args:
            tree: the gradient, as for ``apply_grad``.
            weight: as for ``apply_grad``.
            metrics: as for ``apply_grad``.
        """
        upload, self._upload = self._upload, None
        assert upload is not None
        whole = partial(tree_gradient, self._spec, tree, "grad")
        try:
            self._lifetime.check()
            checked = self._checked_weight(weight)
            noted = metric_notes(metrics, checked)
            if self._options["finite"]:
                check_finite(whole(), self._spec, self._applier.encoding)
        except BaseException:
            self._applier.abandon(upload)
            raise
        with self._observe("apply", upload.request.worker) as operation:
            result = self._applier.commit(
                upload,
                whole,
                weight=checked,
                notes=" ".join(filter(None, (operation.trace, noted))),
                label=self._own_label,
            )
            operation.note_gradient(upload.layout.nbytes, upload.request.local_step, result.outcome, result.global_step)
        return result

    def _abandon(self, which: Upload | None = None) -> None:
        """Ends the upload that is under way, if there is one; or only this one. Nothing of it is left."""
        upload = self._upload
        if upload is not None and which in (None, upload):
            self._upload = None
            self._applier.abandon(upload)

    def close(self) -> None:
        """Closes this handle, as ``ConditionalAccumulatorBase.close`` does."""
        self._abandon()
        super().close()

    def _taken(self, gradient: Any) -> Any:
        return gradient
