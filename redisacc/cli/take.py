"""`redisacc take`: a round into a file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from redisacc._accumulator import ConditionalAccumulatorBase
from redisacc._existing import open_existing
from redisacc._rounds import Round
from redisacc.cli._common import (
    EXIT_CODES,
    confirm,
    console,
    counted,
    echo_json,
    json_option,
    keys_of,
    link_of,
    name_argument,
    redis_option,
    reported,
    safe,
    say,
    yes_option,
)
from redisacc.cli._files import check_output, save
from redisacc.errors import RedisAccError

__all__ = ["report_round", "take"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("num_required", type=click.IntRange(min=1))
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to: .npy, .npz, or -.")
@click.option("--discard", is_flag=True, help="Throw the gradient away.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="Wait at most S seconds.")
@click.option("--worker", metavar="NAME", help="Name of this taker.  [default: host:pid]")
@redis_option
@yes_option
@json_option
@reported
def take(
    *,
    name: str,
    num_required: int,
    output: Path | None,
    discard: bool,
    timeout: float | None,
    worker: str | None,
    url: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Take a round as soon as it has NUM_REQUIRED gradients, and write it to a file.

    A dense gradient goes into an .npy (or into an .npz, as "gradient"), a sparse one into an .npz with indices,
    values and shape; bfloat16 as float32. The round is acknowledged once the file is safely written: if that fails,
    `redisacc recover` gets it. Exit code 4: not enough gradients came in time.
    """
    link_of(url)
    accumulator = open_existing(keys_of(name), redis=url, worker=worker)
    check_output(output, discard=discard, sparse=accumulator._sparse)
    if discard:
        confirm(f"Take the next round of {safe(name)} and throw its gradient away?", yes=yes)
    with _waiting(accumulator, num_required), accumulator.take(num_required, timeout=timeout) as taken:
        if output is not None:
            assert taken.gradient is not None
            save(taken.gradient, output)
    report_round("took", taken, output, as_json=as_json)


def report_round(verb: str, taken: Round[Any], output: Path | None, *, as_json: bool) -> None:
    """Says what was taken: to stderr where stdout has the gradient."""
    to_stdout = str(output) == "-"
    if as_json and not to_stdout:
        echo_json(
            {
                "global_step": taken.global_step,
                "num_accumulated": taken.num_accumulated,
                "workers": taken.workers,
                "file": None if output is None else str(output),
            }
        )
        return
    workers = ", ".join(f"{safe(worker)} ({number})" for worker, number in taken.workers.items())
    where = "" if output is None or to_stdout else f" into {safe(str(output))}"
    say(
        f"{verb} the round of step {taken.global_step}{where}: {counted(taken.num_accumulated, 'gradient')}, "
        f"from {workers}",
        err=to_stdout,
    )


@contextlib.contextmanager
def _waiting(accumulator: ConditionalAccumulatorBase[Any], num_required: int) -> Iterator[None]:
    """A bar of how full the round is, on a terminal, while the take waits."""
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
        task = bar.add_task("waiting", total=num_required, completed=accumulator.num_accumulated())
        stop = threading.Event()

        def follow() -> None:
            while not stop.wait(0.3):
                with contextlib.suppress(RedisAccError):
                    bar.update(task, completed=min(accumulator.num_accumulated(), num_required))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
