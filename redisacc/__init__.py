"""Conditional gradient accumulators, dense and sparse, shared by name over Redis."""

from redisacc import errors, raw_ops
from redisacc._accumulator import ApplyResult, ConditionalAccumulatorBase
from redisacc._dense import ConditionalAccumulator
from redisacc._info import AccumulatorInfo, Unacknowledged, Waiting, Worker
from redisacc._observing import Event, Events
from redisacc._rounds import Round
from redisacc._slices import IndexedSlices
from redisacc._sparse import SparseConditionalAccumulator
from redisacc.errors import (
    AccumulatorFullError,
    AccumulatorNotFoundError,
    CancelledError,
    CorruptDataError,
    DataLossError,
    InvalidArgumentError,
    NotPermittedError,
    NotReplicatedError,
    OutcomeUnknownError,
    PeekTimeoutError,
    RedisAccError,
    SchemaMismatchError,
    ServerError,
    ServerOutOfMemoryError,
    ServerUnavailableError,
    StaleSequenceError,
    StepOverflowError,
    StepTimeoutError,
    TakeTimeoutError,
)

__version__ = "0.1.0"

__all__ = [
    "AccumulatorFullError",
    "AccumulatorInfo",
    "AccumulatorNotFoundError",
    "ApplyResult",
    "CancelledError",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "CorruptDataError",
    "DataLossError",
    "Event",
    "Events",
    "IndexedSlices",
    "InvalidArgumentError",
    "NotPermittedError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "PeekTimeoutError",
    "RedisAccError",
    "Round",
    "SchemaMismatchError",
    "ServerError",
    "ServerOutOfMemoryError",
    "ServerUnavailableError",
    "SparseConditionalAccumulator",
    "StaleSequenceError",
    "StepOverflowError",
    "StepTimeoutError",
    "TakeTimeoutError",
    "Unacknowledged",
    "Waiting",
    "Worker",
    "errors",
    "raw_ops",
]
