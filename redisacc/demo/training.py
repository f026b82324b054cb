"""The program that the demo's processes run: the chief, the workers, or one process that trains alone.

    redisacc run --workers 4 -- python -m redisacc.demo.training NAME

In each step, each worker computes the gradient of its own batch, and the chief updates the parameters by the mean of
all of them. So one process that computes all batches of a step itself gets the same parameters, up to rounding.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import click
import numpy as np

import redisacc
from redisacc.demo import DemoError
from redisacc.demo.settings import Settings, training_options
from redisacc.demo.skipgram import (
    SPARSE,
    Sampler,
    Tree,
    gradients,
    initial_parameters,
    initial_squares,
    sum_rows,
    update,
)
from redisacc.demo.text import Corpus


def lead(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs the chief. Started again after a death, it continues with the parameters and the state of its last step."""
    start, steps = initial_parameters(corpus, settings), Sampler(corpus, settings).steps
    state = {"squares": initial_squares(start), "losses": np.zeros((steps, 2))}
    # The mean of a row is over the workers whose words include it. Divided by the number of all workers, the rows of
    # rare words, which one worker of several sees, would move less.
    with redisacc.Chief(
        name, start, workers=settings.workers, state=state, sparse=SPARSE, sparse_mean="index"
    ) as chief:
        check(chief.parameters, start, name)
        first = chief.step
        for taken in chief.rounds(until=steps):
            if settings.kill:
                kill_once(chief.step, first, at=steps // 3)
            parameters, state, mean = chief.parameters, chief.state, taken.gradient
            update(parameters, state["squares"], mean, settings.rate)
            state["losses"][chief.step] = mean["loss"]
            # Of the tables, only the rows that have moved are sent to the workers.
            moved = {leaf: mean[leaf].indices for leaf in SPARSE}
            chief.publish(parameters, changed={**moved, "fingerprint": []}, state=state)
            show(chief.step, steps, mean["loss"])


def work(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs a worker. Started again after a death, it computes the gradient that is missing."""
    start, sampler = initial_parameters(corpus, settings), Sampler(corpus, settings)
    with redisacc.Worker(name) as worker:
        if worker.number >= settings.workers:
            raise DemoError(f"{name} has workers 0 to {settings.workers - 1}, and no worker {worker.number}")
        first = None
        for step, parameters in worker.steps():
            check(parameters, start, name)
            first = step if first is None else first
            gradient = gradients(parameters, sampler.batch(step, worker.number))
            if settings.kill and worker.number == 0:
                kill_once(step, first, at=2 * sampler.steps // 3)
            worker.apply(gradient)


def check(parameters: Tree, start: Tree, name: str) -> None:
    """Checks that published parameters are of the training that this process takes part in."""
    if not np.array_equal(parameters["fingerprint"], start["fingerprint"]):
        raise DemoError(
            f"{name} trains another text or has other settings: give all processes the same options, and the same "
            "--text or the same version of Python, whose language reference is the default text"
        )


def kill_once(step: int, first: int, *, at: int) -> None:
    """Kills this process when it reaches step ``at``, unless that is its first: its successor begins with that step."""
    if first < step == at:
        os.kill(os.getpid(), signal.SIGKILL)


def show(step: int, steps: int, loss: Sequence[float]) -> None:
    """Prints a line after the first step, and after each tenth of them."""
    if step in (1, steps) or step % max(1, steps // 10) == 0:
        print(f"step {step}/{steps}  loss {loss[0] / loss[1]:.3f}", flush=True)


def train_alone(name: str, settings: Settings, corpus: Corpus) -> None:
    """Trains with the same batches in this process alone, and publishes the result as NAME/alone."""
    sampler = Sampler(corpus, settings)
    parameters = initial_parameters(corpus, settings)
    squares = initial_squares(parameters)
    for step in range(sampler.steps):
        mean = average([gradients(parameters, sampler.batch(step, worker)) for worker in range(settings.workers)])
        update(parameters, squares, mean, settings.rate)
        show(step + 1, sampler.steps, mean["loss"])
    redisacc.Parameters(f"{name}/alone").publish(parameters, sampler.steps)


def average(found: Sequence[Tree]) -> Tree:
    """Returns the mean of gradients as the accumulator defines it: a row's is over those gradients that held it."""
    mean: Tree = {}
    for leaf in SPARSE:
        indices, rows = (
            np.concatenate([getattr(each[leaf], part) for each in found]) for part in ("indices", "values")
        )
        indices, sums, counts = sum_rows(indices, rows)
        mean[leaf] = redisacc.IndexedSlices(sums / counts[:, None].astype(sums.dtype), indices)
    return mean | {leaf: np.sum([each[leaf] for each in found], axis=0) / len(found) for leaf in ("position", "loss")}


@click.command()
@click.argument("name", default="demo")
@training_options
def main(*, name: str, settings: Settings, corpus: Corpus, **_: object) -> None:
    """Take the place in the training NAME that the environment says: chief, worker, or else all of them alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # At the end of a block, a chief or worker gives its lease back; by default, SIGTERM would end it before that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    role = {"chief": lead, "worker": work}.get(os.environ.get("REDISACC_ROLE", ""), train_alone)
    try:
        role(name, settings, corpus)
    except redisacc.RedisAccError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
