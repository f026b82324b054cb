"""The options of the demo's programs, and the settings of its model."""

from __future__ import annotations

from dataclasses import dataclass

import click

# Number of consecutive words that stay together in a batch. Longer passages lose fewer pairs at their ends, shorter
# ones mix better.
PASSAGE = 32


@dataclass(frozen=True)
class Settings:
    """The settings of a run, the same for all of its processes.

    Attributes:
        workers: number of workers.
        steps: number of steps.
        dim: length of a word vector.
        batch: words of text per worker and step.
        vocabulary: number of words to learn, the most frequent ones.
        window: number of context words on either side of a word.
        negatives: number of negative samples per pair.
        rate: learning rate of Adagrad.
        subsampling: share above which a word is thinned.
        seed: seed of all random numbers.
        kill: whether two processes are killed, first the one that leads, to show that nothing is lost.
    """

    workers: int = 4
    steps: int = 688
    dim: int = 48
    batch: int = 256
    vocabulary: int = 3000
    window: int = 4
    negatives: int = 5
    rate: float = 0.15
    subsampling: float = 1e-3
    seed: int = 1
    kill: bool = True


workers_option = click.option(
    "--workers", type=click.IntRange(1, 256), default=Settings.workers, show_default=True, help="Number of workers."
)
steps_option = click.option(
    "--steps", type=click.IntRange(1, 2**31), default=Settings.steps, show_default=True, help="Number of steps."
)
