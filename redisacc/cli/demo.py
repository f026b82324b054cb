"""The command `redisacc demo`: several processes train word vectors together, and one process checks the result."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

import click
import redis
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from redisacc import RedisAccError
from redisacc._text import printable
from redisacc.cli.output import count_text
from redisacc.demo import DemoError
from redisacc.demo.exchange import Settings
from redisacc.demo.processes import LocalWorkers, train_in_one_process
from redisacc.demo.skipgram import PASSAGE, Parameters, Sampler, neighbours
from redisacc.demo.text import Corpus, build_corpus, read_text, tokenise
from redisacc.demo.training import (
    Chief,
    OnStep,
    Trained,
    Verdict,
    initial_parameters,
    judge,
    tolerance_for,
    work,
)
from redisacc.embedded import Server

__all__ = ["demo"]

# Words of the default text whose neighbours a reader can judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# Options that only the chief has; workers read the values from Redis.
_CHIEF_OPTIONS = (
    *("workers", "dim", "epochs", "steps", "seed", "batch", "vocabulary", "window", "negatives", "rate"),
    *("subsampling", "word"),
)


def _check_run(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    # The name becomes part of keys: braces mark the part that a cluster hashes, and keys stay printable.
    if value is not None and not (
        0 < len(value) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in value)
    ):
        raise click.BadParameter("use 1 to 64 letters, digits, '-', '_' or '.'")
    return value


def _check_number(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # click takes it for inside every range
        raise click.BadParameter("not a number")
    return value


@click.command(context_settings={"show_default": True})
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text to train on; may be repeated.  [default: the language reference that comes with Python]",
)
@click.option("--workers", type=click.IntRange(1, 256), default=4, help="Number of worker processes.")
@click.option("--dim", type=click.IntRange(1, 4096), default=48, help="Length of a word vector.")
@click.option("--epochs", type=click.IntRange(1, 100_000), default=16, help="Passes over the text.")
@click.option("--steps", type=click.IntRange(1), help="Stop after this many steps.")
@click.option(
    "--redis",
    "url",
    envvar="REDISACC_URL",
    help="The server.  [default: REDISACC_URL, else a server that runs only for the demo]",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, help="Seed of all random numbers.")
@click.option(
    "--role",
    type=click.Choice(["all", "chief", "worker"]),
    default="all",
    help="Run all processes on this machine, or only one of them.",
)
@click.option("--worker-index", type=click.IntRange(0), help="Number of this worker.  [default: the lowest free one]")
@click.option(
    "--run",
    callback=_check_run,
    help="Name of the run, the same for its chief and workers.  [default: 'demo'; with --role all, a random one]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    callback=_check_number,
    help="Seconds to wait for another process.",
)
@click.option(
    "--batch",
    type=click.IntRange(PASSAGE, 2**20),
    default=256,
    help="Words of text per worker and step.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(20, 2**22),
    default=3000,
    help="Number of words to learn, the most frequent ones.",
)
@click.option(
    "--window", type=click.IntRange(1, PASSAGE - 1), default=4, help="Number of context words on either side of a word."
)
@click.option("--negatives", type=click.IntRange(1, 64), default=5, help="Number of negative samples per pair.")
@click.option(
    "--rate",
    type=click.FloatRange(0, 100, min_open=True),
    default=0.15,
    callback=_check_number,
    help="Learning rate of Adagrad.",
)
@click.option(
    "--subsampling",
    type=click.FloatRange(0, 1, min_open=True),
    default=1e-3,
    callback=_check_number,
    help="Share of the text above which a word is thinned out.",
)
@click.option("--word", "words", multiple=True, help="Word whose neighbours are shown; may be repeated.")
@click.pass_context
def demo(
    context: click.Context,
    *,
    text: tuple[Path, ...],
    workers: int,
    dim: int,
    epochs: int,
    steps: int | None,
    url: str | None,
    seed: int,
    role: str,
    worker_index: int | None,
    run: str | None,
    timeout: float,
    batch: int,
    vocabulary: int,
    window: int,
    negatives: int,
    rate: float,
    subsampling: float,
    words: tuple[str, ...],
) -> None:
    """Train word vectors with several processes, and check the result in one.

    Each worker computes gradients of a skip-gram model on its share of a text and applies them to accumulators in
    Redis. A chief takes the averages and updates the parameters. Afterwards, one process repeats the training alone,
    and the two results must be equal up to rounding.

    The exit code is 0 if they are equal and the loss fell, 1 otherwise, and 130 after Ctrl-C.

    On several machines, run one command with --role chief and the others with --role worker, all with the same --redis
    and --text:

    \b
      redisacc demo --role chief --workers 2 --redis redis://box
      redisacc demo --role worker --redis redis://box
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("redisacc.demo").setLevel(logging.INFO)
    if role == "worker":
        given = [
            option.opts[0]
            for option in context.command.params
            if option.opts[0].removeprefix("--") in _CHIEF_OPTIONS
            and option.name is not None
            and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
        ]
        if given:
            raise click.UsageError(f"give {', '.join(given)} to the chief, which passes them on to the workers")
    elif worker_index is not None:
        raise click.UsageError("--worker-index needs --role worker")
    if role != "all" and not url:
        raise click.UsageError(f"--role {role} needs --redis or REDISACC_URL, the server at which the processes meet")
    run = run or (secrets.token_hex(3) if role == "all" else "demo")
    with _ended_by_signals(), _reporting():
        if role == "worker":
            _run_worker(url or "", run, text, worker_index, timeout)
            return
        corpus = build_corpus(tokenise(read_text(text)), vocabulary)
        shown = _choose_words(words, corpus)
        sampling = {
            "seed": seed,
            "workers": workers,
            "batch": batch,
            "window": window,
            "negatives": negatives,
        }
        # All pairs of a batch share these negatives: enough of them to replace a draw for each pair.
        shared = max(64, 2 * negatives)
        sampler = Sampler(corpus, **sampling, shared_negatives=shared, subsampling=subsampling)
        total = sampler.steps_per_epoch * epochs
        settings = Settings(
            **sampling,
            steps=total if steps is None else min(total, steps),
            words=len(corpus.words),
            vocabulary=vocabulary,
            dim=dim,
            shared_negatives=shared,
            subsampling=subsampling,
            rate=rate,
            digest=corpus.digest,
        )
        verdict = _run_chief(
            settings,
            corpus,
            url=url,
            run=run,
            text=text,
            shown=shown,
            timeout=timeout,
            everything=role == "all",
        )
        for problem in verdict.problems:
            click.echo(f"redisacc demo: {problem}", err=True)
        if verdict.problems:
            raise SystemExit(1)


def _run_worker(url: str, run: str, text: Sequence[Path], index: int | None, timeout: float) -> None:
    log = logging.getLogger("redisacc.demo")

    def started(number: int, settings: Settings) -> None:
        log.info("worker %d of %d in run %s, %d steps", number, settings.workers, run, settings.steps)

    with contextlib.closing(_connect(url)) as client:
        work(
            client,
            run,
            lambda vocabulary: build_corpus(tokenise(read_text(text)), vocabulary),
            index=index,
            timeout=timeout,
            on_start=started,
        )
    log.info("run %s is done", run)


def _run_chief(
    settings: Settings,
    corpus: Corpus,
    *,
    url: str | None,
    run: str,
    text: Sequence[Path],
    shown: Sequence[int],
    timeout: float,
    everything: bool,
) -> Verdict:
    display = _Display(Console(highlight=False, soft_wrap=False))
    display.say(
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} of them different.\n"
        f"Training: {settings.steps:,} steps, {count_text(settings.workers, 'worker')}, {settings.batch} words each."
    )
    with contextlib.ExitStack() as stack:
        if not url:
            url = stack.enter_context(Server()).url
        client = stack.enter_context(contextlib.closing(_connect(url)))
        # The workers end before the chief deletes its keys, or one of them might create a key again.
        local: LocalWorkers | None = None

        def problems() -> list[str]:
            return local.problems() if local is not None else []

        chief = stack.enter_context(Chief(client, run, settings, timeout=timeout, local_problems=problems))
        display.say(f"Run {run} on {_without_password(url)}. Inspect it while it runs:")
        for reference in chief.references:
            display.say(f"  {_redis_cli(url)} HGETALL '{reference}'", wrap=False)
        if everything:
            local = stack.enter_context(LocalWorkers(settings.workers, url=url, run=run, text=text, timeout=timeout))
        display.neighbours("Neighbours before training", initial_parameters(settings), corpus, shown)
        chief.wait_for_workers()
        with display.progress(count_text(settings.workers, "worker"), settings.steps) as on_step:
            together = chief.train(on_step)
        if local is not None:
            # They have reported, and only their Python processes still have to end.
            local.wait(10.0)
    display.neighbours("Neighbours after training", together.parameters, corpus, shown)
    with display.progress("one process", settings.steps) as on_step:
        alone = train_in_one_process(settings, corpus, on_step)
    return _conclude(display, together, alone, tolerance_for(settings))


def _conclude(display: _Display, together: Trained, alone: Trained, tolerance: float) -> Verdict:
    verdict = judge(together, alone, tolerance)
    display.say(f"Loss per pair of words: {verdict.first_loss:.4f} at the start, {verdict.last_loss:.4f} at the end.")
    display.say(
        f"Largest difference of a parameter between the two results: {verdict.difference:.2e}\n"
        f"(at most {tolerance:.1e} counts as rounding)."
    )
    if not verdict.problems:
        display.say("The results agree, and the loss fell.")
    return verdict


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


class _Display:
    """What the chief prints: a live bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str, *, wrap: bool = True) -> None:
        # A command for the reader to copy stays on one line.
        self._console.print(text, markup=False, soft_wrap=not wrap)

    def neighbours(self, title: str, parameters: Parameters, corpus: Corpus, shown: Sequence[int]) -> None:
        self.say(f"\n{title}:")
        width = max(len(corpus.words[word]) for word in shown)
        for word in shown:
            found = ", ".join(corpus.words[other] for other, _ in neighbours(parameters, word, 5))
            line = f"  {corpus.words[word]:{width}}  {found}"
            self._console.print(line, markup=False, no_wrap=True, overflow="ellipsis", crop=True)
        self.say("")

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[OnStep]:
        """Yields the function to call after each step."""
        started = time.monotonic()
        counted = 0

        def describe(step: int, loss: float) -> tuple[str, str]:
            rate = counted / max(time.monotonic() - started, 1e-9)
            return f"step {step}/{total}  loss {loss:.3f}", f"{rate:,.0f} gradients/s"

        if not self._console.is_terminal:
            printed = started

            def plain(step: int, loss: float, gradients: int) -> None:
                nonlocal counted, printed
                counted += gradients
                now = time.monotonic()
                if step in (1, total) or now - printed >= 5.0:
                    printed = now
                    self.say(f"{title}: {'  '.join(describe(step, loss))}")

            yield plain
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self._console, expand=True) as bar:
            task = bar.add_task(title, total=total, state="", speed="")

            def live(step: int, loss: float, gradients: int) -> None:
                nonlocal counted
                counted += gradients
                state, speed = describe(step, loss)
                bar.update(task, completed=step, state=state, speed=speed)

            yield live


def _connect(url: str) -> redis.Redis:
    try:
        client: redis.Redis = redis.Redis.from_url(url)
        # For an unknown option in the URL, redis-py raises a TypeError at its first use.
        client.ping()
    except (ValueError, TypeError) as error:
        raise DemoError(f"--redis: {printable(str(error))}") from None
    except redis.RedisError as error:
        client.close()
        raise DemoError(
            f"cannot use the server at {_without_password(url)}: {printable(str(error))}; `redisacc server` starts a "
            "server, and without --redis and REDISACC_URL the demo starts its own"
        ) from None
    return client


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _redis_cli(url: str) -> str:
    """Returns the redis-cli command for a server, without its password."""
    parts = urlsplit(url)
    database = parse_qs(parts.query).get("db", [""])[-1]
    words = ["redis-cli"]
    if parts.scheme == "unix":
        words += ["-s", unquote(parts.path)]
    else:
        if parts.hostname not in (None, "localhost", "127.0.0.1"):
            words += ["-h", parts.hostname or ""]
        words += ["-p", str(parts.port or 6379)]
        if parts.scheme == "rediss":
            words.append("--tls")
        database = database or parts.path.strip("/")
    if database not in ("", "0"):
        words += ["-n", database]
    if parts.username:
        words += ["--user", unquote(parts.username)]
    if parts.password:
        words.append("--askpass")
    return shlex.join(words)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the demo as Ctrl-C does, with its keys deleted."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Turns expected errors into one line and exit code 1, and Ctrl-C into exit code 130."""
    try:
        yield
    except (DemoError, RedisAccError) as error:
        click.echo(f"redisacc demo: {printable(str(error))}", err=True)
        raise SystemExit(1) from None
    except redis.RedisError as error:
        # Alone, a text such as "Connection closed by server." does not say what failed.
        click.echo(f"redisacc demo: the server failed: {printable(str(error))}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        click.echo("redisacc demo: stopped", err=True)
        raise SystemExit(128 + signal.SIGINT) from None
