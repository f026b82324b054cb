"""`redisacc show`: one accumulator, whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from redisacc._accumulator import ConditionalAccumulatorBase
from redisacc._arguments import Array
from redisacc._existing import open_existing
from redisacc._info import AccumulatorInfo, read_info
from redisacc._looking import Memory, Rows, all_rows, memory, some_rows
from redisacc.cli._common import (
    EXIT_CODES,
    age_text,
    bytes_text,
    counted,
    echo_json,
    json_option,
    keys_of,
    link_of,
    name_argument,
    number_text,
    print_table,
    redis_option,
    reported,
    safe,
    shape_text,
)

__all__ = ["show"]

# Elements of a row that are shown.
_ELEMENTS = 8


@click.command(epilog=EXIT_CODES)
@name_argument
@click.option("--index", "indices", type=click.IntRange(min=0), multiple=True, metavar="I", help="The sums of row I.")
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="The K rows with the largest norm or most hits.")
@click.option(
    "--by", type=click.Choice(["norm", "hits"]), default="norm", show_default=True, help="What --top goes by."
)
@redis_option
@json_option
@reported
def show(*, name: str, indices: tuple[int, ...], top: int | None, by: str, url: str | None, as_json: bool) -> None:
    """Show an accumulator: its record, workers, takers, untaken rounds and memory.

    With --index (may be repeated) or --top, rows of the current round instead: how many gradients held each, the sum,
    and what a take would return. A row of a dense accumulator is an entry of its first dimension. --index of a sparse
    one reads only those rows; the rest reads the round as peek() does.
    """
    if indices and top:
        raise click.UsageError("give --index or --top, not both")
    link, keys = link_of(url), keys_of(name)
    if indices or top:
        accumulator = open_existing(keys, redis=url)
        rows = _chosen(accumulator, indices, top, by)
        _print_rows(accumulator, rows, indices, as_json=as_json)
        return
    info, sizes = read_info(link, keys), memory(link, keys)
    if as_json:
        echo_json({**dataclasses.asdict(info), "missing": [w.name for w in info.missing], "memory": _memory(sizes)})
        return
    _print_info(info, sizes)


def _memory(sizes: list[Memory]) -> dict[str, dict[str, int]]:
    return {sort.what: {"keys": sort.keys, "bytes": sort.nbytes} for sort in sizes}


def _print_info(info: AccumulatorInfo, sizes: list[Memory]) -> None:
    def line(what: str, text: str) -> None:
        click.echo(f"  {what:<13}{safe(text)}")

    def ago(then: Any) -> str:
        return age_text(info.read_at, then)

    click.echo(click.style(safe(info.name), bold=True) + f"  {info.kind} {info.dtype} "
               f"{shape_text(info.shape)} {info.reduction_type}")  # fmt: skip
    line("step", str(info.global_step))
    of = f" of {info.waiting[0].num_required}" if info.waiting else ""
    shape = "" if info.round_shape is None else f", each {shape_text(info.round_shape)}"
    gradients = f"{info.num_accumulated}{of} gradients" if of else counted(info.num_accumulated, "gradient")
    line("this round", f"{gradients}{shape}")
    line("parked", f"{info.parked} ({bytes_text(info.parked_bytes)} of {bytes_text(info.parked_limit)})")
    line("so far", f"{info.applied} applied, {info.stale} stale, {info.duplicates} sent twice, {info.takes} taken")
    line("last active", f"{ago(info.last_activity)} ago")
    line("created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {ago(info.created_at)} ago")
    line("incarnation", info.incarnation)
    if info.known_workers:
        click.echo("\nworkers")
        print_table(
            ["NAME", ">THIS ROUND", ">APPLIED", ">STALE", ">LAST SEEN"],
            [
                [
                    worker.name,
                    str(worker.in_round) if worker.in_round else "missing",
                    str(worker.applied),
                    str(worker.stale),
                    ago(worker.seen_at),
                ]
                for worker in [*(w for w in info.known_workers if w.in_round), *info.missing]
            ],
            indent=2,
        )
    if info.waiting:
        click.echo("\ntakers that wait")
        for waiting in info.waiting:
            gone = " (gone: its lease has run out)" if waiting.lease_ends_at < info.read_at else ""
            click.echo(f"  {safe(waiting.taker)} for {waiting.num_required}{gone}")
    if info.unacknowledged:
        click.echo("\nrounds taken and not acknowledged")
        for taken in info.unacknowledged:
            click.echo(
                f"  step {taken.global_step}, {counted(taken.num_accumulated, 'gradient')}, "
                f"{ago(taken.granted_at)} ago to {safe(taken.taker)}\n    token {safe(taken.token)}"
            )
    if not sizes:
        click.echo("\nmemory: this user may not ask")
        return
    click.echo("\nmemory")
    print_table(
        ["WHAT", ">KEYS", ">BYTES"],
        [[sort.what, str(sort.keys), bytes_text(sort.nbytes)] for sort in sizes]
        + [["all", str(sum(s.keys for s in sizes)), bytes_text(sum(s.nbytes for s in sizes))]],
        indent=2,
    )


def _chosen(accumulator: ConditionalAccumulatorBase[Any], indices: Sequence[int], top: int | None, by: str) -> Rows:
    if indices and accumulator._sparse:
        return some_rows(accumulator, indices)
    rows = all_rows(accumulator)
    if top is None:
        places = np.flatnonzero(np.isin(rows.indices, np.array(indices, np.uint64)))
    else:
        weights = rows.counts.astype(np.float64) if by == "hits" else _norms(rows.results)
        # The largest first; of equal ones the lower index. Those that are no number are the ones to look at.
        weights = np.where(np.isnan(weights), np.inf, weights)
        places = np.argsort(-weights, kind="stable")[:top]
    return Rows(
        rows.indices[places],
        rows.counts[places],
        rows.sums[places],
        rows.results[places],
        rows.global_step,
        rows.num_accumulated,
    )


def _norms(values: Array) -> Array:
    wide = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    with np.errstate(all="ignore"):
        norms: Array = np.sqrt((wide * wide).sum(axis=tuple(range(1, wide.ndim))))
    return norms


def _print_rows(
    accumulator: ConditionalAccumulatorBase[Any], rows: Rows, wanted: Sequence[int], *, as_json: bool
) -> None:
    norms = _norms(rows.results)
    reduction = accumulator.reduction_type.lower()
    if as_json:
        echo_json(
            {
                "name": accumulator._keys.name,
                "global_step": rows.global_step,
                "num_accumulated": rows.num_accumulated,
                "rows": [
                    {
                        "index": rows.indices[n],
                        "count": rows.counts[n],
                        "norm": norms[n],
                        "sum": rows.sums[n],
                        **({"mean": rows.results[n]} if reduction == "mean" else {}),
                    }
                    for n in range(len(rows.indices))
                ],
            }
        )
        return
    click.echo(f"{safe(accumulator._keys.name)}: step {rows.global_step}, {counted(rows.num_accumulated, 'gradient')}")
    for n, index in enumerate(rows.indices):
        click.echo(f"row {index}  held by {rows.counts[n]}  norm {norms[n]:.6g}")
        click.echo(f"  sum   {_elements(rows.sums[n])}")
        if reduction == "mean":
            click.echo(f"  mean  {_elements(rows.results[n])}")
    held = set(rows.indices.tolist())
    for index in wanted:
        if index not in held:
            click.echo(f"row {index}  held by no gradient of this round")


def _elements(row: Array) -> str:
    flat = row.reshape(-1)
    text = " ".join(number_text(value) for value in flat[:_ELEMENTS])
    return text + (f" … {len(flat) - _ELEMENTS} more" if len(flat) > _ELEMENTS else "")
