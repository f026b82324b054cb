"""The program that the demo's processes run, and the check of their result.

    redisacc run --workers 4 -- python -m redisacc.tools.demo.training NAME
    python -m redisacc.tools.demo.training NAME

In each step, each worker computes the gradient of its own batch, and the parameters are updated by the mean of all of
them. So one process that computes all batches of a step itself gets the same parameters, up to rounding.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import click
import numpy as np

import redisacc
from redisacc._text import printable
from redisacc.tools.demo import DemoError, skipgram
from redisacc.tools.demo.settings import Settings, steps_option, workers_option
from redisacc.tools.demo.skipgram import SPARSE, Sampler, Tree
from redisacc.tools.demo.text import Corpus, build_corpus, read_text


def train(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs a worker, and leads if no other does. After a death, its successor computes the gradient that is missing."""
    start, sampler = skipgram.initial_parameters(corpus, settings), Sampler(corpus, settings)
    optimizer = redisacc.optim.Adagrad(settings.rate, initial_accumulator_value=skipgram.SQUARES)
    # The mean of a row is over the workers whose words include it. Divided by the number of all workers, the rows of
    # rare words, which one worker of several sees, would move less.
    rows = redisacc.types.GradientOptions(sparse=SPARSE, mean=redisacc.Mean(rows="index"))
    first = settings.steps

    def log(step: int, metrics: Mapping[str, float]) -> None:
        show(step + 1, settings.steps, metrics)
        if settings.kill:
            kill_once(step + 1, first, at=settings.steps // 3)

    with redisacc.Training(
        name, start, optimizer=optimizer, workers=settings.workers, accumulator=rows, log=log
    ) as training:
        worker = training.number or 0  # None in a process that only leads
        if worker >= settings.workers:
            raise DemoError(f"{name} has workers 0 to {settings.workers - 1}, and no worker {worker}")
        for step, parameters in training.steps(until=settings.steps):
            first = min(first, step)
            batch = sampler.batch(step, worker)
            loss, gradient = skipgram.loss_and_gradient(parameters, batch)
            if settings.kill and worker == 0:
                kill_once(step, first, at=2 * settings.steps // 3)
            training.apply(gradient, metrics={"loss": loss, "pairs": len(batch.centers)})


def kill_once(step: int, first: int, *, at: int) -> None:
    """Kills this process when it reaches step ``at``, unless that is its first: its successor begins with that step."""
    if first < step == at:
        os.kill(os.getpid(), signal.SIGKILL)


def show(step: int, steps: int, metrics: Mapping[str, float]) -> None:
    """Prints a line after the first step, and after each tenth of them."""
    if step in (1, steps) or step % max(1, steps // 10) == 0:
        print(f"step {step}/{steps}  loss {metrics['loss'] / metrics['pairs']:.3f}", flush=True)


def check_result(name: str, settings: Settings, corpus: Corpus) -> None:
    """Trains in this process alone, and compares the result with what was published last."""
    published = redisacc.Parameters(name, create=False)
    together = published.wait()[1]
    alone = train_alone(settings, corpus)
    losses = [past.metrics["loss"] / past.metrics["pairs"] for past in published.history()]
    judge(losses, largest_difference(together, alone), tolerance_for(settings))


def train_alone(settings: Settings, corpus: Corpus) -> Tree:
    """Trains with the same batches, without Redis. Returns the parameters."""
    sampler = Sampler(corpus, settings)
    parameters = skipgram.initial_parameters(corpus, settings)
    squares = skipgram.initial_squares(parameters)
    for step in range(settings.steps):
        batches = [sampler.batch(step, worker) for worker in range(settings.workers)]
        losses, gradients = zip(*(skipgram.loss_and_gradient(parameters, batch) for batch in batches), strict=True)
        skipgram.update(parameters, squares, average(gradients), settings.rate)
        pairs = sum(len(batch.centers) for batch in batches)
        show(step + 1, settings.steps, {"loss": sum(losses), "pairs": pairs})
    return parameters


def average(found: Sequence[Tree]) -> Tree:
    """Returns the mean of gradients as the accumulator defines it: a row's is over those gradients that held it."""
    mean: Tree = {"position": np.sum([each["position"] for each in found], axis=0) / len(found)}
    for leaf in SPARSE:
        indices = np.concatenate([each[leaf].indices for each in found])
        indices, sums, counts = skipgram.sum_rows(indices, np.concatenate([each[leaf].values for each in found]))
        mean[leaf] = redisacc.IndexedSlices(sums / counts[:, None].astype(sums.dtype), indices)
    return mean


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


def judge(losses: Sequence[float], difference: float, tolerance: float) -> None:
    """Prints the proof, or raises DemoError. ``losses``: for each step, the mean over all pairs of words."""
    tenth = max(1, len(losses) // 10)
    first, last = np.mean(losses[:tenth]), np.mean(losses[-tenth:])
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
@workers_option
@steps_option
def main(*, name: str, workers: int, steps: int) -> None:
    """Be a worker of the run NAME, as the environment says, or else check its result."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # At the end of its block, a process gives its leases back; by default, SIGTERM would end it before that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    settings = Settings(workers, steps)
    try:
        corpus = build_corpus(read_text(), settings.vocabulary)
        (train if redisacc.place().role else check_result)(name, settings, corpus)
    except redisacc.RedisAccError as error:
        raise click.ClickException(printable(str(error))) from None


if __name__ == "__main__":
    main()
