"""The accumulator of a run: of a tree, or a dense or sparse one if the parameters are a single array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsFloat, Unpack

import numpy as np

from redisacc._arrays import validation
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.weights import LEAST_WEIGHT
from redisacc._format.keys import DELETING, Keys, ParameterKeys
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.options import AccumulatorOptions, Mean
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._log import warn
from redisacc._text import shown
from redisacc._training.options import GradientOptions
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError, NotFiniteError


def open_gradients(
    shared_name: str, parameters: object, given: GradientOptions, **options: Unpack[AccumulatorOptions]
) -> ConditionalAccumulatorBase[Any]:
    """Opens or creates the accumulator for the gradients of parameters.

    Args:
        shared_name: its name.
        parameters: a tree of arrays, or an array.
        given: what the program wants of it.
        options: further options of the accumulator.
    """
    rest: Any = {**given, **options}
    sparse = rest.pop("sparse", None) or ()
    if isinstance(parameters, (Mapping, list, tuple)):
        if isinstance(sparse, bool):
            raise InvalidArgumentError(f"sparse must list the paths of sparse leaves of a tree, not be {sparse}")
        return TreeAccumulator.like(parameters, shared_name, sparse=sparse, **rest)
    if not isinstance(sparse, bool) and sparse:
        raise InvalidArgumentError(
            f"sparse must be True or False for parameters that are a single array, not {sparse!r}"
        )
    array = validation.array(parameters, "parameters")
    if sparse:
        mean = rest.pop("mean", None) or Mean()
        rest["mean"] = replace(mean, rows=mean.rows or "round")
        return SparseConditionalAccumulator(array.dtype, array.shape, shared_name, **rest)
    return ConditionalAccumulator(array.dtype, array.shape, shared_name, **rest)


def has_no_gradients(transport: Transport, shared_name: str, *, alone: bool = False) -> bool:
    """Returns whether there is no accumulator of this name, or only one that is being deleted.

    Args:
        transport: the way to the server.
        shared_name: the name.
        alone: whether there have to be parameters of this name, at the same moment.
    """
    (found,), (version,) = transport.pipeline(
        [
            ("HMGET", Keys(shared_name).record, "incarnation"),
            ("HMGET", ParameterKeys(shared_name).record, "version"),
        ]
    )
    return (found is None or found.startswith(DELETING.encode())) and not (alone and version is None)


def no_gradient(accumulator: ConditionalAccumulatorBase[Any]) -> tuple[Any, float]:
    """Returns a gradient, and its weight, that leave the mean of the others as it is.

    Raises:
        InvalidArgumentError: the leaves are integers, and each gradient counts for their mean.
    """
    spec = accumulator._spec
    leaf = spec.leaves[0]
    nothing: Any = spec.structure.build([None] * len(spec.leaves))
    if spec.kind == "dense":
        nothing = np.zeros(leaf.known_shape, leaf.dtype.storage)
    elif spec.kind == "sparse":
        nothing = np.empty(0, np.int64), np.empty((0, *leaf.known_shape), leaf.dtype.storage)
    if spec.can_weigh:
        return nothing, LEAST_WEIGHT
    if spec.reduction_type == "MEAN" and spec.missing == "zero":
        raise InvalidArgumentError(
            "a step cannot be skipped with a mean of integers, because each gradient has the weight 1 in it: use "
            'reduction_type="SUM", or mean=redisacc.Mean(missing="skip")'
        )
    return nothing, 1.0


def warn_of_skip(name: str, step: int, number: int, error: NotFiniteError) -> None:
    """Logs that a gradient was skipped. In a row of many, each is twice as far from the first as the one before.

    Args:
        name: the run.
        step: the step.
        number: how many gradients this worker has skipped for this reason.
        error: what is wrong with the gradient.
    """
    if number & (number - 1) == 0:
        warn(
            name,
            "step %d continues without this worker's gradient, because of NaN or an infinity in it%s; %d of its "
            "gradients so far %s left out",
            step,
            f", at {shown(error.path)}" if error.path else "",
            number,
            "was" if number == 1 else "were",
        )


def gradient_as_encoded(accumulator: ConditionalAccumulatorBase[Any], gradient: Any, weight: float) -> Any:
    """Returns a gradient as a round gets it. A single sparse one is IndexedSlices, or a tuple as for an apply."""
    if isinstance(accumulator, SparseConditionalAccumulator):
        indices, values = gradient if type(gradient) is tuple else (gradient.indices, gradient.values)
        return accumulator.as_encoded(indices, values, weight=weight)
    assert isinstance(accumulator, (ConditionalAccumulator, TreeAccumulator))
    return accumulator.as_encoded(gradient, weight=weight)


def apply_gradient(
    accumulator: ConditionalAccumulatorBase[Any],
    gradient: Any,
    weight: float,
    step: int,
    metrics: Mapping[str, SupportsFloat] | None,
) -> ApplyResult:
    """Applies a gradient. A single sparse one is IndexedSlices, or a tuple of indices and values."""
    if isinstance(accumulator, SparseConditionalAccumulator):
        if type(gradient) is tuple:
            indices, values = gradient
            return accumulator.apply_grad(indices, values, local_step=step, weight=weight, metrics=metrics)
        return accumulator.apply_indexed_slices_grad(gradient, step, weight=weight, metrics=metrics)
    assert isinstance(accumulator, (ConditionalAccumulator, TreeAccumulator))
    return accumulator.apply_grad(gradient, step, weight=weight, metrics=metrics)
