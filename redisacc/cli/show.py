"""The command `redisacc show`: shows an accumulator, or rows of its current round, or a leaf of its trees."""

from __future__ import annotations

from collections.abc import Sequence

import click

from redisacc._admin.memory import Memory, memory
from redisacc._admin.rows import CurrentRows, read_spec
from redisacc._data.spec import Leaf
from redisacc._data.validation import INT64_MAX
from redisacc._format.entries import WaitingTaker
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._monitoring.facts import (
    bytes_text,
    count_text,
    everything_of,
    facts_of,
    facts_of_parameters,
    number_text,
    schema_text,
)
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._redis.transport import Transport
from redisacc._text import age_text, printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import json_option, keys_of, leaf_option, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import by_name, echo_json, print_facts, print_table
from redisacc.cli.shared.row_output import leaf_facts, print_leaf, print_leaves, print_rows, select_rows
from redisacc.errors import NotFoundError

__all__ = ["show"]

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
        rows = select_rows(current, indices, top, by)
        print_rows(keys.name, path, current.reduction_type, rows, indices, as_json=as_json)
        return
    if path is not None:
        current = CurrentRows(transport, keys, path)
        assert current.leaf is not None
        print_leaf(keys.name, current.leaf, current.all(), as_json=as_json)
        return
    parameters = None if list_leaves else read_parameters_info(transport, ParameterKeys(keys.name))
    try:
        info = read_info(transport, keys)
    except NotFoundError:
        if parameters is None:
            raise
        if as_json:
            echo_json(everything_of(None, parameters))
        else:
            _print_parameters(parameters)
        return
    leaves = read_spec(transport, keys).leaves if info.kind == "tree" else ()
    if list_leaves:
        if info.kind != "tree":
            raise click.UsageError(f"--leaves: the gradients of {printable(keys.name)} are not trees, but {info.kind}")
        print_leaves(leaves, as_json=as_json)
        return
    sizes = _memory(transport, keys, parameters)
    if as_json:
        facts = {
            **everything_of(info, parameters),
            "memory": {size.what: {"keys": size.keys, "bytes": size.nbytes} for size in sizes},
            "leaves": [leaf_facts(leaf) for leaf in leaves] if info.kind == "tree" else None,
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
                    str(worker.in_round) if worker.in_round else state,
                    str(worker.applied),
                    str(worker.stale),
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
            click.echo(f"  {printable(waiting.taker)} requires {_requirement_text(waiting)}{gone}")
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
        print_leaves(leaves[:_LEAVES], as_json=False, indent=2)
        if len(leaves) > _LEAVES:
            click.echo(f"  and {len(leaves) - _LEAVES} more, which --leaves lists")


def _print_parameters(info: ParametersInfo) -> None:
    published = ("published", f"{age_text(info.read_at, info.published_at)} ago")
    print_facts(info.name, "parameters", [*facts_of_parameters(info, info.step_seconds), published, _created(info)])


def _created(info: AccumulatorInfo | ParametersInfo) -> tuple[str, str]:
    return "created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(info.read_at, info.created_at)} ago"


def _requirement_text(waiting: WaitingTaker) -> str:
    most = "more" if waiting.most is None else str(waiting.most)
    grace = f", or up to {most} within {waiting.grace:g} s" if waiting.grace else ""
    weight = f" with a weight of {number_text(waiting.min_weight)}" if waiting.min_weight else ""
    return f"{waiting.num_required}{weight}{grace}"


def _print_memory(sizes: Sequence[Memory]) -> None:
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
