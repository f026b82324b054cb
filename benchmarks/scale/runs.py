"""What is simulated: crews of 16 to 1,000 hosts, arrangements, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.network.arrangements import wire_time
from benchmarks.scale.costs import Costs
from benchmarks.scale.model import Arrangement, Network, Outcome, simulate
from benchmarks.scale.step import Step, automatic

HOSTS = (16, 64, 256, 1000)
GIGABITS = (1, 10, 100)
MODELS = {"4 MB": 4_000_000, "31 MB": 31_600_000, "400 MB": 400_000_000}
# Of the comparisons of arrangements and of remedies.
COMPARED = ("31 MB", 10)
EXTRA = 8
# Workers on a host that add their gradients up before they send one.
TOGETHER = 8
STEPS = 3


def beside(hosts: int, nbytes: int, partitions: int | None = None) -> Arrangement:
    """Returns a node on each worker's host. ``partitions``: how many of them store parts; None: as "auto" chooses."""
    return Arrangement(Step(hosts, partitions or automatic(hosts, nbytes), nbytes), beside=True)


def arrangements(hosts: int, nbytes: int) -> dict[str, Arrangement]:
    """Returns the arrangements that are compared, by name."""
    one = Arrangement(Step(hosts, 1, nbytes))
    return {
        "one server, no reducer": replace(one, reducers=False),
        "one server": one,
        f"{EXTRA} hosts of their own": Arrangement(Step(hosts, min(EXTRA, automatic(EXTRA, nbytes)), nbytes)),
        "a node on each worker's host": beside(hosts, nbytes),
    }


def candidates(hosts: int) -> list[int]:
    """Returns the numbers of partitions of which the best is chosen."""
    return [number for number in (16, 32, 64, 128) if number < hosts] + [min(hosts, 256)]


def remedies(hosts: int, nbytes: int, best: int) -> dict[str, Arrangement]:
    """Returns what could be done, each with everything before it, by name.

    Args:
        hosts: number of hosts.
        nbytes: bytes of the model.
        best: the best number of partitions.
    """
    every = {"as it is": beside(hosts, nbytes), "best number of partitions": beside(hosts, nbytes, best)}
    direct = replace(beside(hosts, nbytes, best), direct=True)
    every["nodes announce gradients to their reducers"] = direct
    every["the chief hears of no parts"] = replace(direct, deaf=True)
    every["reducers remove parts"] = replace(direct, deaf=True, sweepers=True)
    few = max(hosts // TOGETHER, 2)
    added = replace(every["reducers remove parts"], step=Step(few, min(best, few), nbytes))
    every[f"{TOGETHER} workers on a host add up first"] = added
    return every


def run(costs: Costs, hosts: Sequence[int] = HOSTS) -> dict[str, Any]:
    """Simulates everything. Takes about two minutes for all hosts."""
    grown = []
    for name, nbytes in MODELS.items():
        for gigabits in GIGABITS:
            for number in hosts:
                found = _simulated(beside(number, nbytes), gigabits, costs)
                gloo = wire_time("gloo", number, nbytes, gigabits)
                grown.append({"model": name, "gigabits": gigabits, "hosts": number, "gloo": gloo, **found})
    name, gigabits = COMPARED
    nbytes = MODELS[name]
    compared = [
        {"hosts": number, "name": title, **_simulated(arrangement, gigabits, costs)}
        for number in hosts
        for title, arrangement in arrangements(number, nbytes).items()
    ]
    done = []
    for number in hosts:
        times = {count: _simulate(beside(number, nbytes, count), gigabits, costs) for count in candidates(number)}
        best = min(times, key=lambda count, times=times: times[count].seconds)
        done += [
            {"hosts": number, "name": title, **_simulated(arrangement, gigabits, costs)}
            for title, arrangement in remedies(number, nbytes, best).items()
        ]
    return {"grown": grown, "compared": compared, "remedies": done}


def _simulate(arrangement: Arrangement, gigabits: float, costs: Costs) -> Outcome:
    return simulate(arrangement, Network(gigabits), costs, STEPS)


def _simulated(arrangement: Arrangement, gigabits: float, costs: Costs) -> dict[str, Any]:
    outcome, step = _simulate(arrangement, gigabits, costs), arrangement.step
    return {
        "partitions": step.partitions,
        "seconds": outcome.seconds,
        "busy": dict(list(outcome.busy.items())[:4]),
        "told_bytes": step.told_bytes,
        "connections": step.connections,
    }
