"""The commands `redisacc take`, which takes a round or recovers one, and `redisacc apply`, which applies a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from redisacc._arrays.results import Round
from redisacc._arrays.validation import INT64_MAX, INT64_MIN
from redisacc._format.keys import Keys
from redisacc._handles.base import host_and_process
from redisacc._handles.existing import open_existing
from redisacc._protocol.leases.forgetting import forget_worker
from redisacc._protocol.lifecycle.info import read_info
from redisacc._text import age_text, printable
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError
from redisacc.tools.cli.shared.failures import STALE, fail, refuse
from redisacc.tools.cli.shared.gradient_files import GradientFiles
from redisacc.tools.cli.shared.options import (
    Seconds,
    command,
    confirm,
    keys_of,
    name_argument,
    the_server,
)
from redisacc.tools.cli.shared.output import echo_json, echo_wrapped, given, print_table, report
from redisacc.tools.monitoring.facts import count_text

_NOTHING = "every round that was taken has been acknowledged"


@command(yes=True)
@name_argument
@click.argument("num_required", type=click.IntRange(min=1), required=False)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="File for the gradient: .npy, .npz, or -."
)
@click.option("--discard", is_flag=True, help="Discard the gradient for good.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="Wait at most S seconds.")
@click.option("--worker", metavar="NAME", help="Name of this taker.  [default: host:pid]")
@click.option("--recover", is_flag=True, help="Recover a round whose taker was killed, or list such rounds.")
@click.option("--token", metavar="TOKEN", help="With --recover: the round to recover.  [default: the oldest]")
def take(
    *,
    name: str,
    output: Path | None,
    discard: bool,
    recover: bool,
    token: str | None,
    worker: str | None,
    num_required: int | None,
    timeout: float | None,
) -> None:
    """Wait until the round has NUM_REQUIRED gradients, take it, and write its mean or sum to a file.

    Without NUM_REQUIRED, the take waits for what `redisacc set` has set, and follows changes while it waits.

    A dense gradient is written to an .npy, or to an .npz as "gradient". A sparse gradient is written to an .npz as
    "indices", "values" and "shape". A tree is written to an .npz: a dense leaf under its path, a sparse leaf as
    "PATH/indices", "PATH/values" and "PATH/shape"; a leaf without a gradient is left out. bfloat16 is written as
    float32. The round is acknowledged once the file is safely written; if that fails, --recover gets the round. If
    another process recovers the round meanwhile, the command fails with exit code 1, and do not use the file that it
    has written. Exit code 4 means that too few gradients arrived in time.

    With --recover, the command does not wait. It lists the rounds that were taken but not acknowledged because their
    taker was killed. With --output, it writes one to a file and then acknowledges it; with --discard, it discards one.
    It asks first, because a taker that is still alive loses the round. Exit code 1 means that there is no such round.

    \b
      redisacc take embeddings 4 --output round.npz --timeout 60
      redisacc take embeddings --recover --output round.npz
    """
    refuse(
        recover and (num_required, timeout, worker) != (None, None, None),
        "--recover does not wait, so it goes without NUM_REQUIRED, --timeout and --worker",
    )
    refuse(token is not None and not recover, "--token needs --recover")
    keys, transport = keys_of(name), the_server()
    if recover and output is None and not discard:
        _list_unacknowledged(transport, keys, token)
        return
    refuse((output is None) == (not discard), "give either --output FILE or --discard, which throws the gradient away")
    accumulator = open_existing(keys, redis=transport, worker=worker)
    files = None if output is None else GradientFiles(accumulator)
    if files is not None and output is not None:
        files.check(output)
    if recover:
        token = _confirm_recovery(transport, keys, token, discard=discard)
        source: Any = accumulator.recover(token)
    else:
        if discard:
            confirm(f"Take the next round of {printable(name)} and discard its gradient for good?")
        source = accumulator.take(num_required, timeout=timeout)
    with _naming_file(output), source as taken:
        if taken is None:
            fail("the round was acknowledged or recovered by another process in the meantime")
        if files is not None and output is not None:
            files.write(taken.gradient, output)
    verb = "discarded" if discard else "recovered" if recover else "took"
    _report(verb, taken, output)


def _list_unacknowledged(transport: Transport, keys: Keys, token: str | None) -> None:
    info = read_info(transport, keys)
    rounds = [taken for taken in info.unacknowledged if token in (None, taken.token)]
    if given("json"):
        echo_json([vars(taken) for taken in rounds])
    elif not rounds:
        echo_wrapped(_NOTHING, err=True)
    else:
        print_table(
            [">STEP", ">GRADIENTS", ">AGE", "TAKER", "TOKEN"],
            [
                [of.global_step, of.num_accumulated, age_text(info.read_at, of.granted_at), of.taker, of.token]
                for of in rounds
            ],
        )


def _confirm_recovery(transport: Transport, keys: Keys, token: str | None, *, discard: bool) -> str:
    """Returns the token of the round that is recovered, after a question."""
    info = read_info(transport, keys)
    chosen = next((taken for taken in info.unacknowledged if token in (None, taken.token)), None)
    if chosen is None:
        fail(f"there is no unacknowledged round with the token {token}" if token else _NOTHING)
    echo_wrapped(
        f"step {chosen.global_step}, {count_text(chosen.num_accumulated, 'gradient')}, taken "
        f"{age_text(info.read_at, chosen.granted_at)} ago by {printable(chosen.taker)}",
        err=True,
    )
    effect = "This discards the round for good." if discard else "The taker loses this round."
    confirm(f"{effect} Continue only if its taker is dead.")
    return chosen.token


@contextlib.contextmanager
def _naming_file(output: Path | None) -> Iterator[None]:
    """Adds to the failure of a command that has lost its round that its file must not be used."""
    try:
        yield
    except ConflictError as error:
        if output is None:
            raise
        # The file stays. It may have replaced an older one, so that removing it would not restore anything.
        where = "Standard output" if str(output) == "-" else str(output)
        fail(f"{error}. {where} has received it all the same")


def _report(verb: str, taken: Round[Any], output: Path | None) -> None:
    """Prints a line about a round, or JSON; to standard error if standard output holds the gradient."""
    to_stdout = str(output) == "-"
    if given("json") and not to_stdout:
        facts = {name: getattr(taken, name) for name in ("global_step", "num_accumulated", "total_weight", "workers")}
        echo_json({**facts, "file": None if output is None else str(output)})
        return
    workers = ", ".join(f"{printable(worker)} ({number})" for worker, number in taken.workers.items())
    where = "" if output is None or to_stdout else f" into {printable(str(output))}"
    echo_wrapped(
        f"{verb} the round of step {taken.global_step}{where}: {count_text(taken.num_accumulated, 'gradient')}, "
        f"from {workers}",
        err=to_stdout,
    )


@command()
@name_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--local-step",
    type=click.IntRange(INT64_MIN, INT64_MAX),
    metavar="N",
    help="Step that the gradient was computed for.  [default: the current one]",
)
@click.option("--worker", metavar="NAME", help="Worker that the gradient is counted for.  [default: host:pid]")
@click.option("--weight", type=float, default=1.0, metavar="W", help="Weight of the gradient.")
def apply(*, name: str, file: str, local_step: int | None, worker: str | None, weight: float) -> None:
    """Apply the gradient in FILE; - is standard input.

    A dense gradient is an .npy, or an .npz with the array "gradient". A sparse gradient is an .npz with "indices",
    "values" and optionally "shape", which is then checked. The gradient of a tree is an .npz as `redisacc take` writes
    it; a leaf whose arrays are left out has no gradient. A worker that was unknown before stays unknown, so later
    rounds don't wait for it. Exit code 5 means that the gradient was dropped because its step had passed, or because
    the round has one of its worker already.

    \b
      redisacc apply embeddings gradient.npz --worker laptop
    """
    transport, keys = the_server(), keys_of(name)
    accumulator = open_existing(keys, redis=transport, worker=worker)
    files = GradientFiles(accumulator)
    counted_for = worker or host_and_process(os.getpid())
    info = accumulator.info()
    step, result = files.apply(file, local_step, weight=weight)
    if counted_for not in {known.name for known in info.known_workers}:
        # A worker that exists for one gradient would be expected in every later round.
        forget_worker(transport, keys, info.incarnation, counted_for)
    facts = {name: getattr(result, name) for name in ("outcome", "global_step", "num_accumulated")}
    gradients = count_text(result.num_accumulated, "gradient")
    report({**facts, "local_step": step}, f"{result.outcome}: step {result.global_step}, {gradients} in the round")
    if not result:
        why = {
            "stale": f"it is for step {step}, and the step is {result.global_step}",
            "repeated": "the round has a gradient of this worker",
        }[result.outcome]
        fail(f"the gradient was dropped: {why}", STALE)
