"""TensorFlow 1's conditional accumulator over Redis, and fault-tolerant distributed training built on it."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from redisacc import errors
from redisacc._version import __version__ as __version__
from redisacc.errors import (
    AccumulatorFullError,
    CancelledError,
    ConflictError,
    CorruptDataError,
    DataLossError,
    FinishedError,
    InvalidArgumentError,
    NotFiniteError,
    NotFoundError,
    NotReplicatedError,
    OutcomeUnknownError,
    RedisAccError,
    ServerError,
    ServerUnavailableError,
    TakeTimeoutError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from redisacc import data, optim, raw_ops, types
    from redisacc._arrays.results import ApplyResult, Round
    from redisacc._arrays.slices import IndexedSlices
    from redisacc._arrays.spec import Sparse
    from redisacc._format.quorum import Quorum
    from redisacc._handles.base import ConditionalAccumulatorBase
    from redisacc._handles.dense import ConditionalAccumulator
    from redisacc._handles.environment import place
    from redisacc._handles.options import Limits, Mean, Staleness
    from redisacc._handles.parameters import Parameters
    from redisacc._handles.reducer import Reducer
    from redisacc._handles.sparse import SparseConditionalAccumulator
    from redisacc._handles.tree import TreeAccumulator
    from redisacc._training.chief import Chief
    from redisacc._training.local_steps import LocalSteps
    from redisacc._training.options import Checkpoints
    from redisacc._training.training import Training
    from redisacc._training.worker import Worker

__all__ = [
    "AccumulatorFullError",
    "ApplyResult",
    "CancelledError",
    "Checkpoints",
    "Chief",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "ConflictError",
    "CorruptDataError",
    "DataLossError",
    "FinishedError",
    "IndexedSlices",
    "InvalidArgumentError",
    "Limits",
    "LocalSteps",
    "Mean",
    "NotFiniteError",
    "NotFoundError",
    "NotReplicatedError",
    "OutcomeUnknownError",
    "Parameters",
    "Quorum",
    "RedisAccError",
    "Reducer",
    "Round",
    "ServerError",
    "ServerUnavailableError",
    "Sparse",
    "SparseConditionalAccumulator",
    "Staleness",
    "TakeTimeoutError",
    "Training",
    "TreeAccumulator",
    "WaitTimeoutError",
    "Worker",
    "data",
    "errors",
    "optim",
    "place",
    "raw_ops",
    "types",
]

# name → its module. All are loaded when the first of these names is used: numpy and redis-py take most of the time of
# an import, and `redisacc --help` needs neither. A test compares this with the imports above.
_MODULES = {
    "ApplyResult": "redisacc._arrays.results",
    "Checkpoints": "redisacc._training.options",
    "Chief": "redisacc._training.chief",
    "ConditionalAccumulator": "redisacc._handles.dense",
    "ConditionalAccumulatorBase": "redisacc._handles.base",
    "IndexedSlices": "redisacc._arrays.slices",
    "Limits": "redisacc._handles.options",
    "LocalSteps": "redisacc._training.local_steps",
    "Mean": "redisacc._handles.options",
    "Parameters": "redisacc._handles.parameters",
    "Quorum": "redisacc._format.quorum",
    "Reducer": "redisacc._handles.reducer",
    "Round": "redisacc._arrays.results",
    "Sparse": "redisacc._arrays.spec",
    "SparseConditionalAccumulator": "redisacc._handles.sparse",
    "Staleness": "redisacc._handles.options",
    "Training": "redisacc._training.training",
    "TreeAccumulator": "redisacc._handles.tree",
    "Worker": "redisacc._training.worker",
    "place": "redisacc._handles.environment",
}
# Public modules that are loaded with them.
_SUBMODULES = ("data", "optim", "raw_ops", "types")


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
