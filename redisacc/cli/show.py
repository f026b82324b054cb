"""The command `redisacc show`: shows an accumulator, or rows of its current round, or a leaf of its trees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import click

from redisacc._admin.memory import Memory, memory
from redisacc._admin.rows import CurrentRows, read_spec
from redisacc._data.tree.spec import Leaf, TreeSpec
from redisacc._data.validation import INT64_MAX
from redisacc._data.weights import CONSTANT
from redisacc._format.entries import WaitingTaker
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.record import BUFFER_LIMIT_BY_WORKER
from redisacc._format.worker_states import IN_THE_ROUND
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._redis.transport import Transport
from redisacc._text import age_text, printable
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import json_option, keys_of, leaf_option, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import (
    by_name,
    bytes_text,
    count_text,
    declared_shape_text,
    echo_json,
    metrics_text,
    number_text,
    print_facts,
    print_table,
    progress_text,
    schema_shape_text,
    staleness_text,
    step_seconds_text,
)
from redisacc.cli.shared.row_output import ELEMENTS, leaf_facts, print_leaf, print_leaves, print_rows, select_rows
from redisacc.errors import NotFoundError

__all__ = ["show"]

# Number of partitions named.
_PARTITIONS = 8
# Number of leaves shown without --leaves.
_LEAVES = 20
# Number of metrics shown: as many as a gradient may have.
_METRICS = 32


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
            echo_json({"name": keys.name, "parameters": dataclasses.asdict(parameters)})
        else:
            _print_parameters(parameters)
        return
    spec = read_spec(transport, keys) if info.kind == "tree" else None
    leaves = spec.leaves if isinstance(spec, TreeSpec) else ()
    if list_leaves:
        if info.kind != "tree":
            raise click.UsageError(f"--leaves: the gradients of {printable(keys.name)} are not trees, but {info.kind}")
        print_leaves(leaves, as_json=as_json)
        return
    sizes = _memory(transport, keys, parameters)
    if as_json:
        facts = {
            **dataclasses.asdict(info),
            **{
                state: [worker.name for worker in workers]
                for state, workers in info.states.items()
                if state != IN_THE_ROUND
            },
            "memory": {size.what: {"keys": size.keys, "bytes": size.nbytes} for size in sizes},
            "leaves": [leaf_facts(leaf) for leaf in leaves] if info.kind == "tree" else None,
        }
        echo_json(facts if parameters is None else {**facts, "parameters": dataclasses.asdict(parameters)})
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
    schema = f"{info.kind} {info.dtype} {schema_shape_text(info)} {info.reduction_type}"
    print_facts(info.name, schema, _facts_of(info))
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


def _facts_of(info: AccumulatorInfo) -> list[tuple[str, str]]:
    """Returns labels and texts. An empty text means that there is nothing to say."""
    read_at, reducer, counted = info.read_at, info.reducer, info.num_accumulated
    of = f" of {info.waiting[0].num_required}" if info.waiting else ""
    has_shape = info.round_shape is not None and info.kind != "tree"
    shape = f", each {declared_shape_text(info.round_shape)}" if has_shape else ""
    attempts = f"; {count_text(info.attempts, 'attempt')} under way or over"
    dropped = f"{info.stale} stale, {info.repeated} repeated"
    limit = "" if info.buffer_limit == BUFFER_LIMIT_BY_WORKER else f" of {bytes_text(info.buffer_limit)}"
    return [
        ("step", str(info.global_step)),
        ("this round", (f"{counted}{of} gradients" if of else count_text(counted, "gradient")) + shape),
        ("buffered", f"{info.buffered} ({bytes_text(info.buffered_bytes)}{limit})"),
        ("partitions", _partitions_text(info.partitions) + attempts if info.partitions else ""),
        (
            "reducer",
            f"{reducer.who}: in time for {reducer.stored} rounds, late for {reducer.late}" if reducer else "",
        ),
        ("in total", f"{info.applied} applied, {dropped}, {info.duplicates} sent twice, {info.takes} taken"),
        ("mean", _mean_text(info)),
        ("accepts", "one gradient of each worker in a round" if info.once_per_worker else ""),
        ("adds", "in the order of the workers' numbers" if info.order == "worker" else ""),
        ("accepts", f"gradients up to {count_text(info.max_staleness, 'step')} late" if info.max_staleness else ""),
        ("late", f"in this round: {staleness_text(info.staleness)}" if info.max_staleness else ""),
        ("weights", "" if info.staleness_weight == CONSTANT else f"by staleness: {_rule_text(info.staleness_weight)}"),
        ("weight", "" if info.total_weight == counted else f"{number_text(info.total_weight)} in this round"),
        ("metrics", metrics_text(info.metrics, _METRICS)),
        ("chief", info.chief),
        ("quorum", str(info.quorum)),
        ("last active", f"{age_text(read_at, info.last_activity)} ago"),
        ("created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(read_at, info.created_at)} ago"),
        ("incarnation", info.incarnation),
    ]


def _print_parameters(info: ParametersInfo) -> None:
    encoded = "" if info.encoding == "float32" else f", stored as {info.encoding} where they are float32"
    latest = info.latest
    facts = [
        ("step", f"{info.step}, the last one" if info.finished else progress_text(info.step, info.until)),
        ("step time", "" if latest is None or math.isnan(latest.seconds) else step_seconds_text(latest.seconds)),
        ("workers", "" if info.workers is None else f"the data is shared among {info.workers}"),
        ("leaves", f"{info.leaves} ({bytes_text(info.nbytes)}{encoded})"),
        ("optimizer", "" if info.updates is None else f"{info.optimizer}, {count_text(info.updates, 'update')}"),
        ("state", bytes_text(info.state_bytes) if info.state_bytes else ""),
        ("stored", bytes_text(info.stored_bytes)),
        ("partitions", _partitions_text(info.partitions)),
        ("published", f"{age_text(info.read_at, info.published_at)} ago by {info.publisher}"),
        ("created", f"{info.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(info.read_at, info.created_at)} ago"),
        ("incarnation", info.incarnation),
    ]
    print_facts(info.name, "parameters", facts)


def _mean_text(info: AccumulatorInfo) -> str:
    """Returns a clause about the divisor of a mean if it is not the usual one; else nothing."""
    counted = "by the number of" if info.normalize == "count" else "by"
    if info.kind != "tree":
        if info.sparse_mean == "round":
            return f"divides {counted} the gradients of the round, not by those that held an index"
        return "divides by the number of gradients, whatever their weights" if info.normalize == "count" else ""
    divisor = "that have the leaf" if info.missing == "skip" else "of the round"
    rows = ", and a row by those that held its index" if info.sparse_mean == "index" else ""
    return f"divides {counted} the gradients {divisor}{rows}"


def _requirement_text(waiting: WaitingTaker) -> str:
    most = "more" if waiting.most is None else str(waiting.most)
    grace = f", or up to {most} within {waiting.grace:g} s" if waiting.grace else ""
    weight = f" with a weight of {number_text(waiting.min_weight)}" if waiting.min_weight else ""
    return f"{waiting.num_required}{weight}{grace}"


def _rule_text(rule: str | tuple[float, ...]) -> str:
    """Returns a rule for weights of staleness as people read it; of many factors, the first ones."""
    if isinstance(rule, str):
        return rule
    text = ", ".join(map(number_text, rule[:ELEMENTS]))
    return text + (f" … and {len(rule) - ELEMENTS} more" if len(rule) > ELEMENTS else "")


def _partitions_text(numbers: Sequence[int]) -> str:
    """Returns the number of partitions and the first of them, as in "9 (0, 2, 3, …)"; nothing if there are none."""
    named = ", ".join(map(str, numbers[:_PARTITIONS])) + (", …" if len(numbers) > _PARTITIONS else "")
    return f"{len(numbers)} ({named})" if numbers else ""


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
