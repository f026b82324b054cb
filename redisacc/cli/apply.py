"""The command `redisacc apply`: applies the gradient in a file."""

from __future__ import annotations

import os

import click

from redisacc._data.encodings import Encoding
from redisacc._data.metrics import metric_name
from redisacc._data.validation import INT64_MAX, INT64_MIN
from redisacc._handles.base import host_and_process
from redisacc._handles.existing import open_existing
from redisacc._monitoring.facts import count_text
from redisacc._protocol.leases.forgetting import forget_worker
from redisacc._text import shown
from redisacc.cli.shared.array_files import read_arrays
from redisacc.cli.shared.failures import EXIT_CODES, STALE, fail, report_failures
from redisacc.cli.shared.gradient_arrays import arrays_of
from redisacc.cli.shared.options import json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json

__all__ = ["apply"]


def _metrics_of(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, float] | None:
    """Returns the metrics that options give; None without any."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals:
                raise ValueError
            number = float(value)
            metric_name(name)
        except ValueError:
            raise click.BadParameter(
                f"a metric is NAME=VALUE with a number, such as loss=0.3, not {shown(text)}"
            ) from None
        if name in found:
            raise click.BadParameter(f"the metric {name} is given twice")
        found[name] = number
    return found or None


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--local-step",
    type=click.IntRange(INT64_MIN, INT64_MAX),
    metavar="N",
    help="Step that the gradient was computed for.  [default: the current one]",
)
@click.option("--worker", metavar="NAME", help="Worker that the gradient is counted for.  [default: host:pid]")
@click.option("--weight", type=float, default=1.0, metavar="W", help="Weight of the gradient.  [default: 1]")
@click.option(
    "--metric",
    "metrics",
    callback=_metrics_of,
    multiple=True,
    metavar="NAME=VALUE",
    help="A number that travels with the gradient, such as loss=0.3; may be repeated.",
)
@click.option("--once-per-worker", is_flag=True, help="Drop it if the round has a gradient of this worker.")
@click.option(
    "--encoding",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    help="How elements of float32 travel, and are stored until they are added.  [default: float32]",
)
@redis_option
@json_option
@report_failures
def apply(
    *,
    name: str,
    file: str,
    local_step: int | None,
    worker: str | None,
    weight: float,
    metrics: dict[str, float] | None,
    once_per_worker: bool,
    encoding: Encoding | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Apply the gradient in FILE; - is standard input.

    A dense gradient is an .npy, or an .npz with the array "gradient". A sparse gradient is an .npz with "indices",
    "values" and optionally "shape", which is then checked. The gradient of a tree is an .npz as `redisacc take` writes
    it; a leaf whose arrays are left out has no gradient. A worker that was unknown before is unknown afterwards, so
    that no later round misses it. Exit code 5 means that the gradient was dropped because its
    step had passed, or because the round has one of its worker already.

    \b
      redisacc apply embeddings gradient.npz --worker laptop
      redisacc apply embeddings gradient.npz --metric loss=0.3 --metric top-5=0.9
    """
    transport, keys = transport_of(url), keys_of(name)
    accumulator = open_existing(keys, redis=url, worker=worker)
    form = arrays_of(accumulator)
    arrays = read_arrays(file, form.names, single=form.single)
    step = accumulator.global_step() if local_step is None else local_step
    counted_for = worker or host_and_process(os.getpid())
    info = accumulator.info()
    result = form.apply(
        arrays, file, step, weight=weight, metrics=metrics, once_per_worker=once_per_worker, encoding=encoding
    )
    if counted_for not in {known.name for known in info.known_workers}:
        # A worker that exists for one gradient would be expected in every later round.
        forget_worker(transport, keys, info.incarnation, counted_for)
    if as_json:
        echo_json(
            {
                "outcome": result.outcome,
                "local_step": step,
                "global_step": result.global_step,
                "num_accumulated": result.num_accumulated,
            }
        )
    else:
        gradients = count_text(result.num_accumulated, "gradient")
        click.echo(f"{result.outcome}: step {result.global_step}, {gradients} in the round")
    if not result:
        why = {
            "stale": f"it is for step {step}, and the step is {result.global_step}",
            "repeated": "the round has a gradient of this worker",
        }[result.outcome]
        fail(f"the gradient was dropped: {why}", STALE)
