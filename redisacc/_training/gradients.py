"""The accumulator of a training: of a tree, or a dense or sparse one if the parameters are a single array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsFloat, Unpack

from redisacc._arrays import validation
from redisacc._arrays.results import ApplyResult
from redisacc._format.keys import DELETING, Keys
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.options import AccumulatorOptions, Mean
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._training.options import GradientOptions
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError


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


def has_no_gradients(transport: Transport, shared_name: str) -> bool:
    """Returns whether there is no accumulator of this name, or only one that is being deleted."""
    found = transport.call("HGET", Keys(shared_name).record, "incarnation")
    return found is None or found.startswith(DELETING.encode())


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
