"""The program that the demo's processes run: the chief, the workers, and one process that trains alone.

    redisacc run --workers 2 -- python -m redisacc.demo.training NAME

`redisacc demo` starts it like that, after it has published the settings of the training called NAME. In each step, each
worker computes the gradient of its own batch, and the chief updates the parameters by the mean of all gradients. So one
process that computes all batches of a step itself gets the same parameters, up to rounding.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import redisacc
from redisacc.demo import DemoError
from redisacc.demo.settings import Settings
from redisacc.demo.skipgram import (
    SPARSE,
    Array,
    Sampler,
    Tree,
    gradients,
    initial_parameters,
    initial_squares,
    sum_rows,
    update,
)
from redisacc.demo.text import Corpus, build_corpus, read_text, tokenise


def lead(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs the chief. Started again after a death, it continues with the parameters and the state of its last step."""
    parameters = initial_parameters(corpus, settings)
    state = {"squares": initial_squares(parameters), "losses": np.zeros(settings.steps)}
    # The mean of a row is over the workers whose words include it. Divided by the number of all workers, the rows of
    # rare words, which one worker of several sees, would move less.
    with redisacc.Chief(
        name, parameters, workers=settings.workers, state=state, sparse=SPARSE, sparse_mean="index"
    ) as chief:
        progress = Progress(settings.steps, chief.step)
        for taken in chief.rounds(until=settings.steps):
            if settings.kill:
                kill_once(taken.global_step, progress.first, at=settings.steps // 3)
            gradient, parameters, state = taken.gradient, chief.parameters, chief.state
            update(parameters, state["squares"], gradient, settings.rate)
            state["losses"][taken.global_step] = gradient["loss"][0] / gradient["loss"][1]
            # Only the rows that have moved are sent to the workers.
            chief.publish(parameters, changed={leaf: gradient[leaf].indices for leaf in SPARSE}, state=state)
            progress.show(chief.step, state["losses"][taken.global_step])


def work(name: str, settings: Settings, corpus: Corpus) -> None:
    """Runs a worker. Started again after a death, it computes the gradient that is missing."""
    sampler = Sampler(corpus, settings)
    with redisacc.Worker(name) as worker:
        if worker.number >= settings.workers:
            raise DemoError(f"there is no worker {worker.number} in {name}, which has workers 0 to {settings.workers - 1}")
        first = None
        for step, parameters in worker.steps():
            first = step if first is None else first
            gradient = gradients(parameters, sampler.batch(step, worker.number))
            if settings.kill and worker.number == 0:
                kill_once(step, first, at=2 * settings.steps // 3)
            worker.apply(gradient)


def kill_once(step: int, first: int, *, at: int) -> None:
    """Kills this process when it reaches step ``at``, unless that is its first: its successor begins with that step."""
    if first < step == at:
        os.kill(os.getpid(), signal.SIGKILL)


def train_alone(name: str, settings: Settings, corpus: Corpus) -> None:
    """Trains with the same batches in this process alone, and publishes the result as NAME/alone."""
    sampler = Sampler(corpus, settings)
    parameters = initial_parameters(corpus, settings)
    squares = initial_squares(parameters)
    progress = Progress(settings.steps)
    for step in range(settings.steps):
        found = [gradients(parameters, sampler.batch(step, worker)) for worker in range(settings.workers)]
        mean = average(found)
        update(parameters, squares, mean, settings.rate)
        progress.show(step + 1, mean["loss"][0] / mean["loss"][1])
    redisacc.Parameters(f"{name}/alone").publish(parameters, settings.steps)


def average(found: Sequence[Tree]) -> Tree:
    """Returns the mean of gradients as the accumulator defines it, a row's over those gradients that held it."""
    mean: Tree = {}
    for leaf in found[0]:
        leaves = [gradient[leaf] for gradient in found]
        if leaf in SPARSE:
            indices, rows = (np.concatenate([getattr(each, part) for each in leaves]) for part in ("indices", "values"))
            indices, sums, counts = sum_rows(indices, rows)
            mean[leaf] = redisacc.IndexedSlices(sums / counts[:, None].astype(sums.dtype), indices)
        else:
            mean[leaf] = np.sum(leaves, axis=0) / len(leaves)
    return mean


class Progress:
    """Prints a line after the first and the last step, and every 5 seconds in between."""

    def __init__(self, steps: int, first: int = 0) -> None:
        self.first = first
        self._steps = steps
        self._started = time.monotonic()
        self._printed = 0.0

    def show(self, step: int, loss: float) -> None:
        """Says how far it is after ``step`` steps."""
        now = time.monotonic()
        if step in (self.first + 1, self._steps) or now - self._printed >= 5:
            self._printed = now
            speed = (step - self.first) / (now - self._started)
            print(f"step {step}/{self._steps}  loss {loss:.3f}  {speed:.0f} steps/s", flush=True)


def publish_settings(name: str, settings: Settings, corpus: Corpus, url: str) -> None:
    """Publishes the settings of a training, for all of its processes. Publishing the same ones again does nothing.

    Raises:
        DemoError: others are published under this name.
    """
    with redisacc.Parameters(f"{name}/settings", redis=url) as published:
        try:
            published.publish(asdict(settings) | {"digest": np.frombuffer(corpus.digest, np.uint8)}, step=0)
        except (redisacc.StepConflictError, redisacc.SchemaMismatchError) as error:
            raise DemoError(
                f"there is another training under this name. Choose another --name, or give the options and the text "
                f"of that training, to continue it: {error}"
            ) from None


def read_settings(name: str, text: Sequence[Path]) -> tuple[Settings, Corpus]:
    """Blocks until settings are published. Returns them, and the corpus of this process's own text.

    Raises:
        DemoError: they are invalid, or this process has another text.
    """
    with redisacc.Parameters(f"{name}/settings") as published:
        _, tree = published.wait()
    try:
        values = {key: value.item() for key, value in tree.items() if key != "digest"}
        settings, digest = Settings(**values), tree["digest"].tobytes()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DemoError(f"the settings of {name} in Redis are invalid: {error}") from None
    corpus = build_corpus(tokenise(read_text(text)), settings.vocabulary)
    if corpus.digest != digest:
        raise DemoError(
            f"this process has another text than the one that started the training ({len(corpus.tokens)} words, SHA-256 "
            f"{corpus.digest.hex()[:12]} instead of {digest.hex()[:12]}): give both the same --text, or the same "
            "version of Python"
        )
    return settings, corpus


def largest_difference(ours: Tree, theirs: Tree) -> float:
    """Returns the largest absolute difference of a parameter; NaN if anything is NaN, or infinite in both."""

    def difference(one: Array, other: Array) -> float:
        with np.errstate(invalid="ignore"):  # two infinities are NaN apart, and NaN agrees with nothing
            return float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))

    # In numpy's max, unlike Python's, a NaN wins over every number.
    return float(np.max([difference(ours[leaf], theirs[leaf]) for leaf in (*SPARSE, "position")]))


def tolerance_for(settings: Settings) -> float:
    """Returns the largest difference of a parameter between two equal trainings that counts as rounding.

    Both add the same numbers, but float32 addition rounds, and through Redis the gradients arrive in another order each
    time. Each step then builds on slightly different parameters. Measured with the defaults (688 steps, rate 0.15,
    parameters up to 3 in size): trainings that differ only in the order of addition end 1e-5 to 2e-5 apart, while one
    gradient of one worker that is lost in the first, the middle or the last step moves a parameter by 8e-2 or more
    (with 8 workers: 6e-2). The bound, 1e-3 there, is a factor of 50 or more from both. It is proportional to the rate,
    as every change of a parameter is, and in longer trainings to the steps, over which rounding adds up (2,000 steps:
    5e-5).
    """
    return settings.rate / 150 * max(1.0, settings.steps / 1000)


def main() -> None:
    """Runs the process that the environment says: the chief, a worker, or else the one that trains alone."""
    parser = argparse.ArgumentParser(prog="python -m redisacc.demo.training", description="A process of the demo.")
    parser.add_argument("name", help="name of the training")
    parser.add_argument("--text", action="append", type=Path, default=[], help="as for `redisacc demo`")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # At the end of a block, a chief or worker gives its lease back; by default, SIGTERM would end it before that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    roles = {"chief": lead, "worker": work}
    try:
        settings, corpus = read_settings(given.name, given.text)
        roles.get(os.environ.get("REDISACC_ROLE", ""), train_alone)(given.name, settings, corpus)
    except redisacc.RedisAccError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
