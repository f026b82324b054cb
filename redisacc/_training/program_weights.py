"""What a leader has of a training whose program updates the weights, in a loop over ``rounds()``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from redisacc._arrays.results import Round
from redisacc._arrays.trees import flatten
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.parameters import Parameters
from redisacc._training.exact_parameters import pack_state, read_exact


@dataclass
class TakenRound:
    """A round that a leader has, and the block at whose end it is acknowledged."""

    round: Round[Any]
    block: ExitStack


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

    def recover(self) -> TakenRound | None:
        """Returns the oldest round that was granted and not acknowledged, None if there is none."""
        block = ExitStack()
        found = block.enter_context(self.accumulator.recover())
        return None if found is None else TakenRound(found, block)

    def grant(self, **options: Any) -> TakenRound:
        """Blocks until a round is granted. The arguments are those of ``take``."""
        block = ExitStack()
        return TakenRound(block.enter_context(self.accumulator.take(**options)), block)

    def step_of(self, found: TakenRound) -> int:
        """Returns the step of a round."""
        return found.round.global_step

    def discard(self, found: TakenRound) -> None:
        """Removes a round that has been used."""
        found.block.close()


def _own(tree: Any) -> Any:
    """Returns a tree with copies of its arrays, which may be written to."""
    structure, leaves = flatten(tree, "parameters")
    return structure.build([np.array(leaf) for leaf in leaves])
