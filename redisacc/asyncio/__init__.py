"""Accumulators, parameters and the training loop for asyncio: redisacc's classes, with ``await``.

Example:
    >>> import asyncio
    >>> import redisacc.asyncio
    >>> async def main():
    ...     async with redisacc.asyncio.ConditionalAccumulator("float32", [2]) as accumulator:
    ...         await accumulator.apply_grad([1.0, 2.0])
    ...         async with asyncio.timeout(60):
    ...             return (await accumulator.take_grad(1)).tolist()
    >>> asyncio.run(main())
    [1.0, 2.0]
"""

try:
    import greenlet as _greenlet  # noqa: F401
except ImportError as error:
    raise ImportError("redisacc.asyncio needs greenlet: pip install 'redisacc[asyncio]'") from error

from redisacc.asyncio._accumulators import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    Events,
    SparseConditionalAccumulator,
    TreeAccumulator,
)
from redisacc.asyncio._errors import OutcomeUnknownError
from redisacc.asyncio._parameters import Parameters
from redisacc.asyncio._training import Chief, Training, Upload, Worker

__all__ = [
    "Chief",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "Events",
    "OutcomeUnknownError",
    "Parameters",
    "SparseConditionalAccumulator",
    "Training",
    "TreeAccumulator",
    "Upload",
    "Worker",
]
