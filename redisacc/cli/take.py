"""The command `redisacc take`: takes a round and writes it to a file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from redisacc._data.results import Round
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.existing import open_existing
from redisacc._monitoring.facts import count_text
from redisacc._text import printable
from redisacc.cli.shared.array_files import check_output, write_arrays
from redisacc.cli.shared.failures import EXIT_CODES, fail, report_failures
from redisacc.cli.shared.gradient_arrays import GradientArrays, arrays_of
from redisacc.cli.shared.options import (
    Seconds,
    confirm,
    json_option,
    keys_of,
    name_argument,
    redis_option,
    transport_of,
    yes_option,
)
from redisacc.cli.shared.output import console, echo_json, echo_wrapped
from redisacc.errors import ConflictError, RedisAccError

__all__ = ["check_form", "naming_file", "report_round", "take", "write_gradient"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("num_required", type=click.IntRange(min=1), required=False)
@click.option("--min-weight", type=float, metavar="W", help="Wait until the weights of the gradients add up to W.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="File for the gradient: .npy, .npz, or -."
)
@click.option("--discard", is_flag=True, help="Discard the gradient for good.")
@click.option("--grace", type=Seconds(min=0), metavar="S", help="Wait S seconds for more than NUM_REQUIRED gradients.")
@click.option("--most", type=click.IntRange(min=1), metavar="N", help="End the grace when there are N gradients.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="Wait at most S seconds.")
@click.option("--worker", metavar="NAME", help="Name of this taker.  [default: host:pid]")
@redis_option
@yes_option
@json_option
@report_failures
def take(
    *,
    name: str,
    num_required: int | None,
    min_weight: float | None,
    output: Path | None,
    discard: bool,
    grace: float | None,
    most: int | None,
    timeout: float | None,
    worker: str | None,
    url: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Wait until the round has NUM_REQUIRED gradients, take it, and write its mean or sum to a file.

    Without NUM_REQUIRED, the take waits for what `redisacc set` has set, and follows changes while it waits.

    A dense gradient is written to an .npy, or to an .npz as "gradient". A sparse gradient is written to an .npz as
    "indices", "values" and "shape". A tree is written to an .npz: a dense leaf under its path, a sparse leaf as
    "PATH/indices", "PATH/values" and "PATH/shape"; a leaf without a gradient is left out. bfloat16 is written as
    float32. The round is acknowledged once the file is safely written; if that fails, `redisacc recover` gets the
    round. If another process recovers the round meanwhile, the command fails with exit code 1, and the file that it has
    written must not be used. With --grace, the take waits for more gradients, until they are --most many or S seconds
    have passed since NUM_REQUIRED were there. With --min-weight, NUM_REQUIRED may be left out; if both are given, both
    are needed. Exit code 4 means that too few gradients arrived in time.

    \b
      redisacc take embeddings 4 --output round.npz --timeout 60
    """
    transport_of(url)
    accumulator = open_existing(keys_of(name), redis=url, worker=worker)
    form = check_form(accumulator, output, discard=discard)
    if discard:
        confirm(f"Take the next round of {printable(name)} and discard its gradient for good?", yes=yes)
    with (
        naming_file(output),
        _waiting(accumulator, 1 if num_required is None and min_weight is not None else num_required),
        accumulator.take(num_required, min_weight=min_weight, most=most, grace=grace, timeout=timeout) as taken,
    ):
        if output is not None:
            write_gradient(taken.gradient, form, output)
    report_round("discarded" if discard else "took", taken, output, as_json=as_json)


def check_form(
    accumulator: ConditionalAccumulatorBase[Any], output: Path | None, *, discard: bool
) -> GradientArrays | None:
    """Checks --output and --discard, and returns how the gradient becomes arrays; None if it is discarded.

    Raises:
        click.UsageError: both or neither are given, or the file cannot be written or cannot hold the gradient.
    """
    if output is None:
        check_output(output, discard=discard)
        return None
    form = arrays_of(accumulator)
    check_output(output, discard=discard, several=None if form.single else form.description)
    return form


def write_gradient(gradient: Any, form: GradientArrays | None, output: Path) -> None:
    """Writes a gradient to a file, whole or not at all, and onto the disk before it returns; "-" is standard output."""
    assert gradient is not None
    assert form is not None
    write_arrays(form.pack(gradient), output, several=form.single is None)


@contextlib.contextmanager
def naming_file(output: Path | None) -> Iterator[None]:
    """Adds to the failure of a command that has lost its round that its file must not be used."""
    try:
        yield
    except ConflictError as error:
        if output is None:
            raise
        # The file stays. It may have replaced an older one, so that removing it would not restore anything.
        where = "Standard output" if str(output) == "-" else str(output)
        fail(f"{error}. {where} has received it all the same")


def report_round(verb: str, taken: Round[Any], output: Path | None, *, as_json: bool) -> None:
    """Prints a line about a round; to standard error if standard output holds the gradient.

    Args:
        verb: a verb for what happened to the round, for example "took".
        taken: the round.
        output: the file with its gradient; None if it was discarded.
        as_json: print JSON instead of a line, unless standard output holds the gradient.
    """
    to_stdout = str(output) == "-"
    if as_json and not to_stdout:
        echo_json(
            {
                "global_step": taken.global_step,
                "num_accumulated": taken.num_accumulated,
                "total_weight": taken.total_weight,
                "workers": taken.workers,
                "file": None if output is None else str(output),
            }
        )
        return
    workers = ", ".join(f"{printable(worker)} ({number})" for worker, number in taken.workers.items())
    where = "" if output is None or to_stdout else f" into {printable(str(output))}"
    echo_wrapped(
        f"{verb} the round of step {taken.global_step}{where}: {count_text(taken.num_accumulated, 'gradient')}, "
        f"from {workers}",
        err=to_stdout,
    )


@contextlib.contextmanager
def _waiting(accumulator: ConditionalAccumulatorBase[Any], num_required: int | None) -> Iterator[None]:
    """Shows on a terminal how full the round is, as long as the take waits."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed} of {task.total}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, expand=True, transient=True) as bar:
        task = bar.add_task("waiting", total=num_required)

        def update() -> None:
            total = num_required or accumulator.quorum().least or 1
            bar.update(task, total=total, completed=min(accumulator.num_accumulated(), total))

        update()
        stop = threading.Event()

        def follow() -> None:
            while not stop.wait(0.3):
                with contextlib.suppress(RedisAccError):
                    update()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
