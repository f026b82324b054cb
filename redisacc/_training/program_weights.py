"""The weights that a leader has if the program updates them, in a loop over ``rounds()``.

A chief that continued with rounded parameters would not compute the same as one without an interruption. If its
parameters travel as bfloat16, a chief therefore also publishes the exact float32 ones, as a part of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from redisacc._arrays.trees import flatten, flatten_arrays
from redisacc._format.parameter_record import EXACT
from redisacc._format.quorum import Quorum
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.parameters import Parameters
from redisacc._protocol.rounds.taker import TakenRound
from redisacc._protocol.scripts import OF_PARAMETERS, refused
from redisacc._text import shown
from redisacc.errors import CorruptDataError

_FLOAT32 = np.dtype(np.float32)


def pack_state(handle: Parameters, parameters: Any, state: Any) -> Any:
    """Returns the state that is published with parameters.

    If the handle rounds them, that is the parameters of float32, if there are any, and the chief's own state.
    """
    if handle._encoding != "bfloat16":
        return state
    _, arrays = flatten_arrays(parameters, "parameters")
    exact = [values for values in arrays if values.dtype == _FLOAT32]
    return {EXACT: exact, "state": state} if exact else state


def unpack_state(published: Any) -> tuple[list[Any] | None, Any]:
    """Returns the parameters of float32 in a state that was published, None if it has none, and the chief's own state.

    A chief whose parameters are not rounded publishes its own state alone.
    """
    if isinstance(published, dict) and EXACT in published:
        return published[EXACT], published.get("state")
    return None, published


def unpacked(tree: Any, published: Any, name: str) -> tuple[Any, Any]:
    """Returns parameters with the exact ones in place of the rounded ones, and the chief's own state.

    Args:
        tree: the parameters as workers get them. They are returned as they are if the state has no exact ones.
        published: the state that was published with them.
        name: the name of the run, for errors.

    Raises:
        CorruptDataError: the two do not belong together.
    """
    exact, state = unpack_state(published)
    return tree if exact is None else _with_exact(tree, exact, name), state


def read_exact(handle: Parameters) -> tuple[int, Any, Any, Any]:
    """Returns the step that is published, its parameters as workers get them, and what ``unpacked`` makes of them.

    Raises:
        NotFoundError: nothing is published.
        RedisAccError: any other error of ``Parameters.latest``.
    """
    found = handle._latest(state=True)
    if found is None:
        raise refused(OF_PARAMETERS["missing"], handle._keys)
    record, sent, published = found
    return record.step, sent, *unpacked(sent, published, handle.shared_name)


def _with_exact(tree: Any, exact: list[Any], name: str) -> Any:
    """Returns parameters with the exact float32 ones in place of the rounded ones. Their memory is the caller's."""
    structure, leaves = flatten(tree, "parameters")
    expected = [(_FLOAT32, leaf.shape) for leaf in leaves if leaf.dtype == _FLOAT32]
    # Any publisher may have written a state with this key, with anything in it.
    if not isinstance(exact, list) or [_described(values) for values in exact] != expected:
        raise CorruptDataError(
            f"{shown(name)}: the state of the parameters has {shown(EXACT)}, but not the leaves of float32 that the "
            "parameters have"
        )
    left = iter(exact)
    return structure.build([next(left) if leaf.dtype == _FLOAT32 else np.array(leaf) for leaf in leaves])


def _described(values: Any) -> tuple[Any, Any]:
    return (values.dtype, values.shape) if isinstance(values, np.ndarray) else (None, None)


class ProgramWeights:
    """The weights and the state that are published, in memory.

    Args:
        parameters: the handle with which they are published.

    Attributes:
        accumulator: the handle on the gradients.
        step: the step of the weights.
        tree: the weights.
        state: the program's state.
        kept: what it keeps, as text.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.accumulator: ConditionalAccumulatorBase[Any]
        self.step = 0
        self.tree: Any = None
        self.state: Any = None
        self.kept = ""

    def learn(self) -> None:
        """Reads what is published.

        Raises:
            NotFoundError: nothing is.
            DataLossError: a part of it is lost.
        """
        step, sent, tree, state = read_exact(self._parameters)
        self.keep(step, _own(sent) if tree is sent else tree, state, self._parameters._reader.kept)

    def keep(self, step: int, tree: Any, state: Any, kept: str) -> None:
        """Notes what is published."""
        self.step, self.tree, self.state, self.kept = step, tree, state, kept

    def publish_again(self, check: Callable[[], object], *, is_lost: bool) -> bool:  # noqa: ARG002 - see ``Updating``
        """Publishes the version again whose parts, or which itself, the server has lost. Returns True."""
        state = pack_state(self._parameters, self.tree, self.state)
        self._parameters._restore(self.tree, self.step, state=state, kept=self.kept)
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
