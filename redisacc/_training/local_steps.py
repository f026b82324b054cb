"""Local steps: a worker trains alone for a while, and applies how far its weights have moved.

This is DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105), and local SGD if the outer optimizer is
``SGD(1.0)``.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from redisacc._arrays import validation
from redisacc._arrays.finite import check_finite
from redisacc._arrays.leaf_values import leaf_elements, tree_gradient
from redisacc._arrays.metrics import mean_metrics, metric_notes
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.spec import AccumulatorSpec, described_like
from redisacc._arrays.validation import Array
from redisacc._arrays.weights import checked_weight
from redisacc._clock import clock, durations
from redisacc._handles.parameters import Parameters
from redisacc._text import shown
from redisacc._training.gradients import warn_of_skip
from redisacc._training.options import SKIP, Finite
from redisacc.errors import InvalidArgumentError, NotFiniteError, RedisAccError
from redisacc.optim import SGD, Optimizer
from redisacc.optim.base import check_dtype
from redisacc.optim.kernel import sum_of_squares, update_part

logger = logging.getLogger("redisacc")

# The outer optimizer of the paper.
OUTER = SGD(0.7, momentum=0.9, nesterov=True)


def outer_gradient(before: Sequence[Array], after: Sequence[Array]) -> list[Array]:
    """Returns the gradient that local steps amount to, which an outer optimizer follows downhill: before - after.

    Args:
        before: the leaves of the weights that a worker began with.
        after: those that it has now, of the same shapes and dtypes.
    """
    return [np.subtract(old, new) for old, new in zip(before, after, strict=True)]


@dataclass(frozen=True)
class LocalSteps:
    """Each worker makes several steps alone, on its own copy of the weights, and then sends the difference (DiLoCo).

    Pass it to ``Training`` instead of an optimizer. The inner optimizer's state stays in the worker, and is lost if the
    worker is killed. Give the same numbers in every process.

    Example:
        >>> import numpy as np
        >>> import redisacc
        >>> steps = redisacc.LocalSteps(redisacc.optim.SGD(0.5), every=10)
        >>> with redisacc.Training("docs-alone", {"w": np.zeros(2)}, optimizer=steps, workers=1) as training:
        ...     for step, weights in training.steps(until=100):
        ...         result = training.apply({"w": weights["w"] - 3})
        ...     training.latest()[0]
        ...     training.delete()
        100

    Args:
        optimizer: the inner optimizer, which makes these steps: one of ``redisacc.optim``, or for
            ``redisacc.torch.Optimizer`` one of torch.
        every: how many steps a worker makes alone, 1 or more.
        outer: the outer optimizer, one of ``redisacc.optim``: it moves the weights by the mean of these differences.
            None: SGD(0.7, momentum=0.9, nesterov=True), as in the paper.
    """

    optimizer: Any
    every: int
    outer: Optimizer | None = None


class InnerModel(ABC):
    """The weights of a worker, and what makes its steps alone."""

    @property
    @abstractmethod
    def weights(self) -> Any:
        """The weights, as a tree."""

    @abstractmethod
    def set(self, weights: Any) -> None:
        """Sets the weights to those of a version, which are read-only."""

    @abstractmethod
    def check_finite(self, gradient: Any) -> None:
        """Raises NotFiniteError for a gradient that has NaN or an infinity."""

    @abstractmethod
    def update(self, gradient: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Makes a step with the inner optimizer.

        Args:
            gradient: a tree like the weights.
            step: the step of the run, for a schedule.
            metrics: those of the gradient, for a learning rate that is one of them.
        """

    @abstractmethod
    def outer_gradient(self) -> Any:
        """Returns what the steps since ``set`` amount to, as a tree like the weights."""


class LocalModel(InnerModel):
    """The weights of a worker and the state of its inner optimizer, in memory.

    The state is kept when other weights are set, and ends with the process.

    Args:
        optimizer: the inner optimizer.
        parameters: a tree of arrays with the structure, the dtypes and the shapes of the weights.

    Raises:
        InvalidArgumentError: the optimizer cannot update these leaves.
    """

    def __init__(self, optimizer: Optimizer, parameters: object) -> None:
        if optimizer.ema is not None:
            raise InvalidArgumentError(
                "the optimizer of local steps must have no ema, because its state stays in each worker: pass ema to "
                "outer"
            )
        structure, described = described_like(parameters, ())
        self._spec = AccumulatorSpec.of_tree(structure, described, reduction_type="MEAN")
        for leaf in self._spec.leaves:
            check_dtype(leaf.dtype.storage, f"the leaf {shown(leaf.path)}")
        self._groups, _ = optimizer.groups(structure.paths)
        self._optimizer = optimizer
        self._before: list[Array] = []
        self._weights: list[Array] = []
        self._state: list[list[Array]] = []
        self._updates = 0

    @property
    def weights(self) -> Any:
        """The weights, as a tree of read-only arrays that do not change later."""
        return self._spec.structure.build(self._weights)

    def set(self, weights: object) -> None:
        """Sets the weights. They are not copied, and not written to."""
        self._before = self._weights = self._spec.structure.leaves_of(weights, "the parameters")
        if not self._state:
            slots = self._optimizer.slots
            self._state = [[self._optimizer.initial(slot, each.reshape(-1)) for slot in slots] for each in self._before]

    def check_finite(self, gradient: object) -> None:
        """Raises NotFiniteError for a gradient that has NaN or an infinity."""
        check_finite(tree_gradient(self._spec, gradient, "gradient"), self._spec, "float32")

    def update(self, gradient: object, step: int, metrics: Mapping[str, float]) -> None:
        """Makes a step with the inner optimizer.

        Args:
            gradient: a tree like the weights.
            step: the step of the run, for a schedule.
            metrics: those of the gradient, for a learning rate that is one of them.

        Raises:
            InvalidArgumentError: the gradient is invalid, or the schedule has returned no learning rate.
        """
        optimizer = self._optimizer
        leaves = self._spec.structure.leaves_of(gradient, "gradient")
        elements = [leaf_elements(*each, "gradient") for each in zip(self._spec.leaves, leaves, strict=True)]
        every = optimizer.scalars(step, self._updates + 1, metrics)
        clip = 1.0
        if optimizer.clip_norm is not None:
            clip = optimizer.clip_scale(math.fsum(sum_of_squares(each) for each in elements))
        moved = []
        for old, change, state, group in zip(self._weights, elements, self._state, self._groups, strict=True):
            # In new memory: whoever holds the old weights, perhaps a library that shares their memory, may keep them.
            new = np.empty(old.shape, old.dtype)
            update_part(
                optimizer,
                old.reshape(-1),
                change,
                state,
                scalars=every[group],
                clip=clip,
                out_weights=new.reshape(-1),
                out_state=state,
            )
            new.flags.writeable = False
            moved.append(new)
        self._weights = moved
        self._updates += 1

    def outer_gradient(self) -> Any:
        """Returns what the steps since ``set`` amount to, as a tree like the weights."""
        return self._spec.structure.build(outer_gradient(self._before, self._weights))


class LocalLoop:
    """The loop of a worker that makes ``every`` steps alone with each version of the weights.

    Args:
        model: the weights, and what makes the steps alone.
        every: how many steps a worker makes alone.
        finite: what is done with gradients that hold NaN or infinities.

    Raises:
        InvalidArgumentError: ``every`` is invalid.
    """

    def __init__(self, model: InnerModel, every: int, *, finite: Finite) -> None:
        self.every = validation.integer(every, "every", low=1)
        self._model = model
        self._finite = finite
        self._send: Callable[..., ApplyResult] | None = None
        self._version = self._done = 0
        self._has_applied = False
        # Whether a step of this version was made without a gradient, and how many because of NaN.
        self._has_skipped, self._skipped = False, 0
        self._name = ""
        self._weights: list[float] = []
        self._notes: list[bytes] = []
        self._next_look = 0.0

    def versions(self, until: int | None) -> int | None:
        """Returns the version whose weights are those of a step.

        Raises:
            InvalidArgumentError: there is no version of this step.
        """
        if until is None or until % self.every == 0:
            return until if until is None else until // self.every
        raise InvalidArgumentError(
            f"until must be a multiple of every, {self.every}, because weights are published after as many "
            f"steps, unlike {until}"
        )

    def steps(
        self, versions: Iterator[tuple[int, Any]], send: Callable[..., ApplyResult], published: Parameters
    ) -> Iterator[tuple[int, Any]]:
        """Yields each step, and the weights of this worker for it.

        Args:
            versions: yields the versions of the weights, as ``Worker.steps`` does.
            send: applies a gradient of the version that was yielded last, as ``Worker.apply`` does.
            published: the run's parameters.
        """
        self._send, self._name = send, published.shared_name
        for version, weights in versions:
            self._model.set(weights)
            self._version, self._done, self._weights, self._notes = version, 0, [], []
            self._has_skipped = False
            while self._done < self.every and not self._is_over(published):
                self._has_applied = False
                yield version * self.every + self._done, self._model.weights
                is_last = self._done == self.every - 1
                if is_last and not self._has_applied and (self._weights or self._has_skipped):
                    self._send_outer_gradient(send)
                self._done += 1

    def _is_over(self, published: Parameters) -> bool:
        """Looks, once a second, whether the version has been replaced without this worker, or is the last one."""
        now = clock.now()
        if now < self._next_look:
            return False
        self._next_look = now + durations.look_every
        try:
            step = published.step()
            return (step is not None and step > self._version) or published.finished()
        except RedisAccError as error:
            # The server is away, or has lost the training. If it is to be restored, it needs this worker's gradient.
            logger.debug("%s: %s", published.shared_name, error)
            return False

    def apply(self, gradient: Any, weight: float, metrics: Mapping[str, SupportsFloat] | None) -> ApplyResult:
        """Makes a step with the inner optimizer; after the last one of a version, applies the outer gradient."""
        if self._send is None:
            raise InvalidArgumentError("apply() needs the step of a loop over steps()")
        if self._has_applied:
            return ApplyResult("repeated", self._version, 0)
        weight, step = checked_weight(weight, or_zero=True), self._version * self.every + self._done
        if weight and self._finite:
            try:
                self._model.check_finite(gradient)
            except NotFiniteError as error:
                self._has_skipped = True
                if self._finite != SKIP:
                    raise
                self._skipped += 1
                warn_of_skip(self._name, step, self._skipped, error)
                weight = 0.0
        if weight:
            notes = metric_notes(metrics, weight).encode().split()
            self._model.update(gradient, step, mean_metrics(notes))
            self._weights.append(weight)
            self._notes += notes
        self._has_applied, self._has_skipped = True, self._has_skipped or not weight
        if self._done < self.every - 1:
            return ApplyResult("applied" if weight else "skipped", self._version, 0)
        return self._send_outer_gradient(self._send)

    def _send_outer_gradient(self, send: Callable[..., ApplyResult]) -> ApplyResult:
        if not self._weights:
            return send(None, weight=0)
        return send(
            self._model.outer_gradient(),
            weight=math.fsum(self._weights) / len(self._weights),
            metrics=mean_metrics(self._notes) or None,
        )
