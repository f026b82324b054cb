"""TensorFlow 1's conditional accumulator over Redis, and fault-tolerant distributed training built on it."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from redisacc import errors
from redisacc._version import __version__ as __version__
from redisacc.errors import (
    AccumulatorFullError,
    AccumulatorNotFoundError,
    CancelledError,
    CorruptDataError,
    DataLossError,
    EventLoopError,
    FinishedError,
    InvalidArgumentError,
    LeaseHeldError,
    LeaseLostError,
    NotFiniteError,
    NotPermittedError,
    NotReplicatedError,
    OutcomeUnknownError,
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

if TYPE_CHECKING:
    from redisacc import data, optim, raw_ops
    from redisacc._data.results import ApplyResult, Round, Tally
    from redisacc._data.slices import IndexedSlices
    from redisacc._data.tree.spec import Sparse
    from redisacc._format.entries import UnacknowledgedRound, WaitingTaker, WorkerInfo
    from redisacc._format.history_entries import PastStep
    from redisacc._format.reducer_lease import ReducerInfo
    from redisacc._format.settings import Settings
    from redisacc._handles.base import ConditionalAccumulatorBase
    from redisacc._handles.dense import ConditionalAccumulator
    from redisacc._handles.environment import Place, place
    from redisacc._handles.parameters import Parameters
    from redisacc._handles.reducer import Reducer
    from redisacc._handles.sparse import SparseConditionalAccumulator
    from redisacc._handles.tree import TreeAccumulator
    from redisacc._protocol.lifecycle.events import Event, Events
    from redisacc._protocol.lifecycle.info import AccumulatorInfo
    from redisacc._training.chief import Chief
    from redisacc._training.training import Training
    from redisacc._training.upload import Upload
    from redisacc._training.worker import Worker

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
    "EventLoopError",
    "Events",
    "FinishedError",
    "IndexedSlices",
    "InvalidArgumentError",
    "LeaseHeldError",
    "LeaseLostError",
    "NotFiniteError",
    "NotPermittedError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "Parameters",
    "ParametersNotFoundError",
    "ParametersTimeoutError",
    "PastStep",
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
    "Settings",
    "Sparse",
    "SparseConditionalAccumulator",
    "StaleSequenceError",
    "StepConflictError",
    "StepOverflowError",
    "StepTimeoutError",
    "TakeTimeoutError",
    "Tally",
    "Training",
    "TreeAccumulator",
    "UnacknowledgedRound",
    "Upload",
    "WaitingTaker",
    "Worker",
    "WorkerInfo",
    "data",
    "errors",
    "optim",
    "place",
    "raw_ops",
]

# name → its module. All are loaded when the first of these names is used: numpy and redis-py take most of the time of
# an import, and `redisacc --help` needs neither. A test compares this with the imports above.
_MODULES = {
    "AccumulatorInfo": "redisacc._protocol.lifecycle.info",
    "ApplyResult": "redisacc._data.results",
    "Chief": "redisacc._training.chief",
    "ConditionalAccumulator": "redisacc._handles.dense",
    "ConditionalAccumulatorBase": "redisacc._handles.base",
    "Event": "redisacc._protocol.lifecycle.events",
    "Events": "redisacc._protocol.lifecycle.events",
    "IndexedSlices": "redisacc._data.slices",
    "Parameters": "redisacc._handles.parameters",
    "PastStep": "redisacc._format.history_entries",
    "Place": "redisacc._handles.environment",
    "Reducer": "redisacc._handles.reducer",
    "ReducerInfo": "redisacc._format.reducer_lease",
    "Round": "redisacc._data.results",
    "Settings": "redisacc._format.settings",
    "Sparse": "redisacc._data.tree.spec",
    "SparseConditionalAccumulator": "redisacc._handles.sparse",
    "Tally": "redisacc._data.results",
    "Training": "redisacc._training.training",
    "TreeAccumulator": "redisacc._handles.tree",
    "UnacknowledgedRound": "redisacc._format.entries",
    "Upload": "redisacc._training.upload",
    "WaitingTaker": "redisacc._format.entries",
    "Worker": "redisacc._training.worker",
    "WorkerInfo": "redisacc._format.entries",
    "place": "redisacc._handles.environment",
}
# Public modules that are loaded with them.
_SUBMODULES = ("data", "optim", "raw_ops")


# Type checkers read the imports above: with this function, they would accept every misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES and name not in _SUBMODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # All of them at once, because a fork during an import would block the child: once a program uses redisacc,
        # nothing of it is imported any more. The next use of a name finds it without this function.
        loaded = {each: getattr(importlib.import_module(home), each) for each, home in _MODULES.items()}
        loaded.update({each: importlib.import_module(f"redisacc.{each}") for each in _SUBMODULES})
        globals().update(loaded)
        return globals()[name]


def __dir__() -> list[str]:
    # Also what is not loaded yet: for completion, and for the names that Python suggests after a typo.
    return sorted({*globals(), *__all__})


# Now, because a program may fail before it uses anything of redisacc. Other processes do not load the module.
if "REDISACC_RUN_ID" in os.environ:
    importlib.import_module("redisacc._handles.exit_code").install()
