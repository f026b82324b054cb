"""Types for annotations: the return values of methods, and the options of several functions as typed dicts.

Example:
    >>> from typing import Unpack
    >>> import redisacc
    >>> from redisacc.types import AccumulatorOptions
    >>> def open_mine(**options: Unpack[AccumulatorOptions]) -> redisacc.ConditionalAccumulator:
    ...     return redisacc.ConditionalAccumulator("float32", [2], worker="mine", **options)
"""

from redisacc._arrays.results import Tally
from redisacc._format.entries import ReducerInfo, UnacknowledgedRound, WaitingTaker, WorkerInfo
from redisacc._format.history_entries import PastStep
from redisacc._handles.environment import Place
from redisacc._handles.options import AccumulatorOptions
from redisacc._protocol.lifecycle.events import Event, Events
from redisacc._protocol.lifecycle.info import AccumulatorInfo
from redisacc._training.options import GradientOptions, LeaderOptions, TrainingOptions
from redisacc._training.upload import Upload

__all__ = [
    "AccumulatorInfo",
    "AccumulatorOptions",
    "Event",
    "Events",
    "GradientOptions",
    "LeaderOptions",
    "PastStep",
    "Place",
    "ReducerInfo",
    "Tally",
    "TrainingOptions",
    "UnacknowledgedRound",
    "Upload",
    "WaitingTaker",
    "WorkerInfo",
]
