"""The command `redisacc demo`: several processes train word vectors together, and one process checks the result."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import redisacc
from redisacc._format.keys import Keys
from redisacc._handles.base import host_and_process
from redisacc._handles.environment import Place
from redisacc._handles.existing import open_existing
from redisacc._launch.run import Run, places
from redisacc._protocol.crew import Crew
from redisacc.cli.failures import fail, report_failures
from redisacc.cli.options import transport_of
from redisacc.cli.output import count_text
from redisacc.cli.own_server import interrupted_by_signals, own_server, problem_of
from redisacc.demo import DemoError
from redisacc.demo.settings import Settings
from redisacc.demo.skipgram import Array, Sampler, initial_parameters, neighbours
from redisacc.demo.text import Corpus, build_corpus, read_text, tokenise
from redisacc.demo.training import largest_difference, publish_settings, tolerance_for
from redisacc.embedded import Server

__all__ = ["demo"]

# Words of the default text whose neighbours a reader can judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# The matrices are small: threads of a linear algebra library take longer to start than to multiply.
_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"} | {f"{library}_NUM_THREADS": "1" for library in _LIBRARIES}


def _setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds an option for each setting that has a help text."""
    for each in reversed(fields(Settings)):
        if each.metadata["help"]:
            name = f"--{each.name}/--no-{each.name}" if each.type == "bool" else f"--{each.name}"
            function = click.option(name, default=each.default, help=each.metadata["help"])(function)
    return function


@click.command(context_settings={"show_default": True})
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text to train on; may be repeated.  [default: the language reference that comes with Python]",
)
@click.option("--epochs", type=click.IntRange(1, 100_000), default=16, help="Passes over the text.")
@click.option("--steps", "most_steps", type=click.IntRange(1), help="Stop after this many steps.")
@_setting_options
@click.option("--word", "words", multiple=True, help="Word whose neighbours are shown; may be repeated.")
@click.option(
    "--redis",
    "url",
    envvar="REDISACC_URL",
    metavar="URL",
    help="The server.  [default: REDISACC_URL, else one that runs only for the demo]",
)
@click.option("--name", help="Name of the training.  [default: a random one; with --here, 'demo']")
@click.option("--here", type=click.IntRange(0), metavar="N", help="Number of workers on this machine.  [default: all]")
@report_failures
def demo(
    *,
    text: tuple[Path, ...],
    epochs: int,
    most_steps: int | None,
    words: tuple[str, ...],
    url: str | None,
    name: str | None,
    here: int | None,
    **options: Any,
) -> None:
    """Train word vectors with several processes, and check the result in one.

    Each worker computes gradients of a skip-gram model on its share of a text, and a chief updates the parameters by
    their mean. In the middle, the chief and a worker are killed, and started again. Afterwards, one process repeats the
    training alone, and the two results must be equal up to rounding.

    The exit code is 0 if they are equal and the loss fell, 1 otherwise, and 128 + N after signal N, so 130 for Ctrl-C.

    The program that all processes run is redisacc.demo.training. Other machines may run some of the workers:

    \b
    redisacc demo --here 2 --redis redis://box
    redisacc run --no-chief --first-worker 2 --workers 2 \\
      --redis redis://box -- python -m redisacc.demo.training demo
    """
    try:
        settings = Settings(**options)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None
    here = settings.workers if here is None else here
    if here > settings.workers:
        raise click.UsageError(f"--here {here} is more than all of the {count_text(settings.workers, 'worker')}")
    if here < settings.workers and not url:
        raise click.UsageError("--here needs --redis or REDISACC_URL, the server at which the processes meet")
    corpus = build_corpus(tokenise(read_text(text)), settings.vocabulary)
    steps = Sampler(corpus, settings).steps_per_epoch * epochs
    settings = replace(settings, steps=min(steps, most_steps or steps))
    shown_words = _choose_words(words, corpus)
    click.echo(
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} of them different.\n"
        f"Training: {settings.steps:,} steps, {count_text(settings.workers, 'worker')}, {settings.batch} words each."
    )
    _print_neighbours("before", initial_parameters(corpus, settings)["input"], corpus, shown_words)
    name = name or (f"demo-{secrets.token_hex(3)}" if here == settings.workers else "demo")
    members = places(chief=True, workers=here, first_worker=0, total_workers=settings.workers)
    program = [sys.executable, "-m", "redisacc.demo.training", name, *(f"--text={file}" for file in text)]
    with interrupted_by_signals(), contextlib.nullcontext() if url else own_server() as server:
        url = url or server.url
        with _training(name, settings, corpus, url, members[0]):
            # A server of our own has no password that this could show.
            where = f" --redis {url}" if server else ""
            click.echo(f"To look inside while it runs:\n  redisacc watch {name}{where}\n")
            _run(members, program, url, server)
            together, state = _result(name, url)
            _print_neighbours("after", together["input"], corpus, shown_words)
            click.echo("The same training in one process:")
            _run([Place()], program, url, server)
            alone, _ = _result(f"{name}/alone", url)
    _judge(state["losses"], largest_difference(together, alone), tolerance_for(settings))


@contextlib.contextmanager
def _training(name: str, settings: Settings, corpus: Corpus, url: str, chief: Place) -> Iterator[None]:
    """Publishes the settings of a training, and deletes everything of it in the end.

    A training that was killed together with this command stays, and is continued by the same command.
    """
    transport = transport_of(url)
    # Two commands with one name would delete each other's training. The chief has the same id, so it gets the lease.
    Crew(transport, name, holder=chief.run_id or "", who=host_and_process(os.getpid())).wait_for("chief")
    publish_settings(name, settings, corpus, url)
    try:
        yield
    finally:
        # The error to report is why the training ended, and not why nothing could be deleted.
        with contextlib.suppress(redisacc.ServerUnavailableError):
            transport.call("PING", timeout=2)
            with contextlib.suppress(redisacc.AccumulatorNotFoundError):
                open_existing(Keys(name), redis=url).delete()
            for each in (name, f"{name}/alone", f"{name}/settings"):
                with contextlib.suppress(redisacc.ParametersNotFoundError):
                    redisacc.Parameters(each, redis=url, create=False).delete()


def _run(members: Sequence[Place], program: Sequence[str], url: str, server: Server | None) -> None:
    """Runs processes until the chief has finished. Ends the command if they fail."""
    environment = _ENVIRONMENT | os.environ | {"REDISACC_URL": url}
    code = Run(members, program, environment, restarts=5, grace=10, problem=lambda: problem_of(server)).wait()
    if code:
        raise SystemExit(code)


def _result(name: str, url: str) -> tuple[Any, Any]:
    """Returns the parameters that were published last, and the state."""
    with redisacc.Parameters(name, redis=url, create=False) as published:
        latest, state = published.latest(), published.latest_state()
    assert latest is not None
    return latest[1], None if state is None else state[1]


def _judge(losses: Array, difference: float, tolerance: float) -> None:
    """Prints the proof. Ends the command with exit code 1 if it fails."""
    tenth = max(1, len(losses) // 10)
    first, last = losses[:tenth].mean(), losses[-tenth:].mean()
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
    number = {word: place for place, word in enumerate(corpus.words)}
    unknown = [word for word in wanted if word.lower() not in number]
    if unknown:
        raise DemoError(f"--word: not in the vocabulary of this text: {', '.join(unknown)}")
    if wanted:
        return [number[word.lower()] for word in wanted]
    known = [number[word] for word in _WORDS if word in number]
    # In another text, words of medium frequency: neither "the" and "of" nor rare ones.
    start = min(100, len(corpus.words) // 4)
    return known if len(known) >= 3 else list(range(start, min(start + 6, len(corpus.words))))


def _print_neighbours(when: str, vectors: Array, corpus: Corpus, words: Sequence[int]) -> None:
    click.echo(f"\nNeighbours {when} training:")
    width = max(len(corpus.words[word]) for word in words)
    columns = shutil.get_terminal_size().columns
    for word in words:
        found = ", ".join(corpus.words[other] for other, _ in neighbours(vectors, word, 5))
        line = f"  {corpus.words[word]:{width}}  {found}"
        click.echo(line if len(line) <= columns else f"{line[: columns - 1]}…")
    click.echo()
