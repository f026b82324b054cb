"""The accumulators for asyncio."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, Generic, Self, TypeVar, Unpack

import numpy as np

from redisacc._arrays.validation import Shape
from redisacc._handles import dense, sparse, tree
from redisacc._handles.accumulator import ArrayAccumulator
from redisacc._handles.base import ConditionalAccumulatorBase as Base
from redisacc._handles.options import AccumulatorOptions, with_options
from redisacc._protocol.lifecycle.events import Event
from redisacc.asyncio._handles import Handle, Iteration, awaited, entered, opening, unchanged

Blocking = TypeVar("Blocking", bound=Base[Any])
OfArrays = TypeVar("OfArrays", bound=ArrayAccumulator[Any, Any])


class Events(Iteration[Event]):
    """The events of an accumulator, for ``async for``. ``accumulator.events()`` makes one.

    Listening begins with ``async with``, with ``await``, or when you ask for the first event. Everything else is as for
    ``redisacc.types.Events``.
    """

    def __repr__(self) -> str:
        return f"asyncio.{self._iterator!r}" if self._iterator is not None else "asyncio.Events(not open)"

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self.begun()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        if self._iterator is not None:
            await self._waits.run(self._iterator.close)


class ConditionalAccumulatorBase(Handle[Blocking], Generic[Blocking]):
    """A handle on an accumulator, for asyncio.

    ``async with`` or ``await`` opens it. It has the arguments of the blocking class, except that ``redis`` is a URL,
    also of a cluster; a ``redis.asyncio.Redis`` or ``valkey.asyncio.Valkey``, whose settings are copied; or None for
    the environment variable ``REDISACC_URL``, else ``redis://localhost:6379/0``.

    Tasks of one event loop may share a handle. If a task is canceled while it waits, it leaves the queue. If it was
    applying a gradient, call ``settle()`` in the same task to learn whether the gradient was counted.
    """

    @property
    def name(self) -> str:
        """The name of this handle, which labels log records."""
        return self.blocking.name

    @property
    def shared_name(self) -> str | None:
        """The name under which other processes find the accumulator; None for a private one."""
        return self.blocking.shared_name

    @property
    def reduction_type(self) -> str:
        """Either "MEAN" or "SUM"."""
        return self.blocking.reduction_type

    @property
    def accumulator_ref(self) -> str:
        """The key of the accumulator's record in Redis: a handle for ``raw_ops``, and a key for ``redis-cli``."""
        return self.blocking.accumulator_ref

    num_accumulated = awaited(Base.num_accumulated)
    global_step = awaited(Base.global_step)
    info = awaited(Base.info)
    wait_for_step = awaited(Base.wait_for_step)
    set_global_step = awaited(Base.set_global_step)
    quorum = awaited(Base.quorum)
    set_quorum = awaited(Base.set_quorum)
    settle = awaited(Base.settle)
    delete = awaited(Base.delete)

    def events(self, *, timeout: float | None = None) -> Events:
        """Returns the accumulator's events, for ``async for``, as ``redisacc.ConditionalAccumulatorBase.events`` does.

        Args:
            timeout: the loop ends after that many seconds without an event. None means never.
        """
        return Events(self.waits, lambda: self.blocking.events(timeout=timeout))


class _ArrayAccumulator(ConditionalAccumulatorBase[OfArrays], Generic[OfArrays]):
    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements. For TensorFlow's quantized types, TensorFlow's structured dtype."""
        return self.blocking.dtype

    @property
    def shape(self) -> Shape:
        """The declared shape: None if the rank is unknown, with None for each unknown dimension."""
        return self.blocking.shape


class ConditionalAccumulator(_ArrayAccumulator[dense.ConditionalAccumulator]):
    """``redisacc.ConditionalAccumulator`` for asyncio, with the same arguments: sums dense gradients."""

    @opening(dense.ConditionalAccumulator)
    def __init__(self) -> None: ...

    apply_grad = awaited(dense.ConditionalAccumulator.apply_grad)
    take_grad = awaited(dense.ConditionalAccumulator.take_grad)
    take = entered(dense.ConditionalAccumulator.take)
    recover = entered(dense.ConditionalAccumulator.recover)
    peek = awaited(dense.ConditionalAccumulator.peek)
    as_encoded = unchanged(dense.ConditionalAccumulator.as_encoded)


class SparseConditionalAccumulator(_ArrayAccumulator[sparse.SparseConditionalAccumulator]):
    """``redisacc.SparseConditionalAccumulator`` for asyncio, with the same arguments: sums sparse gradients."""

    @opening(sparse.SparseConditionalAccumulator)
    def __init__(self) -> None: ...

    apply_grad = awaited(sparse.SparseConditionalAccumulator.apply_grad)
    apply_indexed_slices_grad = awaited(sparse.SparseConditionalAccumulator.apply_indexed_slices_grad)
    take_grad = awaited(sparse.SparseConditionalAccumulator.take_grad)
    take_indexed_slices_grad = awaited(sparse.SparseConditionalAccumulator.take_indexed_slices_grad)
    take = entered(sparse.SparseConditionalAccumulator.take)
    recover = entered(sparse.SparseConditionalAccumulator.recover)
    peek = awaited(sparse.SparseConditionalAccumulator.peek)
    as_encoded = unchanged(sparse.SparseConditionalAccumulator.as_encoded)


class TreeAccumulator(ConditionalAccumulatorBase[tree.TreeAccumulator]):
    """``redisacc.TreeAccumulator`` for asyncio, with the same arguments: sums the gradients of a tree."""

    @opening(tree.TreeAccumulator)
    def __init__(self) -> None: ...

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
        """Returns an accumulator for gradients of a tree of arrays. Open it with ``async with`` or ``await``.

        Args:
            tree: as for ``redisacc.TreeAccumulator.like``.
            shared_name: as for the class.
            name: as for the class.
            reduction_type: as for the class.
            sparse: as for ``redisacc.TreeAccumulator.like``.
            options: as for the class.
        """
        handle = cls.__new__(cls)
        Handle.__init__(handle, _LIKE, tree, shared_name, name, reduction_type, sparse, **options)
        return handle

    @property
    def spec(self) -> Any:
        """The tree with ``(dtype, shape)`` or ``Sparse(dtype, shape)`` as its leaves, as the class takes it."""
        return self.blocking.spec

    apply_grad = awaited(tree.TreeAccumulator.apply_grad)
    take_grad = awaited(tree.TreeAccumulator.take_grad)
    take = entered(tree.TreeAccumulator.take)
    recover = entered(tree.TreeAccumulator.recover)
    peek = awaited(tree.TreeAccumulator.peek)
    as_encoded = unchanged(tree.TreeAccumulator.as_encoded)


_LIKE = tree.TreeAccumulator.like
