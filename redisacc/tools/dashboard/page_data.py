"""What the page shows, as JSON: a text for each section, so that only the sections that change are sent again.

Names of accumulators and workers are anybody's text. Here they are made printable and cut; the page shows them as text
and never as HTML.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._clock import clock
from redisacc._format.history_entries import PastStep
from redisacc._format.record import BUFFER_LIMIT_BY_WORKER
from redisacc._text import printable
from redisacc.tools.monitoring.facts import Facts, facts_of, facts_of_parameters, schema_text
from redisacc.tools.monitoring.monitor import Monitor, View, curves
from redisacc.tools.monitoring.nodes import Node
from redisacc.tools.monitoring.rounds import Histogram, RoundTimes

# Maximum length of a name on the page.
NAME = 200
# Maximum number of accumulators, and of workers of the one in detail, that a page shows.
MOST_ROWS, MOST_WORKERS = 1000, 1000
# Maximum number of waiting takes, of rounds without an acknowledgement, and of problems.
MOST_ENTRIES = 20
# Maximum number of rounds whose times a page shows.
MOST_ROUNDS = 24
# Maximum number of metrics with a curve, and of points of each: more would make an update long, and say no more.
MOST_CURVES, MOST_POINTS = 8, 100

# What accumulators can be sorted by → the key, by which the greatest comes first.
SORTS: dict[str, Callable[[View], float]] = {
    "name": lambda _: 0,
    "step": lambda view: view.info.global_step,
    "late": lambda view: len(view.info.late),
    "applied": lambda view: view.rates[0],
}


@dataclass(frozen=True)
class Query:
    """What a page wants to see.

    Attributes:
        text: only accumulators whose name contains it, whatever the case.
        sort: a key of ``SORTS``.
        rows: how many accumulators at most.
        detail: the id of the accumulator to show in detail; "" for none.
        workers: how many of its workers at most.
    """

    text: str = ""
    sort: str = "name"
    rows: int = 100
    detail: str = ""
    workers: int = 100


def parse_query(params: Mapping[str, str]) -> Query:
    """Returns what the parameters of a URL ask for. What they ask for beyond the limits, they do not get."""

    def number(name: str, default: int, most: int) -> int:
        text = params.get(name, "")
        return min(int(text), most) if text.isascii() and text.isdigit() and len(text) <= 6 else default

    sort = params.get("sort", "name")
    return Query(
        text=params.get("text", "")[:200],
        sort=sort if sort in SORTS else "name",
        rows=number("rows", 100, MOST_ROWS),
        detail=params.get("detail", "")[:16],
        workers=number("workers", 100, MOST_WORKERS),
    )


def id_of(name: str) -> str:
    """Returns what the page calls an accumulator: short, whatever its name is."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def sections(monitor: Monitor, query: Query, problem: str) -> dict[str, str]:
    """Returns the sections of a page, as JSON.

    Args:
        monitor: what is known of the server.
        query: what the page wants to see.
        problem: why the latest refresh failed; "" if it did not.

    Returns:
        ``server``, ``order`` (the ids of the accumulators that are shown, in order), ``row:ID`` for each of them, and
        for the accumulator in detail ``detail:NAME`` for each of its sections.
    """
    views = monitor.views
    wanted = query.text.casefold()
    matching = [view for name, view in views.items() if wanted in name.casefold()]
    if query.sort != "name":
        matching.sort(key=SORTS[query.sort], reverse=True)
    # Runs first, and then accumulators without parameters.
    matching.sort(key=lambda view: view.parameters is None)
    shown = matching[: query.rows]
    found: dict[str, Any] = {
        "server": _server(monitor, problem, len(matching)),
        "order": [id_of(view.info.name) for view in shown],
    }
    for view in shown:
        found[f"row:{id_of(view.info.name)}"] = _row(view)
    detailed = next((view for name, view in views.items() if id_of(name) == query.detail), None)
    if detailed is not None:
        for name, value in _detail(detailed, query.workers).items():
            found[f"detail:{name}"] = value
    else:
        found["detail:id"] = None
    return {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in found.items()}


def _server(monitor: Monitor, problem: str, matching: int) -> dict[str, Any]:
    views, now = monitor.views.values(), clock.now()
    applied, stale, takes = (_rounded(sum(view.rates[n] for view in views)) for n in range(3))
    counts = {
        what: sum(len(getattr(view.info, what)) for view in views)
        for what in ("waiting", "unacknowledged", "late", "gone")
    }
    return {
        "address": monitor.address,
        "problem": printable(problem),
        "problems": [printable(text) for text in monitor.problems[:MOST_ENTRIES]],
        "nodes": [_node(node) for node in monitor.nodes],
        "accumulators": len(views),
        "matching": matching,
        "applied": applied,
        "stale": stale,
        "takes": takes,
        "bytes": _rounded(sum(view.heard.bytes_per_second(now) for view in views)),
        **counts,
    }


def _node(node: Node) -> dict[str, Any]:
    facts = dataclasses.asdict(node)
    # Clients and load change all the time, and a few per cent of it matter to nobody.
    for name in ("commands_per_second", "received_per_second", "sent_per_second"):
        facts[name] = None if facts[name] is None else _rounded(facts[name])
    return facts


def _row(view: View) -> dict[str, Any]:
    info = view.info
    head = info.waiting[0] if info.waiting else None
    return {
        "name": printable(info.name, NAME),
        "step": str(info.global_step),
        "count": info.num_accumulated,
        # The next take will probably require as many as the last one.
        "required": head.num_required if head else info.quorum.least or view.required,
        "waiting": len(info.waiting),
        "late": len(info.late),
        "training": view.parameters is not None,
        "stalled": bool(view.awaited),
        "applied": _rounded(view.rates[0]),
        "bytes": _rounded(view.heard.bytes_per_second(clock.now())),
    }


def _detail(view: View, most_workers: int) -> dict[str, Any]:
    info = view.info
    return {
        "id": id_of(info.name),
        "facts": {
            "name": printable(info.name),
            "kind": printable(schema_text(info), NAME),
            "listed": _listed(facts_of(info)),
            "buffer_limit": None if info.buffer_limit == BUFFER_LIMIT_BY_WORKER else info.buffer_limit,
            "created": _ms(info.created_at),
            "reducer": None if info.reducer is None else info.reducer.state,
        },
        "training": _training(view),
        "curves": _curves(info.metrics, view.steps),
        "filling": {
            "step": str(info.global_step),
            "count": info.num_accumulated,
            "buffered_bytes": info.buffered_bytes,
            "total_weight": info.total_weight,
            "staleness": [[steps, number] for steps, number in info.staleness.items()] if info.max_staleness else [],
            "began": _heard(view.heard.filling.began),
            "first": _heard(view.heard.filling.first) if info.num_accumulated else None,
            "last": _heard(view.heard.filling.last) if info.num_accumulated else None,
        },
        "waiting": [
            {
                "taker": printable(of.taker, NAME),
                "required": of.num_required,
                "most": of.most,
                "grace": of.grace,
                "weight": of.min_weight,
            }
            for of in info.waiting[:MOST_ENTRIES]
        ],
        "unacknowledged": [
            {
                "step": str(of.global_step),
                "count": of.num_accumulated,
                "taker": printable(of.taker, NAME),
                "granted": _ms(of.granted_at),
            }
            for of in info.unacknowledged[:MOST_ENTRIES]
        ],
        "stall": _stall(view),
        "workers": _workers(view, most_workers),
        "rounds": [_round(of) for of in itertools.islice(reversed(view.heard.rounds), MOST_ROUNDS)],
        "staleness": _bars(view.heard.histograms["staleness_steps"]) if info.max_staleness else [],
    }


def _stall(view: View) -> dict[str, Any] | None:
    """Returns who the first waiting taker waits for, and since when nothing has come; None if it is not held up."""
    awaited = view.awaited
    if not awaited:
        return None
    names = [printable(of.name, NAME) for of in awaited[:MOST_ENTRIES]]
    since = view.heard.filling.last if view.info.num_accumulated else view.heard.filling.began
    return {"workers": names, "more": len(awaited) - len(names), "since": _heard(since)}


def _training(view: View) -> dict[str, Any] | None:
    parameters, info = view.parameters, view.info
    if parameters is None:
        return None
    seconds = view.step_seconds
    return {
        "step": str(parameters.step),
        "until": None if parameters.until is None else str(parameters.until),
        "share": None if not parameters.until or parameters.until < 0 else parameters.step / parameters.until,
        "finished": parameters.finished,
        "listed": _listed([("led by", info.chief or "nobody"), *facts_of_parameters(parameters, seconds)]),
        "left": None
        if seconds is None or parameters.until is None
        else _rounded(seconds * (parameters.until - parameters.step)),
    }


def _listed(facts: Facts) -> list[tuple[str, str]]:
    return [(label, printable(text, NAME)) for label, text in facts if text]


def _curves(latest: Mapping[str, float], steps: Sequence[PastStep]) -> dict[str, Any]:
    """Returns the curves of the metrics that the latest round had: names, latest values, steps and values."""
    # The loss comes first.
    names = sorted(latest, key=lambda name: "loss" not in name)[:MOST_CURVES] if steps else []
    at, values = curves(steps, names, MOST_POINTS)
    return {
        "names": names,
        "latest": [_digits(latest[name]) for name in names],
        "more": len(latest) - len(names) if steps else 0,
        "steps": at,
        "values": [[None if value is None else float(f"{value:.4g}") for value in of] for of in values],
    }


def _digits(value: float) -> str:
    """Returns a value as text, which JSON has for infinity and NaN, too."""
    return f"{value:.4g}"


def _workers(view: View, most: int) -> dict[str, Any]:
    states = view.info.states.items()
    found = [(state, worker) for state, workers in states for worker in workers]
    numbers = {state: len(workers) for state, workers in states}
    times = {name: _rounded(seconds) for name, seconds in view.heard.worker_seconds.items()}
    rows = [
        [
            *(printable(of.name, NAME), printable(of.process, NAME), of.memory, state),
            *(of.in_round, of.applied, of.stale, _ms(of.seen_at), times.get(of.name)),
        ]
        for state, of in found[:most]
    ]
    return {"numbers": numbers, "rows": rows}


def _round(of: RoundTimes) -> list[Any]:
    """Returns a round: step, gradients, bytes, taker, and how many seconds each of its phases took."""
    # Parameters that were published while gradients arrived already held nobody up.
    phases = [(of.began, of.first), (of.first, of.last), (of.last, of.taken), (of.taken, of.published)]
    return [
        str(of.step),
        of.num_accumulated,
        of.nbytes,
        printable(of.taker, NAME),
        [None if start is None or end is None else round(max(end - start, 0.0), 4) for start, end in phases],
    ]


def _bars(histogram: Histogram) -> list[list[Any]]:
    """Returns [bound, number] for each bound up to the last one that has a number."""
    found = [[bound, number] for bound, number in zip([*histogram.bounds, None], histogram.counts, strict=True)]
    while found and not found[-1][1]:
        found.pop()
    return found


def _ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)


def _heard(at: float | None) -> float | None:
    """Returns a moment of ``clock.now()``, as the page gets it: in seconds, to the millisecond."""
    return None if at is None else round(at, 3)


def _rounded(number: float) -> float:
    """Returns three digits of a number. More would change with every update, and say no more."""
    return float(f"{number:.3g}")
