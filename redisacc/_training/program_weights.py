"""What a leader has of a training whose program updates the weights, in a loop over ``rounds()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from redisacc._arrays.trees import flatten
from redisacc._format.quorum import Quorum
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.parameters import Parameters
from redisacc._protocol.rounds.taker import TakenRound
from redisacc._training.exact_parameters import pack_state, read_exact


class ProgramWeights:
    """The weights and the state that are published, in memory.

    Args:
        parameters: the handle with which they are published.

    Attributes:
        accumulator: the handle on the gradients.
        step: the step of the weights.
        tree: the weights.
        state: the program's state.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.accumulator: ConditionalAccumulatorBase[Any]
        self.step = 0
        self.tree: Any = None
        self.state: Any = None

    def learn(self) -> None:
        """Reads what is published.

        Raises:
            NotFoundError: nothing is.
            DataLossError: a part of it is lost.
        """
        step, sent, tree, state = read_exact(self._parameters)
        self.keep(step, _own(sent) if tree is sent else tree, state)

    def keep(self, step: int, tree: Any, state: Any) -> None:
        """Notes what is published."""
        self.step, self.tree, self.state = step, tree, state

    def publish_again(self, check: Callable[[], object], *, is_lost: bool) -> bool:  # noqa: ARG002 - see ``Updating``
        """Publishes the version again whose parts, or which itself, the server has lost. Returns True."""
        self._parameters._restore(self.tree, self.step, state=pack_state(self._parameters, self.tree, self.state))
        return True

    def reopen(self, accumulator: ConditionalAccumulatorBase[Any]) -> None:
        """Notes a handle in place of one whose accumulator the server has lost."""
        self.accumulator = accumulator

    def recover(self) -> TakenRound[Any] | None:
        """Returns the oldest round that was granted and not acknowledged, None if there is none."""
        return self.accumulator._recover()

    def grant(
        self, *, min_weight: float | None, cancel: Callable[[], bool], describe: Callable[[], str]
    ) -> TakenRound[Any]:
        """Blocks until a round is granted. The arguments are those of ``take``."""
        return self.accumulator._take(Quorum(min_weight=min_weight), None, None, describe, cancel)

    def step_of(self, found: TakenRound[Any]) -> int:
        """Returns the step of a round."""
        return found.round.global_step

    def discard(self, found: TakenRound[Any]) -> None:
        """Removes a round that has been used."""
        found.ended.acknowledge()


def _own(tree: Any) -> Any:
    """Returns a tree with copies of its arrays, which may be written to."""
    structure, leaves = flatten(tree, "parameters")
    return structure.build([np.array(leaf) for leaf in leaves])
