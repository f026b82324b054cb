"""`redisacc apply`: a gradient out of a file."""

from __future__ import annotations

import click

from redisacc._dense import ConditionalAccumulator
from redisacc._existing import open_existing
from redisacc._sparse import SparseConditionalAccumulator
from redisacc.cli._common import (
    EXIT_CODES,
    STALE,
    counted,
    echo_json,
    fail,
    json_option,
    keys_of,
    link_of,
    name_argument,
    redis_option,
    reported,
)
from redisacc.cli._files import load, picked

__all__ = ["apply"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--local-step", type=int, metavar="N", help="The step it was computed for.  [default: the current one]")
@click.option("--worker", metavar="NAME", help="Name under which it is counted.  [default: host:pid]")
@redis_option
@json_option
@reported
def apply(*, name: str, file: str, local_step: int | None, worker: str | None, url: str | None, as_json: bool) -> None:
    """Apply the gradient in FILE, - for standard input.

    A dense one is an .npy, or an .npz with "gradient"; a sparse one an .npz with indices, values and, if it is to be
    checked, shape. Exit code 5: its step had passed, and it was dropped.
    """
    link_of(url)
    arrays = load(file)
    accumulator = open_existing(keys_of(name), redis=url, worker=worker)
    step = accumulator.global_step() if local_step is None else local_step
    if isinstance(accumulator, SparseConditionalAccumulator):
        indices, values, shape = picked(arrays, file, "indices", "values", optional="shape")
        assert indices is not None
        assert values is not None
        # -1 is what a take gives where dimension 0 isn't known, and no shape that could be checked.
        whole = None if shape is None or (shape.size and shape.flat[0] == -1) else shape
        result = accumulator.apply_grad(indices, values, whole, step)
    else:
        assert isinstance(accumulator, ConditionalAccumulator)
        (gradient,) = picked(arrays, file, "gradient")
        assert gradient is not None
        result = accumulator.apply_grad(gradient, step)
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
        gradients = counted(result.num_accumulated, "gradient")
        click.echo(f"{result.outcome}: step {result.global_step}, {gradients} in this round")
    if not result:
        fail(f"the gradient is for step {step}, and the step is {result.global_step}: it was dropped", STALE)
