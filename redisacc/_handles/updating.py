"""Gives the chief of a training what updates need of a handle on an accumulator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from redisacc._format.keys import Keys
from redisacc._format.quorum import Quorum
from redisacc._handles.base import ConditionalAccumulatorBase, host_and_process
from redisacc._protocol.rounds.taker import GrantedRound
from redisacc._protocol.updates.committer import Committer


class Rounds:
    """The rounds of an accumulator, which are granted and not read.

    Args:
        accumulator: the handle.
    """

    def __init__(self, accumulator: ConditionalAccumulatorBase[Any]) -> None:
        self._accumulator = accumulator
        accumulator._taker.is_updated = True

    @property
    def keys(self) -> Keys:
        """The keys of the accumulator."""
        return self._accumulator._keys

    @property
    def tables(self) -> tuple[int, ...]:
        """The numbers of the leaves whose gradients are rows."""
        return tuple([number for number, leaf in enumerate(self._accumulator._spec.leaves) if leaf.is_sparse])

    def committer(self, publisher: str) -> Committer:
        """Returns what commits updates. ``publisher``: the name of this process in the record."""
        handle = self._accumulator
        return Committer(
            handle._transport,
            handle._keys,
            spec=handle._spec,
            scripts=handle._scripts,
            taker=handle._taker,
            publisher=publisher,
        )

    def grant(
        self, *, min_weight: float | None, cancel: Callable[[], bool], describe: Callable[[], str]
    ) -> GrantedRound:
        """Blocks until a round is granted. The arguments are those of ``take``."""
        handle = self._accumulator
        handle._lifetime.check()
        who = host_and_process(os.getpid())
        with handle._telemetry.observe("take", who):
            return handle._taker.grant(
                Quorum(min_weight=min_weight),
                deadline=math.inf,
                name=who,
                label=handle._own_label,
                describe=describe,
                cancel=cancel,
            )

    def recover(self) -> GrantedRound | None:
        """Returns the oldest round that was granted and not acknowledged, None if there is none."""
        handle = self._accumulator
        handle._records.read()
        return handle._taker.grant_again(None, name=host_and_process(os.getpid()))
