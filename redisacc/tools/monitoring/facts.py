"""What people read about an accumulator and about parameters, in `redisacc show` and on the page: labels and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from redisacc._arrays.weights import CONSTANT
from redisacc._format.entries import IN_THE_ROUND, WaitingTaker
from redisacc._format.record import BUFFER_LIMIT_BY_WORKER
from redisacc._protocol.lifecycle.info import AccumulatorInfo
from redisacc._protocol.parameters.info import ParametersInfo
from redisacc._text import listed, printable, seconds_text

# Number of metrics that are named: as many as a gradient may have; and in one line.
_METRICS, _NAMED_IN_LINE = 32, 6
# Number of partitions, and of factors, that are named.
_NAMED = 8

# Labels and texts. An empty text means that there is nothing to say.
Facts = list[tuple[str, str]]


def everything_of(info: AccumulatorInfo | None, parameters: ParametersInfo | None) -> dict[str, Any]:
    """Returns all that is known of a name, as JSON gets it: of an accumulator, of parameters, or of both."""
    published = None if parameters is None else dataclasses.asdict(parameters)
    if info is None:
        return {"name": parameters and parameters.name, "parameters": published}
    states = {state: [of.name for of in workers] for state, workers in info.states.items() if state != IN_THE_ROUND}
    return {**dataclasses.asdict(info), **states, "parameters": published}


def schema_text(info: AccumulatorInfo) -> str:
    """Returns what is accumulated, for example "dense float32 [100,None] MEAN"."""
    return f"{info.kind} {info.dtype} {schema_shape_text(info)} {info.reduction_type}"


def facts_of(info: AccumulatorInfo) -> Facts:
    """Returns what is known of an accumulator, besides times."""
    reducer, counted = info.reducer, info.num_accumulated
    of = f" of {info.waiting[0].num_required}" if info.waiting else ""
    has_shape = info.round_shape is not None and info.kind != "tree"
    shape = f", each {declared_shape_text(info.round_shape)}" if has_shape else ""
    dropped = f"{info.stale} stale, {info.repeated} repeated"
    limit = "" if info.buffer_limit == BUFFER_LIMIT_BY_WORKER else f" of {bytes_text(info.buffer_limit)}"
    return [
        ("step", str(info.global_step)),
        ("this round", (f"{counted}{of} gradients" if of else count_text(counted, "gradient")) + shape),
        ("buffered", f"{info.buffered} ({bytes_text(info.buffered_bytes)}{limit})"),
        ("partitions", _partitions_text(info.partitions)),
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
        ("weights", "" if info.staleness_weight == CONSTANT else f"by staleness: {info.staleness_weight}"),
        ("weight", "" if info.total_weight == counted else f"{number_text(info.total_weight)} in this round"),
        ("metrics", metrics_text(info.metrics, _METRICS)),
        ("chief", info.chief),
        ("quorum", str(info.quorum)),
        ("incarnation", info.incarnation),
    ]


def facts_of_parameters(info: ParametersInfo, seconds: float | None) -> Facts:
    """Returns what is known of parameters, besides times, and how many seconds a step takes, if that is known."""
    encoded = "" if info.encoding == "float32" else f", stored as {info.encoding} where they are float32"
    return [
        ("step", f"{info.step}, the last one" if info.finished else progress_text(info.step, info.until)),
        ("step time", "" if seconds is None else step_seconds_text(seconds)),
        ("workers", "" if info.workers is None else f"{info.workers} share the data"),
        ("leaves", f"{info.leaves} ({bytes_text(info.nbytes)}{encoded})"),
        ("optimizer", "" if info.updates is None else f"{info.optimizer}, {count_text(info.updates, 'update')}"),
        ("state", bytes_text(info.state_bytes) if info.state_bytes else ""),
        ("stored", bytes_text(info.stored_bytes)),
        ("partitions", _partitions_text(info.partitions)),
        ("publisher", info.publisher),
        ("incarnation", info.incarnation),
    ]


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


def _partitions_text(numbers: Sequence[int]) -> str:
    """Returns the number of partitions and the first of them, as in "3 (0, 2, 5)"; nothing if there are none."""
    return f"{len(numbers)} ({listed(numbers, _NAMED)})" if numbers else ""


def requirement_text(waiting: WaitingTaker) -> str:
    """Returns what a waiting taker requires, for example "2 with a weight of 4.0, or up to 5 within 3 s"."""
    most = "more" if waiting.most is None else str(waiting.most)
    grace = f", or up to {most} within {waiting.grace:g} s" if waiting.grace else ""
    weight = f" with a weight of {number_text(waiting.min_weight)}" if waiting.min_weight else ""
    return f"{waiting.num_required}{weight}{grace}"


def training_text(info: AccumulatorInfo, parameters: ParametersInfo | None, seconds: float | None) -> str:
    """Returns a line about metrics, and about a run; "" if there is nothing to say."""
    words = [metrics_text(info.metrics, _NAMED_IN_LINE)]
    if parameters is not None and parameters.finished:
        words.append("finished")
    elif info.chief:
        words.append(f"led by {printable(info.chief)}")
    if seconds is not None:
        words.append(f"{step_seconds_text(seconds)} a step")
    if parameters is not None:
        words.append(f"parameters {bytes_text(parameters.nbytes)}")
        words.append(f"state {bytes_text(parameters.state_bytes)}" if parameters.state_bytes else "")
        words.append(f"all versions {bytes_text(parameters.stored_bytes)}")
    return "  ".join(filter(None, words))


def bytes_text(number: float) -> str:
    """Returns a number of bytes as text, for example "12 B", "3.4 KiB" or "56 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1000 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" or number >= 99.5 else f"{number:.3g} {units[0]}"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun, for example "1 gradient" or "2 gradients". ``plural`` is for irregular ones."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def declared_shape_text(shape: Sequence[int | None] | None) -> str:
    """Returns a shape as text, for example "[100,None]" for one unknown dimension; "any" for an unknown rank."""
    return "any" if shape is None else "[" + ",".join(map(str, shape)) + "]"


def schema_shape_text(info: AccumulatorInfo) -> str:
    """Returns the declared shape of an accumulator as text, for example "[100,None]"; "7 leaves" for a tree."""
    if info.num_leaves is None:
        return declared_shape_text(info.shape)
    return count_text(info.num_leaves, "leaf", "leaves")


def staleness_text(staleness: Mapping[int, int]) -> str:
    """Returns how stale gradients were as text, for example "2 by 0 steps, 1 by 3 steps"; "none" for no gradient."""
    return ", ".join(f"{number} by {count_text(steps, 'step')}" for steps, number in staleness.items()) or "none"


def metrics_text(metrics: Mapping[str, float], most: int) -> str:
    """Returns the first metrics as text, for example "loss 0.25, top-5 0.9 and 3 more"; "" for none."""
    return listed(list(metrics.items()), most, lambda item: f"{item[0]} {item[1]:.4g}")


def progress_text(step: int, until: int | None) -> str:
    """Returns a step and how far it is on the way to the last one, for example "7 of 20 (35 %)"; or the step alone."""
    return str(step) if until is None or until <= 0 else f"{step} of {until} ({100 * step // until} %)"


def step_seconds_text(seconds: float) -> str:
    """Returns the time of a step as text, for example "12 ms" or "3.4 s"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else seconds_text(seconds)


def number_text(value: Any) -> str:
    """Returns an element as text: integers exactly, others with the digits that tell them from their neighbors."""
    # Of a complex number, without the brackets.
    return str(value).strip("()")
