"""The command `redisacc demo`: several processes train word vectors together, and one process checks the result."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

import redisacc
from redisacc._format.keys import Keys
from redisacc._wire.transport import limited
from redisacc.tools.cli.changes import contents_of
from redisacc.tools.cli.server import own_server
from redisacc.tools.cli.shared.failures import interrupts_raise, report_failures
from redisacc.tools.cli.shared.options import HELP, transport_of
from redisacc.tools.cli.shared.output import echo_wrapped
from redisacc.tools.demo import DemoError
from redisacc.tools.demo.settings import Settings, training_options
from redisacc.tools.demo.skipgram import Array, initial_parameters, neighbors
from redisacc.tools.demo.text import Corpus
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import Run, places
from redisacc.tools.launch.server_keeper import ServerKeeper
from redisacc.tools.monitoring.facts import count_text

# Words of the default text whose neighbors a reader can judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# The matrices are small: threads of a linear algebra library take longer to start than to multiply.
_ENVIRONMENT = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")}


@click.command(context_settings=HELP)
@training_options
@click.option("--word", "words", multiple=True, help="Word whose neighbors are shown; may be repeated.")
@click.option("--redis", "url", envvar="REDISACC_URL", help="URL of the server.  [default: REDISACC_URL, or its own]")
@report_failures
def demo(settings: Settings, corpus: Corpus, text: tuple[Path, ...], words: tuple[str, ...], url: str | None) -> None:
    """Train word vectors with several processes, and check the result in one.

    Each worker computes gradients of a skip-gram model on its share of a text, and one of them leads: it updates the
    parameters by their mean. On the way, the one that leads and then another are killed. Afterwards, one process
    repeats the run alone, and the two results must be equal up to rounding.

    The exit code is 0 if they are equal and the loss fell, 1 otherwise, and 128 + N after signal N, so 130 for Ctrl-C.

    The processes run the program redisacc.tools.demo.training. On several machines, start it with `redisacc run`.
    """
    shown = _choose_words(words, corpus)
    click.echo(
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} of them different.\n"
        f"Training: {settings.steps:,} steps, {count_text(settings.workers, 'worker')}, {settings.batch} words each."
    )
    _print_neighbors("before", initial_parameters(corpus, settings)["input"], corpus, shown)
    name = f"demo-{secrets.token_hex(3)}"
    program = [sys.executable, "-m", "redisacc.tools.demo.training", name, *(f"--text={file}" for file in text)]
    program += [f"--{option}={value}" for option, value in asdict(settings).items()]
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP), contextlib.nullcontext() if url else own_server() as server:
        address = server.url if server else str(url)
        environment = _ENVIRONMENT | os.environ | {"REDISACC_URL": address}
        # The URL of a server of our own has no password that this could show.
        click.echo(f"Look inside: redisacc watch {name}{f' --redis {address}' if server else ''}\n")
        transport = transport_of(address)
        try:
            members = places(chief=False, workers=settings.workers, first_worker=0, total_workers=settings.workers)
            run = Run(members, program, environment, restarts=lambda: Restarts(5), grace=10)
            if server:
                run.look = ServerKeeper(server, Restarts(5), keeps_data=False).look
            if code := run.wait():
                raise SystemExit(code)
            _, parameters = redisacc.Parameters(name, redis=address).wait()
            _print_neighbors("after", parameters["input"], corpus, shown)
            click.echo("The same training in one process:")
            raise SystemExit(subprocess.run(program, env=environment, check=False).returncode)
        finally:
            # The error to report is why the training ended, and not why nothing could be deleted.
            with contextlib.suppress(redisacc.ServerUnavailableError, redisacc.NotFoundError), limited(2):
                for of in contents_of(transport, Keys(name)):
                    of.delete()


def _choose_words(wanted: Sequence[str], corpus: Corpus) -> list[int]:
    unknown = [word for word in wanted if word.lower() not in corpus.words]
    if unknown:
        raise DemoError(f"--word: not in the vocabulary of this text: {', '.join(unknown)}")
    known = [corpus.words.index(word.lower()) for word in wanted or _WORDS if word.lower() in corpus.words]
    # In another text, words of medium frequency: neither "the" and "of" nor rare ones.
    start = min(100, len(corpus.words) // 4)
    return known if wanted or len(known) >= 3 else list(range(start, min(start + 6, len(corpus.words))))


def _print_neighbors(when: str, vectors: Array, corpus: Corpus, words: Sequence[int]) -> None:
    click.echo(f"\nNeighbors {when} training:")
    width = max(len(corpus.words[word]) for word in words)
    for word in words:
        found = ", ".join(corpus.words[other] for other in neighbors(vectors, word, 5))
        echo_wrapped(f"  {corpus.words[word]:{width}}  {found}", indent=width + 4)
    click.echo()
