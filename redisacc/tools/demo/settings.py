"""What a run consists of: the options of the demo's programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from redisacc._text import printable
from redisacc.errors import RedisAccError
from redisacc.tools.demo.text import build_corpus, read_text

# Number of consecutive words that stay together in a batch. Longer passages lose fewer pairs at their ends, shorter
# ones mix better.
PASSAGE = 32


def _setting(default: Any, kind: object, text: str) -> Any:
    return field(default=default, metadata={"type": kind, "help": text})


@dataclass(frozen=True)
class Settings:
    """The settings of a run, the same for all of its processes."""

    workers: int = _setting(4, click.IntRange(1, 256), "Number of workers.")
    steps: int = _setting(688, click.IntRange(1, 2**31), "Number of steps.")
    dim: int = _setting(48, click.IntRange(1, 4096), "Length of a word vector.")
    batch: int = _setting(256, click.IntRange(PASSAGE, 2**20), "Words of text per worker and step.")
    vocabulary: int = _setting(3000, click.IntRange(20, 2**22), "Number of words to learn, the most frequent ones.")
    window: int = _setting(4, click.IntRange(1, PASSAGE - 1), "Number of context words on either side of a word.")
    negatives: int = _setting(5, click.IntRange(1, 64), "Number of negative samples per pair.")
    rate: float = _setting(0.15, click.FloatRange(0, 100, min_open=True), "Learning rate of Adagrad.")
    subsampling: float = _setting(1e-3, click.FloatRange(0, 1, min_open=True), "Share above which a word is thinned.")
    seed: int = _setting(1, click.IntRange(0, 2**63 - 1), "Seed of all random numbers.")
    kill: bool = _setting(
        True, click.BOOL, "Kill two processes, first the one that leads, to show that nothing is lost."
    )


def training_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --text and an option for each setting. The function gets ``settings``, and ``corpus`` made of the text."""

    @click.option("--text", multiple=True, type=Path, help="UTF-8 text, instead of Python's language reference.")
    @functools.wraps(function)
    def call(text: tuple[Path, ...], **given: Any) -> None:
        settings = Settings(**{each.name: given.pop(each.name) for each in fields(Settings)})
        if not (settings.rate > 0 and settings.subsampling > 0):  # click takes NaN for inside every range
            raise click.UsageError("--rate and --subsampling must be numbers")
        try:
            function(settings=settings, corpus=build_corpus(read_text(text), settings.vocabulary), text=text, **given)
        except RedisAccError as error:
            raise click.ClickException(printable(str(error))) from None

    for each in reversed(fields(Settings)):
        call = click.option(f"--{each.name}", default=each.default, show_default=True, **each.metadata)(call)
    return call
