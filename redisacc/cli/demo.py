"""The command `redisacc demo`: several processes train word vectors together, and one process checks the result."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

import redisacc
from redisacc._format.keys import Keys
from redisacc._handles.environment import Place
from redisacc._handles.existing import open_existing
from redisacc._launch.run import Run, places
from redisacc.cli.failures import fail, report_failures
from redisacc.cli.options import transport_of
from redisacc.cli.output import count_text
from redisacc.cli.own_server import interrupted_by_signals, own_server, problem_of
from redisacc.demo import DemoError
from redisacc.demo.settings import Settings, training_options
from redisacc.demo.skipgram import SPARSE, Array, Sampler, Tree, initial_parameters, neighbours
from redisacc.demo.text import Corpus

__all__ = ["demo"]

# Words of the default text whose neighbours a reader can judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# The matrices are small: threads of a linear algebra library take longer to start than to multiply.
_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"} | {f"{library}_NUM_THREADS": "1" for library in _LIBRARIES}


@click.command()
@training_options
@click.option("--word", "words", multiple=True, help="Word whose neighbours are shown; may be repeated.")
@click.option(
    "--redis",
    "url",
    envvar="REDISACC_URL",
    help="URL of the server.  [default: REDISACC_URL, else a server that runs only for the demo]",
)
@report_failures
def demo(settings: Settings, corpus: Corpus, text: tuple[Path, ...], words: tuple[str, ...], url: str | None) -> None:
    """Train word vectors with several processes, and check the result in one.

    Each worker computes gradients of a skip-gram model on its share of a text, and a chief updates the parameters by
    their mean. In the middle, the chief and a worker are killed and started again. Afterwards, one process repeats the
    training alone, and the two results must be equal up to rounding.

    The exit code is 0 if they are equal and the loss fell, 1 otherwise, and 128 + N after signal N, so 130 for Ctrl-C.

    The program of all processes runs on several machines, too:

    \b
    redisacc run --workers 2 --total-workers 4 -- \\
      python -m redisacc.demo.training
    redisacc run --no-chief --workers 2 --first-worker 2 --total-workers 4 -- \\
      python -m redisacc.demo.training
    """
    shown, steps = _choose_words(words, corpus), Sampler(corpus, settings).steps
    click.echo(
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} of them different.\n"
        f"Training: {steps:,} steps, {count_text(settings.workers, 'worker')}, {settings.batch} words each."
    )
    _print_neighbours("before", initial_parameters(corpus, settings)["input"], corpus, shown)
    name = f"demo-{secrets.token_hex(3)}"
    program = [sys.executable, "-m", "redisacc.demo.training", name, *(f"--text={file}" for file in text)]
    program += [f"--{option}={value}" for option, value in asdict(settings).items()]
    with interrupted_by_signals(), contextlib.nullcontext() if url else own_server() as server:
        address = server.url if server else str(url)

        def run(members: Sequence[Place]) -> None:
            environment = _ENVIRONMENT | os.environ | {"REDISACC_URL": address}
            started = Run(members, program, environment, restarts=5, grace=10, problem=lambda: problem_of(server))
            if code := started.wait():
                raise SystemExit(code)

        with _deleted_at_the_end(name, address):
            # The URL of a server of our own has no password that this could show.
            click.echo(f"Look inside: redisacc watch {name}{f' --redis {address}' if server else ''}\n")
            run(places(chief=True, workers=settings.workers, first_worker=0, total_workers=settings.workers))
            together, state = _published(name, address)
            _print_neighbours("after", together["input"], corpus, shown)
            click.echo("The same training in one process:")
            run([Place()])
            alone, _ = _published(f"{name}/alone", address)
    _judge(state["losses"], largest_difference(together, alone), tolerance_for(settings, steps))


@contextlib.contextmanager
def _deleted_at_the_end(name: str, url: str) -> Iterator[None]:
    transport = transport_of(url)
    try:
        yield
    finally:
        # The error to report is why the training ended, and not why nothing could be deleted.
        with contextlib.suppress(redisacc.ServerUnavailableError):
            transport.call("PING", timeout=2)
            with contextlib.suppress(redisacc.AccumulatorNotFoundError):
                open_existing(Keys(name), redis=url).delete()
            for each in (name, f"{name}/alone"):
                with contextlib.suppress(redisacc.ParametersNotFoundError):
                    redisacc.Parameters(each, redis=url, create=False).delete()


def _published(name: str, url: str) -> tuple[Any, Any]:
    """Returns parameters and state."""
    with redisacc.Parameters(name, redis=url, create=False) as published:
        latest, state = published.latest(), published.latest_state()
    assert latest is not None
    return latest[1], None if state is None else state[1]


def largest_difference(ours: Tree, theirs: Tree) -> float:
    """Returns the largest absolute difference of a parameter; NaN if one is NaN, or infinite in both."""
    with np.errstate(invalid="ignore"):  # two infinities are NaN apart
        pairs = [(ours[leaf].astype(np.float64), theirs[leaf]) for leaf in (*SPARSE, "position")]
        # In numpy's max, unlike Python's, a NaN wins over every number.
        return float(np.max([np.abs(one - other).max() for one, other in pairs]))


def tolerance_for(settings: Settings, steps: int) -> float:
    """Returns the largest difference of a parameter between two equal trainings that counts as rounding.

    float32 addition rounds, and through Redis the gradients arrive in another order each time. Each step then builds on
    slightly different parameters. Measured with the defaults (688 steps, parameters up to 3 in size): trainings that
    differ only in the order of addition end 1e-5 to 2e-5 apart, while one gradient of one worker that is lost in the
    first, the middle or the last step moves a parameter by 8e-2 or more (with 8 workers: 6e-2). The bound, 1e-3 there,
    is a factor of 50 or more from both. It is proportional to the rate, as every change of a parameter is, and in
    longer trainings to the steps, over which rounding adds up (2,000 steps: 5e-5).
    """
    return settings.rate / 150 * max(1.0, steps / 1000)


def _judge(losses: Array, difference: float, tolerance: float) -> None:
    """Prints the proof. Ends the command with exit code 1 if it fails. ``losses``: [steps, 2], sum and number."""
    tenth = max(1, len(losses) // 10)
    first, last = ((part[:, 0] / part[:, 1]).mean() for part in (losses[:tenth], losses[-tenth:]))
    click.echo(
        f"\nLoss per pair of words: {first:.4f} at the start, {last:.4f} at the end.\n"
        f"Largest difference of a parameter between the two results: {difference:.2e}\n"
        f"(at most {tolerance:.1e} counts as rounding)."
    )
    # "not <=", because NaN is a failure too.
    if not difference <= tolerance:
        fail(f"the two results differ by {difference:.2e}, more than {tolerance:.1e}")
    if not last < first:
        fail(f"the loss did not fall: {first:.4f} at the start, {last:.4f} at the end")
    click.echo("The results agree, and the loss fell.")


def _choose_words(wanted: Sequence[str], corpus: Corpus) -> list[int]:
    unknown = [word for word in wanted if word.lower() not in corpus.words]
    if unknown:
        raise DemoError(f"--word: not in the vocabulary of this text: {', '.join(unknown)}")
    known = [corpus.words.index(word.lower()) for word in wanted or _WORDS if word.lower() in corpus.words]
    # In another text, words of medium frequency: neither "the" and "of" nor rare ones.
    start = min(100, len(corpus.words) // 4)
    return known if wanted or len(known) >= 3 else list(range(start, min(start + 6, len(corpus.words))))


def _print_neighbours(when: str, vectors: Array, corpus: Corpus, words: Sequence[int]) -> None:
    click.echo(f"\nNeighbours {when} training:")
    width = max(len(corpus.words[word]) for word in words)
    columns = shutil.get_terminal_size().columns
    for word in words:
        found = ", ".join(corpus.words[other] for other in neighbours(vectors, word, 5))
        line = f"  {corpus.words[word]:{width}}  {found}"
        click.echo(line if len(line) <= columns else f"{line[: columns - 1]}…")
    click.echo()
