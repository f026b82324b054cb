"""`redisacc demo`: several processes train word vectors together, and one process checks the result."""

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

# Words of the default text whose neighbours are easy to judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# Options that are the chief's to decide; a worker learns them from it.
_CHIEFS = (
    *("workers", "dim", "epochs", "steps", "seed", "batch", "vocabulary", "window", "negatives", "rate"),
    *("subsampling", "word"),
)


def _check_run(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    # The name becomes part of keys: no braces, which mark the part that a cluster hashes, and nothing
    # unprintable.
    if value is not None and not (
        0 < len(value) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in value)
    ):
        raise click.BadParameter("letters, digits, '-', '_' and '.', at most 64 of them")
    return value


def _check_number(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # outside of every range, but click finds it inside
        raise click.BadParameter("not a number")
    return value


@click.command(context_settings={"show_default": True})
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Train on this UTF-8 text; may be given several times.  [default: the language reference that comes "
    "with Python]",
)
@click.option("--workers", type=click.IntRange(1, 256), default=4, help="Worker processes.")
@click.option("--dim", type=click.IntRange(1, 4096), default=48, help="Length of a word vector.")
@click.option("--epochs", type=click.IntRange(1, 100_000), default=16, help="Passes over the text.")
@click.option("--steps", type=click.IntRange(1), help="Stop after this many steps.")
@click.option(
    "--redis",
    "url",
    envvar="REDISACC_URL",
    help="URL of the server.  [env: REDISACC_URL; default: a server that lives as long as the demo]",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, help="What all chance follows from.")
@click.option(
    "--role",
    type=click.Choice(["all", "chief", "worker"]),
    default="all",
    help="Be one process of a demo on several machines, or start all of them here.",
)
@click.option(
    "--worker-index", type=click.IntRange(0), help="This worker's number.  [default: the lowest that is free]"
)
@click.option(
    "--run",
    callback=_check_run,
    help="Name under which chief and workers meet.  [default: 'demo'; a fresh one with --role all]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    callback=_check_number,
    help="Seconds to wait for another process before giving up.",
)
@click.option(
    "--batch",
    type=click.IntRange(PASSAGE, 2**20),
    default=256,
    help="Words of text for each worker and step.",
)
@click.option("--vocabulary", type=click.IntRange(20, 2**22), default=3000, help="Use the most frequent words.")
@click.option("--window", type=click.IntRange(1, PASSAGE - 1), default=4, help="Reach to either side of a word.")
@click.option("--negatives", type=click.IntRange(1, 64), default=5, help="Random words against each pair.")
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
    help="Thin out words that make up more than about this share of the text.",
)
@click.option("--word", "words", multiple=True, help="Show this word's neighbours; may be given several times.")
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

    Worker processes compute gradients of a skip-gram model on their shares of a text and apply them to
    accumulators in Redis; a chief takes the averages and updates the parameters. At the end the same training
    runs in one process, and the two results must agree to rounding.

    The exit status is 0 if they do and the loss fell, 1 otherwise, and 130 after Ctrl-C.

    On several machines: one with --role chief, the others with --role worker, all with the same --redis and
    --text.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("redisacc.demo").setLevel(logging.INFO)
    if role == "worker":
        given = [
            option.opts[0]
            for option in context.command.params
            if option.opts[0].removeprefix("--") in _CHIEFS
            and option.name is not None
            and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
        ]
        if given:
            raise click.UsageError(f"give {', '.join(given)} to the chief; a worker learns it from there")
    elif worker_index is not None:
        raise click.UsageError("--worker-index is for --role worker")
    if role != "all" and not url:
        raise click.UsageError(f"--role {role} needs --redis, or REDISACC_URL: where do the processes meet?")
    run = run or (f"{secrets.token_hex(3)}" if role == "all" else "demo")
    with _signals(), _reported():
        if role == "worker":
            _be_worker(url or "", run, text, worker_index, timeout)
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
        # The negatives that all pairs of a batch share: enough that they stand in for drawing some for each
        # pair.
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
        verdict = _be_chief(
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


def _be_worker(url: str, run: str, text: Sequence[Path], index: int | None, timeout: float) -> None:
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


def _be_chief(
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
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} different ones.\n"
        f"Training: {settings.steps:,} steps of {settings.workers} workers with {settings.batch} words each."
    )
    with contextlib.ExitStack() as stack:
        if not url:
            url = stack.enter_context(Server()).url
        client = stack.enter_context(contextlib.closing(_connect(url)))
        # The workers go before the chief's keys, or one of them might put a key back.
        local: LocalWorkers | None = None

        def problems() -> list[str]:
            return local.problems() if local is not None else []

        chief = stack.enter_context(Chief(client, run, settings, timeout=timeout, local_problems=problems))
        display.say(f"Run {run} on {_without_password(url)}. While it runs, look into it with")
        for reference in chief.references:
            display.say(f"  {_redis_cli(url)} HGETALL '{reference}'", wrap=False)
        if everything:
            local = stack.enter_context(LocalWorkers(settings.workers, url=url, run=run, text=text, timeout=timeout))
        display.neighbours("Neighbours before training", initial_parameters(settings), corpus, shown)
        chief.wait_for_workers()
        with display.progress(f"{settings.workers} workers", settings.steps) as on_step:
            together = chief.train(on_step)
        if local is not None:
            # They have reported; what is left of them is the end of a Python process.
            local.wait(10.0)
    display.neighbours("Neighbours after training", together.parameters, corpus, shown)
    with display.progress("one process", settings.steps) as on_step:
        alone = train_in_one_process(settings, corpus, on_step)
    return _conclude(display, together, alone, tolerance_for(settings))


def _conclude(display: _Display, together: Trained, alone: Trained, tolerance: float) -> Verdict:
    verdict = judge(together, alone, tolerance)
    display.say(f"Loss of a pair of words: {verdict.first_loss:.4f} at first, {verdict.last_loss:.4f} at last.")
    display.say(
        f"Largest difference of a parameter between the two results: {verdict.difference:.2e}\n"
        f"(up to {tolerance:.1e} counts as rounding)."
    )
    if not verdict.problems:
        display.say("The results agree, and the loss fell.")
    return verdict


def _choose_words(wanted: Sequence[str], corpus: Corpus) -> list[int]:
    number = {word: place for place, word in enumerate(corpus.words)}
    unknown = [word for word in wanted if word.lower() not in number]
    if unknown:
        raise DemoError(f"not in the vocabulary of this text: {', '.join(unknown)}")
    if wanted:
        return [number[word.lower()] for word in wanted]
    known = [number[word] for word in _WORDS if word in number]
    # In another text: words that are neither "the" and "of" nor rare.
    start = min(100, len(corpus.words) // 4)
    return known if len(known) >= 3 else list(range(start, min(start + 6, len(corpus.words))))


class _Display:
    """What the chief prints: a live bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str, *, wrap: bool = True) -> None:
        # A command that is to be copied must not be broken into lines.
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
        """Yields what is to be called after each step."""
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
        # Already for an unknown option in the URL, redis-py has a TypeError at its first use.
        client.ping()
    except (ValueError, TypeError) as error:
        raise DemoError(f"--redis: {error}") from None
    except redis.RedisError as error:
        client.close()
        raise DemoError(
            f"can't use the server at {_without_password(url)}: {error}; `redisacc server` starts one, and "
            "without --redis the demo has its own"
        ) from None
    return client


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _redis_cli(url: str) -> str:
    """The redis-cli command for a server, without its password."""
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
def _signals() -> Iterator[None]:
    """A SIGTERM or a closed terminal ends the demo as Ctrl-C does: with its keys deleted."""

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
def _reported() -> Iterator[None]:
    """Expected failures become one line and status 1; Ctrl-C becomes status 130."""
    try:
        yield
    except (DemoError, RedisAccError) as error:
        click.echo(f"redisacc demo: {error}", err=True)
        raise SystemExit(1) from None
    except redis.RedisError as error:
        # redis-py doesn't say what about: "Connection closed by server."
        click.echo(f"redisacc demo: the server failed: {error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        click.echo("redisacc demo: stopped", err=True)
        raise SystemExit(128 + signal.SIGINT) from None
