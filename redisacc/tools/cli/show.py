"""The commands `redisacc ls`, which lists what Redis holds, and `redisacc show`, which shows one name, or rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np

from redisacc._arrays.spec import Leaf
from redisacc._arrays.validation import INT64_MAX, Array
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._text import age_text, listed, printable, shown
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, NotFoundError
from redisacc.tools.admin.catalog import list_names
from redisacc.tools.admin.memory import Memory, memory
from redisacc.tools.admin.rows import Rows, read_rows, read_spec
from redisacc.tools.cli.shared.failures import refuse
from redisacc.tools.cli.shared.options import command, keys_of, name_argument, the_server
from redisacc.tools.cli.shared.output import by_name, echo_json, echo_wrapped, given, print_facts, print_table
from redisacc.tools.monitoring.facts import (
    bytes_text,
    count_text,
    declared_shape_text,
    everything_of,
    facts_of,
    facts_of_parameters,
    number_text,
    requirement_text,
    schema_shape_text,
    schema_text,
)

# Number of leaves shown without --json, and of elements of a row.
_LEAVES, _ELEMENTS = 20, 8


@command()
@click.argument("pattern", default="*")
def ls(*, pattern: str) -> None:
    """List accumulators and parameters.

    PATTERN is a glob as Redis understands it, for example 'demo-*'; without it, all are listed. "+1" after the DTYPE of
    a tree means that its leaves have one more dtype. WAITING is the number of gradients that the first waiting taker
    requires, and "+1" after it means that one more taker is waiting. BYTES is the memory in Redis, including rounds
    that were taken but not acknowledged.
    """
    transport = the_server()
    found: list[tuple[AccumulatorInfo, int]] = []
    parameters: dict[str, ParametersInfo] = {}
    for name in list_names(transport, pattern):
        with _reporting():
            if (published := read_parameters_info(transport, ParameterKeys(name))) is not None:
                parameters[name] = published
        # It may be deleted since it was listed, or a name without a record, which `redisacc doctor --fix` removes.
        with _reporting(), contextlib.suppress(NotFoundError):
            keys = Keys(name)
            found.append((read_info(transport, keys), sum(sort.nbytes for sort in memory(transport, keys))))
    if given("json"):
        listed = [{**everything_of(info, parameters.pop(info.name, None)), "bytes": size} for info, size in found]
        echo_json([*listed, *(everything_of(None, of) for of in parameters.values())])
        return
    if not found and not parameters:
        matching = "" if pattern == "*" else f" matching {shown(pattern)}"
        echo_wrapped(f"no accumulators{matching} at {transport.address}", err=True)
        return
    titles = ["NAME", "KIND", "DTYPE", "SHAPE", ">STEP", ">COUNT", ">WAITING", ">BYTES", ">ACTIVE"]
    print_table(titles, [*(_row(*one) for one in found), *map(_parameters_row, parameters.values())])


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Prints what is wrong with one name, which must not hide the others."""
    try:
        yield
    except CorruptDataError as error:
        click.echo(f"redisacc: {printable(str(error))}", err=True)


def _row(info: AccumulatorInfo, size: int) -> list[object]:
    # Of a tree, the first leaf's dtype and the number of others.
    dtype, *others = info.dtype.split(",")
    return [
        *(info.name, info.kind, f"{dtype} +{len(others)}" if others else dtype, schema_shape_text(info)),
        *(info.global_step, info.num_accumulated, _waiting_text(info), bytes_text(size) if size else "-"),
        age_text(info.read_at, info.last_activity),
    ]


def _parameters_row(info: ParametersInfo) -> list[object]:
    return [
        *(info.name, "parameters", "-", count_text(info.leaves, "leaf", "leaves"), info.step, "-", "-"),
        *(bytes_text(info.stored_bytes), age_text(info.read_at, info.published_at)),
    ]


def _waiting_text(info: AccumulatorInfo) -> str:
    """Returns the requirement of the first waiting taker and how many more wait, as in "3 +1"; "-" for no taker."""
    if not info.waiting:
        return "-"
    behind = len(info.waiting) - 1
    return str(info.waiting[0].num_required) + (f" +{behind}" if behind else "")


@command()
@name_argument
@click.option("--leaf", "path", metavar="PATH", help="With --index: show rows of this leaf of a tree.")
@click.option(
    "--index",
    "indices",
    type=click.IntRange(0, INT64_MAX),
    multiple=True,
    metavar="I",
    help="Show row I; may be repeated.",
)
def show(*, name: str, path: str | None, indices: tuple[int, ...]) -> None:
    """Show an accumulator: record, workers, waiting takers, rounds taken but not acknowledged, memory; and parameters.

    With --index, show rows of the current round instead: how many gradients each row occurs in, the sum, and the mean
    if a take returns one. A row of a dense accumulator is an entry of its first dimension. This reads the whole round,
    as peek() does.

    For a tree, the first leaves are listed, or all with --json. With --leaf, --index chooses rows of this leaf.

    \b
      redisacc show embeddings
      redisacc show embeddings --index 42 --index 7
      redisacc show model --leaf layers/0/w --index 7
    """
    refuse(path is not None and not indices, "--leaf needs --index")
    keys, transport = keys_of(name), the_server()
    if indices:
        _print_rows(keys.name, path, read_rows(transport, keys, path), indices)
        return
    parameters = read_parameters_info(transport, ParameterKeys(keys.name))
    try:
        info = read_info(transport, keys)
    except NotFoundError:
        if parameters is None:
            raise
        if given("json"):
            echo_json(everything_of(None, parameters))
        else:
            _print_parameters(parameters)
        return
    leaves = read_spec(transport, keys).leaves if info.kind == "tree" else ()
    sizes = _memory(transport, keys, parameters)
    if given("json"):
        facts = {
            **everything_of(info, parameters),
            "memory": {size.what: {"keys": size.keys, "bytes": size.nbytes} for size in sizes},
            "leaves": [_leaf_facts(leaf) for leaf in leaves] if info.kind == "tree" else None,
        }
        echo_json(facts)
        return
    _print_info(info, leaves, sizes)
    if parameters is not None:
        click.echo()
        _print_parameters(parameters)


def _memory(transport: Transport, keys: Keys, parameters: ParametersInfo | None) -> list[Memory]:
    sizes = memory(transport, keys)
    if sizes and parameters is not None:
        # With the state, and versions that slow readers may still be reading.
        sizes.append(Memory("parameters", parameters.parts, parameters.stored_bytes))
    return sizes


def _print_info(info: AccumulatorInfo, leaves: Sequence[Leaf], sizes: Sequence[Memory]) -> None:
    active = ("last active", f"{age_text(info.read_at, info.last_activity)} ago")
    print_facts(info.name, schema_text(info), [*facts_of(info), active, _created(info)])
    if info.known_workers:
        click.echo("\nworkers")
        print_table(
            ["NAME", ">THIS ROUND", ">APPLIED", ">STALE", ">LAST SEEN"],
            [
                [
                    worker.name,
                    worker.in_round or state,
                    worker.applied,
                    worker.stale,
                    f"{age_text(info.read_at, worker.seen_at)} ago",
                ]
                for state, workers in info.states.items()
                for worker in by_name(workers)
            ],
            indent=2,
        )
    if info.waiting:
        click.echo("\nwaiting takers")
        for waiting in info.waiting:
            gone = " (its lease has expired)" if waiting.lease_ends_at < info.read_at else ""
            click.echo(f"  {printable(waiting.taker)} requires {requirement_text(waiting)}{gone}")
    if info.unacknowledged:
        click.echo("\nrounds taken but not acknowledged")
        for taken in info.unacknowledged:
            click.echo(
                f"  step {taken.global_step}, {count_text(taken.num_accumulated, 'gradient')}, "
                f"{age_text(info.read_at, taken.granted_at)} ago by {printable(taken.taker)}\n"
                f"    token {printable(taken.token)}"
            )
    _print_memory(sizes)
    if leaves:
        click.echo("\nleaves")
        facts = [_leaf_facts(leaf) | {"shape": declared_shape_text(leaf.shape)} for leaf in leaves[:_LEAVES]]
        print_table(["PATH", "KIND", "DTYPE", "SHAPE"], [list(of.values()) for of in facts], indent=2)
        if len(leaves) > _LEAVES:
            click.echo(f"  and {len(leaves) - _LEAVES} more, which --json lists")


def _print_parameters(info: ParametersInfo) -> None:
    published = ("published", f"{age_text(info.read_at, info.published_at)} ago")
    print_facts(info.name, "parameters", [*facts_of_parameters(info, info.step_seconds), published, _created(info)])


def _created(info: AccumulatorInfo | ParametersInfo) -> tuple[str, str]:
    return "created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(info.read_at, info.created_at)} ago"


def _print_memory(sizes: Sequence[Memory]) -> None:
    if not sizes:
        click.echo("\nmemory: unknown, because this user may not run MEMORY USAGE")
        return
    click.echo("\nmemory")
    print_table(
        ["KIND", ">KEYS", ">BYTES"],
        [
            *([size.what, size.keys, bytes_text(size.nbytes)] for size in sizes),
            ["total", sum(size.keys for size in sizes), bytes_text(sum(size.nbytes for size in sizes))],
        ],
        indent=2,
    )


def _leaf_facts(leaf: Leaf) -> dict[str, Any]:
    kind = "sparse" if leaf.is_sparse else "dense"
    return {"path": leaf.path, "kind": kind, "dtype": leaf.dtype.name, "shape": leaf.shape}


def _rows_title(name: str, path: str | None, rows: Rows) -> str:
    """Returns the origin of the rows: the accumulator, the leaf, and the gradients of the round."""
    title = printable(name) if path is None else f"{printable(name)}, leaf {printable(path)}"
    text = f"{title}: step {rows.global_step}, {count_text(rows.num_accumulated, 'gradient')}"
    if isinstance(rows.num_present, float):
        weight = f", with a weight of {number_text(rows.total_weight)}"
        has_all = rows.num_present == rows.total_weight
        return text + weight + ("" if has_all else f", {number_text(rows.num_present)} of it with this leaf")
    return text + (f", {rows.num_present} with this leaf" if rows.num_present < rows.num_accumulated else "")


def _norms(values: Array) -> Array:
    wide = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    with np.errstate(all="ignore"):
        norms: Array = np.sqrt((wide * wide).sum(axis=tuple(range(1, wide.ndim))))
    return norms


def _print_rows(name: str, path: str | None, rows: Rows, wanted: Sequence[int]) -> None:
    """Prints rows, and which of the indices that were asked for no gradient holds."""
    columns = {"index": rows.indices, "count": rows.counts, "norm": _norms(rows.results), "sum": rows.sums}
    if rows.has_means:
        columns["mean"] = rows.results
    held = np.isin(rows.indices, np.array(wanted, np.uint64))
    columns = {what: values[held] for what, values in columns.items()}
    if given("json"):
        of_leaf = {} if path is None else {"leaf": path, "num_present": rows.num_present}
        of_round = {"global_step": rows.global_step, "num_accumulated": rows.num_accumulated}
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        echo_json({"name": name, **of_leaf, **of_round, "rows": found})
        return
    click.echo(_rows_title(name, path, rows))
    for index, count, norm, *results in zip(*columns.values(), strict=True):
        click.echo(f"row {index}  in {_held_text(count)}  norm {norm:.6g}")
        for what, result in zip(("sum", "mean"), results, strict=False):
            echo_wrapped(f"  {what:<4}  {_elements(result)}", indent=8)
    for index in [index for index in wanted if index not in rows.indices]:
        click.echo(f"row {index}  in no gradient of this round")


def _held_text(count: Any) -> str:
    """Returns how many gradients held a row, or the sum of their weights."""
    if isinstance(count, (int, np.integer)):
        return count_text(int(count), "gradient")
    return f"gradients with a weight of {number_text(count)}"


def _elements(row: Array) -> str:
    return listed(list(row.reshape(-1)), _ELEMENTS, number_text, " ")
