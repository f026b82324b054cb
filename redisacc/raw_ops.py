"""TensorFlow's raw operations on accumulators: keyword-only functions on a handle.

A handle is an ``accumulator_ref``: the text ``redisacc:{NAME}``. Two things differ from TensorFlow: operations take
``redis=`` (a client, a URL, or None, as everywhere), which a handle made in this process doesn't need, and they are
executed at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from redisacc import _dense, _sparse
from redisacc._accumulator import ApplyResult, ConditionalAccumulatorBase
from redisacc._arguments import Array
from redisacc._dtypes import find
from redisacc._existing import open_existing
from redisacc._keys import Keys
from redisacc._shown import shown
from redisacc.errors import AccumulatorNotFoundError, InvalidArgumentError

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

# Accumulators by handle. Those that were created here stay open as long as the process, as TensorFlow's do as long
# as their session; a private one would otherwise be gone before its handle is used.
_opened: dict[tuple[str, object], ConditionalAccumulatorBase[Any]] = {}
_lock = threading.Lock()


def ConditionalAccumulator(
    *,
    dtype: npt.DTypeLike,
    shape: object,
    container: str = "",
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
    redis: object = None,
) -> str:
    """Creates or opens a dense accumulator and returns its handle. ``container`` must be empty."""
    _check_container(container)
    accumulator = _dense.ConditionalAccumulator(
        dtype, shape, shared_name, name or "conditional_accumulator", reduction_type, redis=redis
    )
    return _remember(accumulator, redis)


def SparseConditionalAccumulator(
    *,
    dtype: npt.DTypeLike,
    shape: object,
    container: str = "",
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
    redis: object = None,
) -> str:
    """Creates or opens a sparse accumulator and returns its handle. ``container`` must be empty."""
    _check_container(container)
    accumulator = _sparse.SparseConditionalAccumulator(
        dtype, shape, shared_name, name or "sparse_conditional_accumulator", reduction_type, redis=redis
    )
    return _remember(accumulator, redis)


def AccumulatorApplyGradient(
    *, handle: str, local_step: int, gradient: npt.ArrayLike, name: str | None = None, redis: object = None
) -> ApplyResult:
    """``apply_grad`` of the dense accumulator behind ``handle``."""
    with _dense_of(handle, redis) as accumulator:
        return accumulator.apply_grad(gradient, local_step, name)


def AccumulatorTakeGradient(
    *,
    handle: str,
    num_required: int,
    dtype: npt.DTypeLike,
    name: str | None = None,
    redis: object = None,
    timeout: float | None = None,
) -> Array:
    """``take_grad`` of the dense accumulator behind ``handle``, whose dtype must be ``dtype``."""
    with _dense_of(handle, redis) as accumulator:
        _check_dtype(accumulator, dtype)
        return accumulator.take_grad(num_required, name, timeout=timeout)


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
    """``apply_grad`` of the sparse accumulator behind ``handle``.

    ``gradient_shape`` is checked only if ``has_known_shape``.
    """
    if not isinstance(has_known_shape, bool):
        raise InvalidArgumentError(f"has_known_shape must be a bool, not {shown(has_known_shape)}")
    if has_known_shape and gradient_shape is None:
        raise InvalidArgumentError("gradient_shape must be an integer vector if has_known_shape, not None")
    with _sparse_of(handle, redis) as accumulator:
        return accumulator.apply_grad(
            gradient_indices, gradient_values, gradient_shape if has_known_shape else None, local_step, name
        )


def SparseAccumulatorTakeGradient(
    *,
    handle: str,
    num_required: int,
    dtype: npt.DTypeLike,
    name: str | None = None,
    redis: object = None,
    timeout: float | None = None,
) -> tuple[Array, Array, Array]:
    """``take_grad`` of the sparse accumulator behind ``handle``, whose dtype must be ``dtype``."""
    with _sparse_of(handle, redis) as accumulator:
        _check_dtype(accumulator, dtype)
        return accumulator.take_grad(num_required, name, timeout=timeout)


def AccumulatorNumAccumulated(*, handle: str, name: str | None = None, redis: object = None) -> int:
    """``num_accumulated`` of the accumulator behind ``handle``."""
    with _accumulator_of(handle, redis) as accumulator:
        return accumulator.num_accumulated(name)


def AccumulatorSetGlobalStep(
    *, handle: str, new_global_step: int, name: str | None = None, redis: object = None
) -> None:
    """``set_global_step`` of the accumulator behind ``handle``."""
    with _accumulator_of(handle, redis) as accumulator:
        accumulator.set_global_step(new_global_step, name)


def _check_container(container: object) -> None:
    if not (isinstance(container, str) and container == ""):
        raise InvalidArgumentError(f"container must be empty, not {shown(container)}: Redis has none")


def _check_dtype(accumulator: ConditionalAccumulatorBase[Any], dtype: object) -> None:
    if find(dtype).public != accumulator.dtype:
        raise InvalidArgumentError(f"dtype must be the accumulator's, {accumulator.dtype}, not {shown(dtype)}")


def _key(ref: str, redis: object) -> tuple[str, object]:
    return ref, redis if redis is None or isinstance(redis, str) else id(getattr(redis, "connection_pool", redis))


def _remember(accumulator: ConditionalAccumulatorBase[Any], redis: object) -> str:
    ref = accumulator.accumulator_ref
    with _lock:
        for key in {_key(ref, redis), (ref, None)}:
            _opened[key] = accumulator
    return ref


@contextlib.contextmanager
def _accumulator_of(handle: str, redis: object) -> Iterator[ConditionalAccumulatorBase[Any]]:
    keys = Keys.of_ref(handle)
    with _lock:
        accumulator = _opened.get(_key(handle, redis))
    if accumulator is None:
        accumulator = open_existing(keys, redis=redis)
        _remember(accumulator, redis)
    try:
        yield accumulator
    except AccumulatorNotFoundError:
        # A handle is only a name: if the name is created anew, the next operation has to find it.
        with _lock:
            for key in [key for key, known in _opened.items() if known is accumulator]:
                del _opened[key]
        raise


@contextlib.contextmanager
def _dense_of(handle: str, redis: object) -> Iterator[_dense.ConditionalAccumulator]:
    with _accumulator_of(handle, redis) as accumulator:
        if not isinstance(accumulator, _dense.ConditionalAccumulator):
            raise InvalidArgumentError(f"handle must be a dense accumulator, and {handle!r} is sparse")
        yield accumulator


@contextlib.contextmanager
def _sparse_of(handle: str, redis: object) -> Iterator[_sparse.SparseConditionalAccumulator]:
    with _accumulator_of(handle, redis) as accumulator:
        if not isinstance(accumulator, _sparse.SparseConditionalAccumulator):
            raise InvalidArgumentError(f"handle must be a sparse accumulator, and {handle!r} is dense")
        yield accumulator


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
