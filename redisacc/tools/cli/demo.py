"""The command `redisacc demo`: several processes train word vectors together, and one process checks the result."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys

import click

import redisacc
from redisacc._format.keys import Keys
from redisacc._wire.transport import limited
from redisacc.tools.cli.changes import contents_of
from redisacc.tools.cli.server import own_server
from redisacc.tools.cli.shared.failures import interrupts_raise, report_failures
from redisacc.tools.cli.shared.options import HELP, transport_of
from redisacc.tools.cli.shared.output import echo_wrapped
from redisacc.tools.demo.settings import Settings, steps_option, workers_option
from redisacc.tools.demo.skipgram import Array, initial_parameters, neighbors
from redisacc.tools.demo.text import Corpus, build_corpus, read_text
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import Run, places
from redisacc.tools.launch.server_keeper import ServerKeeper
from redisacc.tools.monitoring.facts import count_text

# Words of the text whose neighbors a reader can judge.
_WORDS = ("exception", "list", "float", "async", "true", "import")

# The matrices are small: threads of a linear algebra library take longer to start than to multiply.
_ENVIRONMENT = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")}


@click.command(context_settings=HELP)
@workers_option
@steps_option
@click.option("--redis", "url", envvar="REDISACC_URL", help="URL of the server.  [default: REDISACC_URL, or its own]")
@report_failures
def demo(workers: int, steps: int, url: str | None) -> None:
    """Train word vectors with several processes, and check the result in one.

    Each worker computes gradients of a skip-gram model on its share of a text, which is Python's language reference,
    and one of them leads: it updates the parameters by their mean. On the way, the one that leads and then another are
    killed. Afterwards, one process repeats the run alone, and the two results must be equal up to rounding.

    The exit code is 0 if they are equal and the loss fell, 1 otherwise, and 128 + N after signal N, so 130 for Ctrl-C.

    The processes run the program redisacc.tools.demo.training. On several machines, start it with `redisacc run`.
    """
    settings = Settings(workers, steps)
    corpus = build_corpus(read_text(), settings.vocabulary)
    click.echo(
        f"Text: {len(corpus.tokens):,} words, {len(corpus.words):,} of them different.\n"
        f"Training: {steps:,} steps, {count_text(workers, 'worker')}, {settings.batch} words each."
    )
    _print_neighbors("before", initial_parameters(corpus, settings)["input"], corpus)
    name = f"demo-{secrets.token_hex(3)}"
    program = [sys.executable, "-m", "redisacc.tools.demo.training", name, f"--workers={workers}", f"--steps={steps}"]
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP), contextlib.nullcontext() if url else own_server() as server:
        address = server.url if server else str(url)
        environment = _ENVIRONMENT | os.environ | {"REDISACC_URL": address}
        # The URL of a server of our own has no password that this could show.
        click.echo(f"Look inside: redisacc watch {name}{f' --redis {address}' if server else ''}\n")
        transport = transport_of(address)
        try:
            members = places(chief=False, workers=workers, first_worker=0, total_workers=workers)
            run = Run(members, program, environment, restarts=lambda: Restarts(5), grace=10)
            if server:
                run.look = ServerKeeper(server, Restarts(5), keeps_data=False).look
            if code := run.wait():
                raise SystemExit(code)
            _, parameters = redisacc.Parameters(name, redis=address).wait()
            _print_neighbors("after", parameters["input"], corpus)
            click.echo("The same training in one process:")
            raise SystemExit(subprocess.run(program, env=environment, check=False).returncode)
        finally:
            # The error to report is why the training ended, and not why nothing could be deleted.
            with contextlib.suppress(redisacc.ServerUnavailableError, redisacc.NotFoundError), limited(2):
                for of in contents_of(transport, Keys(name)):
                    of.delete()


def _print_neighbors(when: str, vectors: Array, corpus: Corpus) -> None:
    click.echo(f"\nNeighbors {when} training:")
    for word in _WORDS:
        found = ", ".join(corpus.words[other] for other in neighbors(vectors, corpus.words.index(word), 5))
        echo_wrapped(f"  {word:9}  {found}", indent=13)
    click.echo()
