"""Conditional gradient accumulators, dense, sparse and of whole models, shared by name over Redis."""

from redisacc import errors, raw_ops
from redisacc._data.results import ApplyResult, Round, Tally
from redisacc._data.slices import IndexedSlices
from redisacc._data.tree_spec import Sparse
from redisacc._format.entries import UnacknowledgedRound, WaitingTaker, WorkerInfo
from redisacc._format.reducer_lease import ReducerInfo
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.environment import Place, place
from redisacc._handles.parameters import Parameters
from redisacc._handles.reducer import Reducer
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._protocol.events import Event, Events
from redisacc._protocol.info import AccumulatorInfo
from redisacc._training.chief import Chief
from redisacc._training.worker import Worker
from redisacc.errors import (
    AccumulatorFullError,
    AccumulatorNotFoundError,
    CancelledError,
    CorruptDataError,
    DataLossError,
    InvalidArgumentError,
    LeaseHeldError,
    LeaseLostError,
    NotPermittedError,
    NotReplicatedError,
    OutcomeUnknownError,
    ParametersFinishedError,
    ParametersNotFoundError,
    ParametersTimeoutError,
    PeekTimeoutError,
    RedisAccError,
    RoundNotPublishedError,
    RoundRecoveredError,
    SchemaMismatchError,
    ServerError,
    ServerOutOfMemoryError,
    ServerUnavailableError,
    StaleSequenceError,
    StepConflictError,
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
    "Chief",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "CorruptDataError",
    "DataLossError",
    "Event",
    "Events",
    "IndexedSlices",
    "InvalidArgumentError",
    "LeaseHeldError",
    "LeaseLostError",
    "NotPermittedError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "Parameters",
    "ParametersFinishedError",
    "ParametersNotFoundError",
    "ParametersTimeoutError",
    "PeekTimeoutError",
    "Place",
    "RedisAccError",
    "Reducer",
    "ReducerInfo",
    "Round",
    "RoundNotPublishedError",
    "RoundRecoveredError",
    "SchemaMismatchError",
    "ServerError",
    "ServerOutOfMemoryError",
    "ServerUnavailableError",
    "Sparse",
    "SparseConditionalAccumulator",
    "StaleSequenceError",
    "StepConflictError",
    "StepOverflowError",
    "StepTimeoutError",
    "TakeTimeoutError",
    "Tally",
    "TreeAccumulator",
    "UnacknowledgedRound",
    "WaitingTaker",
    "Worker",
    "WorkerInfo",
    "errors",
    "place",
    "raw_ops",
]
