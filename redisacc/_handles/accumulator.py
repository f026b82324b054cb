"""What dense, sparse and tree accumulators have beyond their public base class: gradients are applied and taken."""

from __future__ import annotations

import functools
import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from redisacc._arrays import validation
from redisacc._arrays.dtypes import find_dtype
from redisacc._arrays.finite import check_finite
from redisacc._arrays.gradient import Gradient
from redisacc._arrays.metrics import metric_notes
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.validation import Shape
from redisacc._arrays.weights import checked_weight
from redisacc._format.quorum import Quorum
from redisacc._handles.base import ConditionalAccumulatorBase, host_and_process
from redisacc._handles.options import AccumulatorOptions, checked_mean
from redisacc._protocol.rounds.take_wait import demand_of
from redisacc._telemetry.operation import NOT_OBSERVED
from redisacc.errors import InvalidArgumentError, RedisAccError

logger = logging.getLogger("redisacc")

# The gradient of a round: an array, IndexedSlices, or a tree of both.
G = TypeVar("G")
# The form in which take_grad returns it.
Taken = TypeVar("Taken")
Value = TypeVar("Value")


class Accumulator(ConditionalAccumulatorBase[G], Generic[G, Taken]):
    """An accumulator of one kind. ``ConditionalAccumulatorBase`` describes the arguments."""

    def __init_subclass__(cls) -> None:
        """Gives a class that says what it returns a ``take_grad`` of its own, so that help() shows name and type."""
        super().__init_subclass__()
        if "_taken" in vars(cls):
            cls.take_grad = _returning(cls._taken.__annotations__["return"], cls)  # type: ignore[method-assign]

    @abstractmethod
    def _taken(self, gradient: G) -> Taken:
        """Returns the gradient of a round in the form in which ``take_grad`` returns it."""

    def take_grad(
        self,
        num_required: int | None = None,
        name: str | None = None,
        *,
        min_weight: float | None = None,
        most: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> Taken:
        """Takes the reduced gradient of the current round once it holds at least ``num_required`` gradients.

        Blocks until then. Takers are served strictly in order of arrival: the first in the queue blocks those behind
        it, even if they require less. On success, the global step grows by 1 and the next round begins empty.

        If Ctrl-C, or another signal handler that raises, ends the call when the round is already in memory, the handle
        keeps the round. Its next ``take_grad`` returns that round at once, whatever number it requires. A round that
        was granted but not yet read stays in ``info().unacknowledged``.

        Args:
            num_required: integer scalar, at least 1. The result includes every gradient of the round, which may be
                more. None means the accumulator's quorum (``set_quorum``), also for ``most`` and ``grace``, and even if
                it changes while the take waits. Without a quorum, it is 1, provided that ``min_weight`` is given.
            name: labels log records.
            min_weight: also waits until the weights of the gradients add up to this (less one part in 10^9, for
                rounding). None means any sum.
            most: with ``grace``, the round is granted as soon as it holds this many gradients; at least
                ``num_required``. None means all that arrive before the grace ends.
            grace: seconds to wait for more gradients once there are enough, from 0 to a week. The server measures them
                and remembers when they began, so a take that is repeated does not restart the grace. None: the round is
                granted at once.
            timeout: seconds to wait at most, 0 or more. None means forever.

        Returns:
            The sum of the gradients or, for "MEAN", the sum divided by their number (integers truncate toward zero), in
            the accumulator's dtype:

            - from a ``ConditionalAccumulator``, an array;
            - from a ``SparseConditionalAccumulator``, ``(indices, values, shape)``: the indices as an int64 vector
              ``[n]``, sorted and unique; their rows ``[n, *row]``, where "MEAN" divides a row by the number of
              gradients that held it, unless ``mean.rows`` is "round"; and an int64 vector of the declared dimension 0
              (-1 if there is none) followed by the dimensions of a row;
            - from a ``TreeAccumulator``, a tree of the structure of ``spec``: an array for each dense leaf, and
              ``IndexedSlices`` with sorted unique indices for each sparse one. The arrays may be written to; leaves of
              one dtype share memory, so keeping a small leaf keeps the memory of all of them.

        Raises:
            InvalidArgumentError: ``num_required``, ``min_weight``, ``most``, ``grace`` or ``timeout`` is invalid. Or
                ``num_required`` is None, and ``most`` or ``grace`` is not. Or neither it nor ``min_weight`` is given,
                and the accumulator has no quorum (any longer).
            TakeTimeoutError: too few gradients arrived in time. The message says how many did, and from which workers.
                Nothing was taken.
            CancelledError: the handle was closed.
            NotFoundError: the accumulator was deleted.
            ConflictError: another process has recovered the round before it was acknowledged, and owns it now.
                The error names it.
            RedisAccError: the step is 2**63 - 1. Nothing was taken.
            OutcomeUnknownError: the round has been read, but the server stopped answering before it was acknowledged.
                The error's ``settle()`` acknowledges it and returns the gradient.
            ServerUnavailableError: the server stopped answering before the round was read. If the round was granted,
                ``info().unacknowledged`` lists it, and ``recover()`` returns it.
            DataLossError, NotReplicatedError: the round was taken but not acknowledged. ``recover()`` returns it.
            CorruptDataError: the data in Redis is inconsistent, because keys were evicted or changed. The rest of
                the round stays, listed in ``info().unacknowledged``.
        """
        demand = demand_of(num_required, most, grace, min_weight)
        return self._take_gradient(demand, timeout, name, self._taken)

    def _take_gradient(
        self, demand: Quorum, timeout: float | None, name: str | None, form: Callable[[G], Value]
    ) -> Value:
        """Takes and acknowledges a round. ``form`` turns its gradient into what the caller returns.

        A signal handler may raise, or a task be cancelled, after the server has removed the round and before the caller
        has it. The handle then keeps the round, and the next call returns it.
        """
        taker, taken = self._taker, None
        if taker.kept:
            self._lifetime.check()
        try:
            if taker.kept:
                # CPython lets signal handlers and other threads run when a function begins, after a call into C, and
                # when a loop is repeated: not in this line, and not between the last call below and the caller.
                taken, *taker.kept = taker.kept
                value = form(taken.round.gradient)
                if taker.finish(taken, value):
                    return value
                taken = None
                return self._take_gradient(demand, timeout, name, form)
            taken = self._take(demand, timeout, name)
            value = form(taken.round.gradient)
            taker.acknowledge(taken, value)
            return value
        except RedisAccError:
            raise
        except BaseException:
            if taken is not None:
                taker.kept = [*taker.kept, taken]
                logger.warning(
                    "%s: a take was interrupted when it had the round of step %d, with %d gradients. The next "
                    "take_grad() or recover() of this handle returns it",
                    self._own_label,
                    taken.round.global_step,
                    taken.round.num_accumulated,
                    extra={
                        "accumulator": self._keys.name,
                        "global_step": taken.round.global_step,
                        "num_accumulated": taken.round.num_accumulated,
                        "token": taken.token,
                    },
                )
            raise

    def _apply(
        self,
        gradient: Gradient,
        round_shape: tuple[int, ...],
        *,
        local_step: object,
        name: object,
        weight: object,
        metrics: object = None,
    ) -> ApplyResult:
        """Applies a gradient. Apart from the shape that binds the round, the other arguments are the caller's."""
        label = self._own_label if name is None else self._label(name)
        step = validation.integer(local_step, "local_step")
        # Most gradients have the default weight.
        checked = 1.0 if type(weight) is float and weight == 1 else self._checked_weight(weight)
        self._lifetime.check()
        if self._options["finite"]:
            check_finite(gradient, self._spec, self._applier.encoding)
        worker = self._options["worker"] or host_and_process(os.getpid())
        apply = functools.partial(
            self._applier.apply,
            gradient,
            local_step=step,
            round_shape=round_shape,
            weight=checked,
            worker=worker,
            label=label,
        )
        operation = self._observe("apply", worker)
        if operation is NOT_OBSERVED:
            return apply(notes="" if metrics is None else metric_notes(metrics, checked))
        with operation:
            notes = [note for note in (operation.trace, metric_notes(metrics, checked)) if note]
            result = apply(notes=" ".join(notes))
            operation.note_gradient(gradient.nbytes, step, result.outcome, result.global_step)
        return result

    def _as_encoded(self, gradient: Gradient, round_shape: tuple[int, ...], weight: object) -> G:
        """Returns what a round gets of a gradient, in the form of the result of a take."""
        round_sum = self._spec.empty_sum(round_shape, where=self._keys.record)
        round_sum.add(self._applier.as_encoded(gradient, self._checked_weight(weight)))
        sent: G = self._spec.result(round_sum, 1)
        return sent

    def _checked_weight(self, weight: object) -> float:
        checked = checked_weight(weight)
        if checked != 1 and not self._spec.can_weigh:
            names = ", ".join(sorted({dtype.name for dtype in self._spec.dtypes if dtype.is_integer}))
            raise InvalidArgumentError(
                f"weight must be 1 for gradients of {names}, not {checked:g}: a sum of integers has no fractions"
            )
        return checked


class ArrayAccumulator(Accumulator[G, Taken]):
    """A handle on a dense or a sparse accumulator: its gradients are trees of one leaf."""

    def __init__(
        self,
        kind: Literal["dense", "sparse"],
        array: tuple[object, object],
        shared_name: str | None,
        name: str,
        reduction_type: object,
        *,
        options: AccumulatorOptions,
    ) -> None:
        dtype, shape = find_dtype(array[0]), validation.shape(array[1])
        mean = checked_mean(kind, reduction_type, options.get("mean"))
        super().__init__(AccumulatorSpec.of_array(kind, dtype, shape, **mean), shared_name, name, options)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements. For TensorFlow's quantized types, TensorFlow's structured dtype."""
        return self._spec.leaves[0].dtype.public

    @property
    def shape(self) -> Shape:
        """The declared shape: None if the rank is unknown, with None for each unknown dimension."""
        return self._spec.leaves[0].shape


def _returning(annotation: object, cls: type) -> Any:
    """Returns ``Accumulator.take_grad`` as a method of a class, with the annotation of what it returns there."""
    inherited = Accumulator.take_grad
    method = FunctionType(inherited.__code__, inherited.__globals__, inherited.__name__, inherited.__defaults__)
    functools.update_wrapper(method, inherited)
    del method.__wrapped__  # type: ignore[attr-defined]
    method.__kwdefaults__ = inherited.__kwdefaults__
    method.__qualname__ = f"{cls.__qualname__}.{inherited.__name__}"
    method.__annotations__ = {**inherited.__annotations__, "return": annotation}
    return method
