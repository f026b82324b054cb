"""Searches a model of a protocol: visits every state that it can reach, and looks at each for harm.

A model says what its first state is, what can happen next in a state, and what must hold. States are immutable, and
equal if nothing that matters differs. The search goes breadth first, so the way to a harm that it reports is a shortest
one.
"""

import gc
from collections import deque


class Harm(AssertionError):
    """The search reached a state that must not be.

    Attributes:
        steps: how it got there.
    """

    def __init__(self, what, steps):
        super().__init__("\n".join([what, *steps]))
        self.steps = steps


class Search:
    """Visits every state that a model can reach.

    Args:
        model: the model. Its ``first()`` returns the state in which everything begins, and ``steps(state)`` yields
            what can happen next: what it is, and the state after it. ``problem(state)`` returns what is wrong in a
            state, and ``problem_at_rest(state)`` what is wrong if nothing more can happen in it; None: nothing.
        mirror: the model once more, if it treats two of its actors alike, so that of two states that mirror each other
            one is enough: ``mirrored(state)`` returns the state with the two actors in each other's place.
    """

    def __init__(self, model, *, mirror=None):
        self._model = model
        self._mirror = mirror
        self._came_from = {}

    def run(self):
        """Visits all states, and returns how many there are, without the mirror images of others.

        Raises:
            Harm: one of them must not be.
        """
        # States form no cycles. Looking for some among a million objects again and again takes longer than the search,
        # above all in a process that has run many tests.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._visit_all()
        finally:
            if collects:
                gc.enable()
        return len(self._came_from)

    def _visit_all(self):
        model, mirror, came_from = self._model, self._mirror, self._came_from
        first = model.first()
        came_from[first] = None
        mirrored = set()
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            after = list(model.steps(state))
            problem = model.problem(state) or (model.problem_at_rest(state) if not after else None)
            if problem:
                raise Harm(problem, self._way_to(state))
            for what, reached in after:
                if reached not in came_from and reached not in mirrored:
                    came_from[reached] = (state, what)
                    waiting.append(reached)
                    if mirror is not None:
                        mirrored.add(mirror.mirrored(reached))

    def _way_to(self, state):
        steps = []
        at = self._came_from[state]
        while at is not None:
            steps.append(at[1])
            at = self._came_from[at[0]]
        return steps[::-1]
