"""A worker of a training with steps alone, which kills itself in one of them; and what such a training must equal.

python local_worker.py URL NUMBER KILLED_AT. Says each step. KILLED_AT: the step in which it is killed; -1: none.
"""

import os
import signal
import sys

import numpy as np

import redisacc
from redisacc.optim import SGD

# Numbers for which no operation rounds.
INNER, OUTER = SGD(0.5, momentum=0.5), SGD(0.5, momentum=0.5, nesterov=True)
START = {"w": np.array([8.0, -16.0, 0.0])}


def exact(number, step, weights):
    """A gradient that depends on everything it may depend on."""
    return {"w": weights["w"] * 0.5 + np.array([number, step, 1.0])}


def simulate(until, crew, every=3, killed=None):
    """Returns the weights by plain arithmetic.

    Args:
        until: the step after which the training ends.
        crew: how many workers there are.
        every: how many steps they make alone.
        killed: a worker that is killed, and the version with whose weights it is replaced.
    """
    weights, outer = START["w"], np.zeros(3)
    inner = [np.zeros(3)] * crew
    for version in range(until // every):
        moved = []
        for number in range(crew):
            own = weights
            if killed == (number, version):
                inner[number] = np.zeros(3)
            for step in range(version * every, (version + 1) * every):
                inner[number] = 0.5 * inner[number] + exact(number, step, {"w": own})["w"]
                own = own - 0.5 * inner[number]
            moved.append(weights - own)
        gradient = sum(moved) / crew
        outer = 0.5 * outer + gradient
        weights = weights - 0.5 * (gradient + 0.5 * outer)
    return weights


def main(url, number, killed_at):
    with redisacc.Training(
        "train", START, optimizer=redisacc.LocalSteps(INNER, 3, OUTER), workers=2, number=int(number), redis=url
    ) as one:
        for step, weights in one.steps(until=9):
            print(step, flush=True)
            if step == int(killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
            one.apply(exact(int(number), step, weights))


if __name__ == "__main__":
    main(*sys.argv[1:])
