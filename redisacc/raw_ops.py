"""TensorFlow's raw operations on accumulators: keyword-only functions on a handle.

A handle is an ``accumulator_ref``: the text ``redisacc:{NAME}``. Each operation does what the corresponding method of
the accumulator does, and raises the same errors; a handle of the wrong kind raises ``InvalidArgumentError``. Two things
differ from TensorFlow: operations are executed at once, and they accept ``redis=`` (a client, a URL or None, as
everywhere), which you may leave out for a handle that this process created.

Example:
    >>> from redisacc import raw_ops
    >>> handle = raw_ops.ConditionalAccumulator(dtype="float32", shape=[2], shared_name="weights")
    >>> handle
    'redisacc:{weights}'
    >>> raw_ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=[1.0, 2.0]).outcome
    'applied'
    >>> raw_ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32")
    array([1., 2.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy.typing as npt

from redisacc._arrays import validation
from redisacc._arrays.dtypes import DTypeLike, find_dtype
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.validation import Array
from redisacc._format.keys import Keys
from redisacc._handles.accumulator import ArrayAccumulator
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator as _Dense
from redisacc._handles.existing import open_existing
from redisacc._handles.sparse import SparseConditionalAccumulator as _Sparse
from redisacc._text import shown
from redisacc._wire import forks
from redisacc.errors import InvalidArgumentError, NotFoundError

__all__ = [
    "AccumulatorApplyGradient",
    "AccumulatorNumAccumulated",
    "AccumulatorSetGlobalStep",
    "AccumulatorTakeGradient",
    "ConditionalAccumulator",
    "SparseAccumulatorApplyGradient",
    "SparseAccumulatorTakeGradient",
    "SparseConditionalAccumulator",
]

Accumulator = TypeVar("Accumulator", bound=ConditionalAccumulatorBase[Any])
Value = TypeVar("Value")

# Accumulators by handle. One that was created here stays open as long as the process, as TensorFlow's stays open as
# long as its session; otherwise, a private one would be gone before its handle is used.
_opened: dict[tuple[str, object], ConditionalAccumulatorBase[Any]] = {}
_lock = forks.lock()


def ConditionalAccumulator(
    *,
    dtype: DTypeLike,
    shape: object,
    container: str = "",
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
    redis: object = None,
) -> str:
    """Creates or opens a dense accumulator.

    Args:
        dtype: the element type, as in ``redisacc.ConditionalAccumulator``.
        shape: the declared shape, likewise.
        container: must be "", because Redis has no containers.
        shared_name: the name under which other processes find the accumulator. "" creates a private one, which lives
            as long as this process.
        reduction_type: "MEAN" or "SUM".
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: an argument is invalid, or the shared name exists with another kind, dtype, shape or
            reduction.
        ServerUnavailableError: no server answers.
    """
    _check_container(container)
    name = name or "conditional_accumulator"
    return _remember(_Dense(dtype, shape, shared_name, name, reduction_type, redis=redis), redis)


def SparseConditionalAccumulator(
    *,
    dtype: DTypeLike,
    shape: object,
    container: str = "",
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
    redis: object = None,
) -> str:
    """Creates or opens a sparse accumulator.

    Args:
        dtype: the element type, as in ``redisacc.SparseConditionalAccumulator``.
        shape: the declared shape, likewise.
        container: must be "", because Redis has no containers.
        shared_name: the name under which other processes find the accumulator. "" creates a private one, which lives
            as long as this process.
        reduction_type: "MEAN" or "SUM".
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: an argument is invalid, or the shared name exists with another kind, dtype, shape or
            reduction.
        ServerUnavailableError: no server answers.
    """
    _check_container(container)
    name = name or "sparse_conditional_accumulator"
    return _remember(_Sparse(dtype, shape, shared_name, name, reduction_type, redis=redis), redis)


def AccumulatorApplyGradient(
    *, handle: str, local_step: int, gradient: npt.ArrayLike, name: str | None = None, redis: object = None
) -> ApplyResult:
    """Adds a gradient to a dense accumulator, or drops it if its step has passed.

    Args:
        handle: the handle of the accumulator.
        local_step: the step that the gradient was computed for.
        gradient: the gradient, as in ``redisacc.ConditionalAccumulator.apply_grad``.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.

    Returns:
        A result that is true if the gradient was accepted.
    """
    return _use(_Dense, handle, redis, lambda accumulator: accumulator.apply_grad(gradient, local_step, name))


def AccumulatorTakeGradient(
    *,
    handle: str,
    num_required: int,
    dtype: DTypeLike,
    name: str | None = None,
    redis: object = None,
    timeout: float | None = None,
) -> Array:
    """Takes the reduced gradient of a dense accumulator, and blocks until it holds ``num_required`` gradients.

    Args:
        handle: the handle of the accumulator.
        num_required: integer scalar, at least 1.
        dtype: must be the accumulator's dtype.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.
        timeout: seconds to wait at most, 0 or more. None means forever.

    Returns:
        The gradient, as ``redisacc.ConditionalAccumulator.take_grad`` returns it.
    """
    return _use(_Dense, handle, redis, lambda accumulator: _take(accumulator, num_required, dtype, name, timeout))


def SparseAccumulatorApplyGradient(
    *,
    handle: str,
    local_step: int,
    gradient_indices: npt.ArrayLike,
    gradient_values: npt.ArrayLike,
    gradient_shape: npt.ArrayLike,
    has_known_shape: bool,
    name: str | None = None,
    redis: object = None,
) -> ApplyResult:
    """Adds a gradient to a sparse accumulator, or drops it if its step has passed.

    Args:
        handle: the handle of the accumulator.
        local_step: the step that the gradient was computed for.
        gradient_indices: integer vector ``[n]``, as in ``redisacc.SparseConditionalAccumulator.apply_grad``.
        gradient_values: the rows, ``[n, *row]``.
        gradient_shape: the shape of the whole array, as an integer vector; ignored unless ``has_known_shape`` is True.
        has_known_shape: whether ``gradient_shape`` is to be checked against the declared shape.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.

    Returns:
        A result that is true if the gradient was accepted.
    """
    if validation.flag(has_known_shape, "has_known_shape") and gradient_shape is None:
        raise InvalidArgumentError("gradient_shape must be an integer vector if has_known_shape is True, not None")
    shape = gradient_shape if has_known_shape else None
    return _use(
        _Sparse,
        handle,
        redis,
        lambda accumulator: accumulator.apply_grad(gradient_indices, gradient_values, shape, local_step, name),
    )


def SparseAccumulatorTakeGradient(
    *,
    handle: str,
    num_required: int,
    dtype: DTypeLike,
    name: str | None = None,
    redis: object = None,
    timeout: float | None = None,
) -> tuple[Array, Array, Array]:
    """Takes the reduced gradient of a sparse accumulator, and blocks until it holds ``num_required`` gradients.

    Args:
        handle: the handle of the accumulator.
        num_required: integer scalar, at least 1.
        dtype: must be the accumulator's dtype.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.
        timeout: seconds to wait at most, 0 or more. None means forever.

    Returns:
        ``(indices, values, shape)``, as ``redisacc.SparseConditionalAccumulator.take_grad`` returns them.
    """
    return _use(_Sparse, handle, redis, lambda accumulator: _take(accumulator, num_required, dtype, name, timeout))


def AccumulatorNumAccumulated(*, handle: str, name: str | None = None, redis: object = None) -> int:
    """Returns the number of gradients in the current round.

    Args:
        handle: the handle of the accumulator.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.
    """
    return _use(ConditionalAccumulatorBase, handle, redis, lambda accumulator: accumulator.num_accumulated(name))


def AccumulatorSetGlobalStep(
    *, handle: str, new_global_step: int, name: str | None = None, redis: object = None
) -> None:
    """Sets the step of an accumulator. Everything accumulated stays.

    Args:
        handle: the handle of the accumulator.
        new_global_step: integer scalar in [-2**63, 2**63 - 1].
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL, or None.
    """
    _use(
        ConditionalAccumulatorBase,
        handle,
        redis,
        lambda accumulator: accumulator.set_global_step(new_global_step, name),
    )


def _check_container(container: object) -> None:
    if not (isinstance(container, str) and container == ""):
        raise InvalidArgumentError(f"container must be '', not {shown(container)}: Redis has no containers")


def _take(
    accumulator: ArrayAccumulator[Any, Value],
    num_required: object,
    dtype: object,
    name: str | None,
    timeout: float | None,
) -> Value:
    if find_dtype(dtype).public != accumulator.dtype:
        raise InvalidArgumentError(f"dtype must be the accumulator's, {accumulator.dtype}, not {shown(dtype)}")
    # To take_grad(), None means the quorum.
    return accumulator.take_grad(validation.integer(num_required, "num_required", low=1), name, timeout=timeout)


def _key(ref: str, redis: object) -> tuple[str, object]:
    return ref, redis if redis is None or isinstance(redis, str) else id(getattr(redis, "connection_pool", redis))


def _remember(accumulator: ConditionalAccumulatorBase[Any], redis: object) -> str:
    ref = accumulator.accumulator_ref
    with _lock:
        for key in {_key(ref, redis), (ref, None)}:
            _opened[key] = accumulator
    return ref


# Not a context manager: a signal handler could raise while its block ends, and a round that was taken would be lost.
def _use(kind: type[Accumulator], handle: str, redis: object, call: Callable[[Accumulator], Value]) -> Value:
    """Returns what a call returns with the accumulator of a handle, and forgets the accumulator if it is gone."""
    keys = Keys.of_ref(handle)
    with _lock:
        accumulator = _opened.get(_key(handle, redis))
    if accumulator is None:
        accumulator = open_existing(keys, redis=redis)
        _remember(accumulator, redis)
    if not isinstance(accumulator, kind):
        found = type(accumulator).__name__
        raise InvalidArgumentError(f"handle must belong to a {kind.__name__}, but {shown(handle)} is a {found}")
    try:
        return call(accumulator)
    except NotFoundError:
        # A handle is only a name: if a new accumulator is created under it, the next operation has to find the new one.
        with _lock:
            for key in [key for key, known in _opened.items() if known is accumulator]:
                del _opened[key]
        raise
