"""The command `redisacc show`: shows an accumulator, or rows of its current round, or a leaf of its trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np

from redisacc._admin.memory import Memory, memory
from redisacc._admin.rows import CurrentRows, Rows, read_spec
from redisacc._data.tree_spec import Leaf, TreeSpec
from redisacc._data.validation import INT64_MAX, Array
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import ParameterKeys
from redisacc._format.settings import Settings
from redisacc._format.worker_states import IN_THE_ROUND
from redisacc._protocol.info import AccumulatorInfo, read_info
from redisacc._protocol.parameter_info import ParametersInfo, read_parameters_info
from redisacc._text import age_text, printable
from redisacc.cli.failures import EXIT_CODES, report_failures
from redisacc.cli.options import json_option, keys_of, leaf_option, name_argument, redis_option, transport_of
from redisacc.cli.output import (
    bytes_text,
    count_text,
    declared_shape_text,
    echo_json,
    echo_wrapped,
    number_text,
    print_table,
    schema_shape_text,
    staleness_text,
)
from redisacc.errors import AccumulatorNotFoundError

__all__ = ["show"]

# Number of elements shown of each row.
_ELEMENTS = 8
# Number of partitions named.
_PARTITIONS = 8
# Number of leaves shown without --leaves.
_LEAVES = 20


@click.command(epilog=EXIT_CODES)
@name_argument
@leaf_option("Show this leaf of a tree, or the rows of it.")
@click.option("--leaves", "list_leaves", is_flag=True, help="List all leaves of a tree.")
@click.option(
    "--index",
    "indices",
    type=click.IntRange(0, INT64_MAX),
    multiple=True,
    metavar="I",
    help="Show row I; may be repeated.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="Show K rows, chosen by --by.")
@click.option(
    "--by",
    type=click.Choice(["norm", "hits"]),
    default="norm",
    show_default=True,
    help="Choose the rows with the largest norm, or those that occur in the most gradients.",
)
@redis_option
@json_option
@report_failures
def show(
    *,
    name: str,
    path: str | None,
    list_leaves: bool,
    indices: tuple[int, ...],
    top: int | None,
    by: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Show an accumulator: record, workers, waiting takers, rounds taken but not acknowledged, memory; and parameters.

    With --index or --top, show rows of the current round instead: how many gradients each row occurs in, the sum, and
    the mean if a take returns one. A row of a dense accumulator is an entry of its first dimension. For a sparse
    accumulator, --index reads only these rows; --top, and --index for a dense one, read the round as peek() does.

    Of a tree, the first leaves are listed, or all with --leaves. With --leaf, show how much of this leaf the current
    round holds and the norm of what a take returns for it; --index and --top then choose rows of this leaf. Of a dense
    leaf, nothing but its elements is read.

    \b
      redisacc show embeddings
      redisacc show embeddings --index 42 --index 7
      redisacc show embeddings --top 5 --by hits
      redisacc show model --leaf layers/0/w --index 7
    """
    if indices and top:
        raise click.UsageError("give --index or --top, not both")
    if list_leaves and (indices or top or path is not None):
        raise click.UsageError("--leaves lists the leaves, so it goes without --leaf, --index and --top")
    keys, transport = keys_of(name), transport_of(url)
    if indices or top:
        current = CurrentRows(transport, keys, path)
        rows = _select_rows(current, indices, top, by)
        _print_rows(keys.name, path, current.reduction_type, rows, indices, as_json=as_json)
        return
    if path is not None:
        current = CurrentRows(transport, keys, path)
        assert current.leaf is not None
        _print_leaf(keys.name, current.leaf, current.all(), as_json=as_json)
        return
    parameters = None if list_leaves else read_parameters_info(transport, ParameterKeys(keys.name))
    try:
        info = read_info(transport, keys)
    except AccumulatorNotFoundError:
        if parameters is None:
            raise
        if as_json:
            echo_json({"name": keys.name, "parameters": dataclasses.asdict(parameters)})
        else:
            _print_parameters(parameters)
        return
    spec = read_spec(transport, keys) if info.kind == "tree" else None
    leaves = spec.leaves if isinstance(spec, TreeSpec) else ()
    if list_leaves:
        if info.kind != "tree":
            raise click.UsageError(f"--leaves: {printable(keys.name)} is no tree, but {info.kind}")
        _print_leaves(leaves, as_json=as_json)
        return
    sizes = memory(transport, keys)
    if as_json:
        facts = {
            **dataclasses.asdict(info),
            **{
                state: [worker.name for worker in workers]
                for state, workers in info.states.items()
                if state != IN_THE_ROUND
            },
            "memory": _memory_facts(sizes),
            "leaves": [_leaf_facts(leaf) for leaf in leaves] if info.kind == "tree" else None,
        }
        echo_json(facts if parameters is None else {**facts, "parameters": dataclasses.asdict(parameters)})
        return
    _print_info(info, leaves, sizes)
    if parameters is not None:
        click.echo()
        _print_parameters(parameters)


def _memory_facts(sizes: list[Memory]) -> dict[str, dict[str, int]]:
    return {size.what: {"keys": size.keys, "bytes": size.nbytes} for size in sizes}


def _leaf_facts(leaf: Leaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "kind": "sparse" if leaf.is_sparse else "dense",
        "dtype": leaf.dtype.name,
        "shape": leaf.shape,
    }


def _print_leaves(leaves: Sequence[Leaf], *, as_json: bool, indent: int = 0) -> None:
    if as_json:
        echo_json([_leaf_facts(leaf) for leaf in leaves])
        return
    print_table(
        ["PATH", "KIND", "DTYPE", "SHAPE"],
        [
            [leaf.path, "sparse" if leaf.is_sparse else "dense", leaf.dtype.name, declared_shape_text(leaf.shape)]
            for leaf in leaves
        ],
        indent=indent,
    )


def _print_leaf(name: str, leaf: Leaf, rows: Rows, *, as_json: bool) -> None:
    """Prints how much of a leaf the round holds."""
    norms = _norms(rows.results)
    with np.errstate(all="ignore"):
        norm = float(np.sqrt((norms * norms).sum()))
    if as_json:
        echo_json(
            {
                "name": name,
                "leaf": _leaf_facts(leaf),
                "global_step": rows.global_step,
                "num_accumulated": rows.num_accumulated,
                "num_present": rows.num_present,
                "rows": len(rows.indices),
                "norm": norm,
            }
        )
        return
    click.echo(_rows_title(name, leaf.path, rows))
    click.echo(f"  {printable(leaf.text)}")
    of = "" if not leaf.shape or leaf.shape[0] is None else f" of {leaf.shape[0]}"
    held = f"{count_text(len(rows.indices), 'row')}{of}, " if leaf.shape else ""
    click.echo(f"  {held}norm {norm:.6g}")


def _rows_title(name: str, path: str | None, rows: Rows) -> str:
    """Returns what the rows are of: the accumulator, the leaf, and the gradients of the round."""
    title = printable(name) if path is None else f"{printable(name)}, leaf {printable(path)}"
    text = f"{title}: step {rows.global_step}, {count_text(rows.num_accumulated, 'gradient')}"
    if isinstance(rows.num_present, float):
        weight = f", with a weight of {number_text(rows.total_weight)}"
        has_all = rows.num_present == rows.total_weight
        return text + weight + ("" if has_all else f", {number_text(rows.num_present)} of it with this leaf")
    return text + (f", {rows.num_present} with this leaf" if rows.num_present < rows.num_accumulated else "")


def _mean_text(info: AccumulatorInfo) -> str:
    """Returns what a mean divides by, where that is not what a reader expects; else nothing."""
    counted = "by the number of" if info.normalize == "count" else "by"
    if info.kind != "tree":
        if info.sparse_mean == "round":
            return f"divides {counted} the gradients of the round, not by those that held an index"
        return "divides by the number of gradients, whatever their weights" if info.normalize == "count" else ""
    divisor = "that have the leaf" if info.missing_leaves == "skip" else "of the round"
    rows = ", and a row by those that held its index" if info.sparse_mean == "index" else ""
    return f"divides {counted} the gradients {divisor}{rows}"


def _rules_of(info: AccumulatorInfo) -> Iterator[tuple[str, str]]:
    """Yields lines, each with its label, about which gradients are accepted and what they weigh."""
    if info.once_per_worker:
        yield "accepts", "one gradient of each worker in a round"
    if info.max_staleness:
        yield "accepts", f"gradients up to {count_text(info.max_staleness, 'step')} late"
        yield "late", f"in this round: {staleness_text(info.staleness)}"
    if info.staleness_weight != CONSTANT:
        yield "weights", f"by staleness: {_rule_text(info.staleness_weight)}"
    if info.total_weight != info.num_accumulated:
        yield "weight", f"{number_text(info.total_weight)} in this round"


def _print_info(info: AccumulatorInfo, leaves: Sequence[Leaf], sizes: list[Memory]) -> None:
    def line(label: str, text: str) -> None:
        click.echo(f"  {label:<13}{printable(text)}")

    def ago(then: Any) -> str:
        return age_text(info.read_at, then)

    schema = f"{info.kind} {info.dtype} {schema_shape_text(info)} {info.reduction_type}"
    click.echo(f"{click.style(printable(info.name), bold=True)}  {printable(schema)}")
    line("step", str(info.global_step))
    of = f" of {info.waiting[0].num_required}" if info.waiting else ""
    has_shape = info.round_shape is not None and info.kind != "tree"
    shape = f", each {declared_shape_text(info.round_shape)}" if has_shape else ""
    gradients = f"{info.num_accumulated}{of} gradients" if of else count_text(info.num_accumulated, "gradient")
    line("this round", f"{gradients}{shape}")
    line("buffered", f"{info.buffered} ({bytes_text(info.buffered_bytes)} of {bytes_text(info.buffer_limit)})")
    for label, text in _storage_texts(info):
        line(label, text)
    dropped = f"{info.stale} stale, {info.repeated} repeated"
    line("in total", f"{info.applied} applied, {dropped}, {info.duplicates} sent twice, {info.takes} taken")
    if mean := _mean_text(info):
        line("mean", mean)
    for label, text in _rules_of(info):
        line(label, text)
    if info.settings != Settings():
        line("settings", str(info.settings))
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
                    str(worker.in_round) if worker.in_round else state,
                    str(worker.applied),
                    str(worker.stale),
                    f"{ago(worker.seen_at)} ago",
                ]
                for state, workers in info.states.items()
                for worker in workers
            ],
            indent=2,
        )
    if info.waiting:
        click.echo("\nwaiting takers")
        for waiting in info.waiting:
            gone = " (its lease has expired)" if waiting.lease_ends_at < info.read_at else ""
            most = "more" if waiting.up_to is None else str(waiting.up_to)
            grace = f", or up to {most} within {waiting.grace:g} s" if waiting.grace else ""
            weight = f" with a weight of {number_text(waiting.min_weight)}" if waiting.min_weight else ""
            click.echo(f"  {printable(waiting.taker)} requires {waiting.num_required}{weight}{grace}{gone}")
    if info.unacknowledged:
        click.echo("\nrounds taken but not acknowledged")
        for taken in info.unacknowledged:
            click.echo(
                f"  step {taken.global_step}, {count_text(taken.num_accumulated, 'gradient')}, "
                f"{ago(taken.granted_at)} ago by {printable(taken.taker)}\n    token {printable(taken.token)}"
            )
    _print_memory(sizes)
    if leaves:
        click.echo("\nleaves")
        _print_leaves(leaves[:_LEAVES], as_json=False, indent=2)
        if len(leaves) > _LEAVES:
            click.echo(f"  and {len(leaves) - _LEAVES} more, which --leaves lists")


def _print_memory(sizes: list[Memory]) -> None:
    if not sizes:
        click.echo("\nmemory: unknown, because this user may not run MEMORY USAGE")
        return
    click.echo("\nmemory")
    print_table(
        ["KIND", ">KEYS", ">BYTES"],
        [[size.what, str(size.keys), bytes_text(size.nbytes)] for size in sizes]
        + [["total", str(sum(size.keys for size in sizes)), bytes_text(sum(size.nbytes for size in sizes))]],
        indent=2,
    )


def _print_parameters(info: ParametersInfo) -> None:
    def line(label: str, text: str) -> None:
        click.echo(f"  {label:<13}{printable(text)}")

    click.echo(f"{click.style(printable(info.name), bold=True)}  parameters")
    line("step", f"{info.step}, the last one" if info.finished else str(info.step))
    if info.workers is not None:
        line("workers", f"{info.workers} gradients for a step")
    encoded = "" if info.wire == "float32" else f", stored as {info.wire} where they are float32"
    line("leaves", f"{info.leaves} ({bytes_text(info.nbytes)}{encoded})")
    if info.state_bytes:
        line("state", bytes_text(info.state_bytes))
    line("stored", bytes_text(info.stored_bytes))
    if info.partitions:
        line("partitions", f"{len(info.partitions)} ({_numbers_text(info.partitions)})")
    line("published", f"{age_text(info.read_at, info.published_at)} ago by {info.publisher}")
    line("created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(info.read_at, info.created_at)} ago")
    line("incarnation", info.incarnation)


def _select_rows(current: CurrentRows, indices: Sequence[int], top: int | None, by: str) -> Rows:
    if indices and current.is_sparse:
        return current.some(indices)
    rows = current.all()
    if top is None:
        places = np.flatnonzero(np.isin(rows.indices, np.array(indices, np.uint64)))
    else:
        weights = rows.counts.astype(np.float64) if by == "hits" else _norms(rows.results)
        # The largest first, and among equal ones the lower index. NaN counts as the largest: it needs attention.
        weights = np.where(np.isnan(weights), np.inf, weights)
        places = np.argsort(-weights, kind="stable")[:top]
    return Rows(
        rows.indices[places],
        rows.counts[places],
        rows.sums[places],
        rows.results[places],
        rows.global_step,
        rows.num_accumulated,
        rows.num_present,
        rows.total_weight,
    )


def _norms(values: Array) -> Array:
    wide = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    with np.errstate(all="ignore"):
        norms: Array = np.sqrt((wide * wide).sum(axis=tuple(range(1, wide.ndim))))
    return norms


def _print_rows(
    name: str, path: str | None, reduction_type: str, rows: Rows, wanted: Sequence[int], *, as_json: bool
) -> None:
    norms = _norms(rows.results)
    reduction = reduction_type.lower()
    if as_json:
        echo_json(
            {
                "name": name,
                **({} if path is None else {"leaf": path, "num_present": rows.num_present}),
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
    click.echo(_rows_title(name, path, rows))
    for n, index in enumerate(rows.indices):
        click.echo(f"row {index}  in {_held_text(rows.counts[n])}  norm {norms[n]:.6g}")
        echo_wrapped(f"  sum   {_elements(rows.sums[n])}", indent=8)
        if reduction == "mean":
            echo_wrapped(f"  mean  {_elements(rows.results[n])}", indent=8)
    held = set(rows.indices.tolist())
    for index in wanted:
        if index not in held:
            click.echo(f"row {index}  in no gradient of this round")


def _held_text(count: Any) -> str:
    """Returns how many gradients held a row, or the sum of their weights."""
    if isinstance(count, (int, np.integer)):
        return count_text(int(count), "gradient")
    return f"gradients with a weight of {number_text(count)}"


def _rule_text(rule: str | tuple[float, ...]) -> str:
    """Returns a rule for weights of staleness as people read it; of many factors, the first ones."""
    if isinstance(rule, str):
        return rule
    text = ", ".join(map(number_text, rule[:_ELEMENTS]))
    return text + (f" … and {len(rule) - _ELEMENTS} more" if len(rule) > _ELEMENTS else "")


def _elements(row: Array) -> str:
    flat = row.reshape(-1)
    text = " ".join(number_text(value) for value in flat[:_ELEMENTS])
    return text + (f" … and {len(flat) - _ELEMENTS} more" if len(flat) > _ELEMENTS else "")


def _storage_texts(info: AccumulatorInfo) -> Iterator[tuple[str, str]]:
    """Yields what there is to say of the way in which large gradients are stored and added up."""
    if info.partitions:
        attempts = count_text(info.attempts, "attempt")
        yield "partitions", f"{len(info.partitions)} ({_numbers_text(info.partitions)}); {attempts} under way or over"
    if info.reducer is not None:
        late = f"in time for {info.reducer.stored} rounds, late for {info.reducer.late}"
        yield "reducer", f"{info.reducer.who}: {late}"


def _numbers_text(numbers: Sequence[int]) -> str:
    """Returns the first numbers as a text: "0, 2, 3, …"."""
    named = ", ".join(map(str, numbers[:_PARTITIONS]))
    return named + (", …" if len(numbers) > _PARTITIONS else "")
