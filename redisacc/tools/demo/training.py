"""The program that the demo's processes run: the chief, the workers, and the check of their result.

    redisacc run --chief --workers 4 -- python -m redisacc.tools.demo.training NAME
    python -m redisacc.tools.demo.training NAME

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
from redisacc.tools.demo import DemoError, skipgram
from redisacc.tools.demo.settings import Settings, training_options
from redisacc.tools.demo.skipgram import SPARSE, Array, Sampler, Tree
from redisacc.tools.demo.text import Corpus


def lead(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs the chief. Started again after a death, it continues with the parameters and the state of its last step."""
    start = skipgram.initial_parameters(corpus, settings)
    state = {"squares": skipgram.initial_squares(start), "losses": np.zeros((settings.steps, 2))}
    # The mean of a row is over the workers whose words include it. Divided by the number of all workers, the rows of
    # rare words, which one worker of several sees, would move less.
    rows = redisacc.types.GradientOptions(sparse=SPARSE, mean=redisacc.Mean(rows="index"))
    with redisacc.Chief(name, start, workers=settings.workers, state=state, accumulator=rows) as chief:
        check_fingerprint(chief.parameters, start, name)
        first = chief.step
        for taken in chief.rounds(until=settings.steps):
            if settings.kill:
                kill_once(chief.step, first, at=settings.steps // 3)
            parameters, state, mean = chief.parameters, chief.state, taken.gradient
            skipgram.update(parameters, state["squares"], mean, settings.rate)
            state["losses"][chief.step] = mean["loss"]
            # Of the tables, only the rows that have moved are sent to the workers.
            moved = {leaf: mean[leaf].indices for leaf in SPARSE}
            chief.publish(parameters, changed={**moved, "fingerprint": []}, state=state)
            show(chief.step, settings.steps, mean["loss"])


def work(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs a worker. Started again after a death, it computes the gradient that is missing."""
    start, sampler = skipgram.initial_parameters(corpus, settings), Sampler(corpus, settings)
    with redisacc.Worker(name) as worker:
        if worker.number >= settings.workers:
            raise DemoError(f"{name} has workers 0 to {settings.workers - 1}, and no worker {worker.number}")
        first = None
        for step, parameters in worker.steps():
            check_fingerprint(parameters, start, name)
            first = step if first is None else first
            gradient = skipgram.gradients(parameters, sampler.batch(step, worker.number))
            if settings.kill and worker.number == 0:
                kill_once(step, first, at=2 * settings.steps // 3)
            worker.apply(gradient)


def check_fingerprint(parameters: Tree, start: Tree, name: str) -> None:
    """Checks that published parameters are those of the run that this process means."""
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


def check_result(name: str, settings: Settings, corpus: Corpus) -> None:
    """Trains in this process alone, and compares the result with what the chief has published last."""
    published = redisacc.Parameters(name, create=False)
    together, state = published.wait()[1], published.latest_state()
    check_fingerprint(together, skipgram.initial_parameters(corpus, settings), name)
    assert state is not None
    alone = train_alone(settings, corpus)
    judge(state[1]["losses"], largest_difference(together, alone), tolerance_for(settings))


def train_alone(settings: Settings, corpus: Corpus) -> Tree:
    """Trains with the same batches, without Redis. Returns the parameters."""
    sampler = Sampler(corpus, settings)
    parameters = skipgram.initial_parameters(corpus, settings)
    squares = skipgram.initial_squares(parameters)
    for step in range(settings.steps):
        found = [skipgram.gradients(parameters, sampler.batch(step, each)) for each in range(settings.workers)]
        mean = average(found)
        skipgram.update(parameters, squares, mean, settings.rate)
        show(step + 1, settings.steps, mean["loss"])
    return parameters


def average(found: Sequence[Tree]) -> Tree:
    """Returns the mean of gradients as the accumulator defines it: a row's is over those gradients that held it."""
    mean: Tree = {}
    for leaf in SPARSE:
        indices = np.concatenate([each[leaf].indices for each in found])
        indices, sums, counts = skipgram.sum_rows(indices, np.concatenate([each[leaf].values for each in found]))
        mean[leaf] = redisacc.IndexedSlices(sums / counts[:, None].astype(sums.dtype), indices)
    return mean | {leaf: np.sum([each[leaf] for each in found], axis=0) / len(found) for leaf in ("position", "loss")}


def largest_difference(ours: Tree, theirs: Tree) -> float:
    """Returns the largest absolute difference of a parameter; NaN if one is NaN, or infinite in both."""
    with np.errstate(invalid="ignore"):  # two infinities are NaN apart
        pairs = [(ours[leaf].astype(np.float64), theirs[leaf]) for leaf in (*SPARSE, "position")]
        # In numpy's max, unlike Python's, a NaN wins over every number.
        return float(np.max([np.abs(one - other).max() for one, other in pairs]))


def tolerance_for(settings: Settings) -> float:
    """Returns the largest difference of a parameter between two equal runs that counts as rounding.

    Through Redis, the gradients arrive in another order each time, and float32 addition rounds. Measured with the
    defaults: runs that differ only in the order of addition end 1e-5 to 2e-5 apart, while one gradient of one
    worker that is lost in the first, the middle or the last step moves a parameter by 8e-2 or more. The bound, 1e-3
    there, is proportional to the rate, as every change of a parameter is, and in longer runs to the steps.
    """
    return settings.rate / 150 * max(1.0, settings.steps / 1000)


def judge(losses: Array, difference: float, tolerance: float) -> None:
    """Prints the proof, or raises DemoError. ``losses``: for each step, the sum over all pairs, and their number."""
    tenth = max(1, len(losses) // 10)
    first, last = ((part[:, 0] / part[:, 1]).mean() for part in (losses[:tenth], losses[-tenth:]))
    print(f"\nLoss per pair of words: {first:.4f} at the start, {last:.4f} at the end.")
    print(f"Largest difference of a parameter between the two results: {difference:.2e}")
    print(f"(at most {tolerance:.1e} counts as rounding).")
    # "not <=", because NaN is a failure too.
    if not difference <= tolerance:
        raise DemoError(f"the two results differ by {difference:.2e}, more than {tolerance:.1e}")
    if not last < first:
        raise DemoError(f"the loss did not fall: {first:.4f} at the start, {last:.4f} at the end")
    print("The results agree, and the loss fell.")


@click.command()
@click.argument("name", default="demo")
@training_options
def main(*, name: str, settings: Settings, corpus: Corpus, **_: object) -> None:
    """Be the chief or a worker of the run NAME, as the environment says, or else check its result."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # At the end of a block, a chief or worker gives its lease back; by default, SIGTERM would end it before that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    {"chief": lead, "worker": work, None: check_result}[redisacc.place().role](name, settings, corpus)


if __name__ == "__main__":
    main()
