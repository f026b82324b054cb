"""Measures rounds, steps of a model, and weights going out, between the hosts of one network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import models, workloads
from benchmarks.environment import Run
from benchmarks.network import arrangements
from benchmarks.network.crews import Network, host_names, start
from benchmarks.network.hosts import Hosts
from benchmarks.sections import rounds, steps
from benchmarks.sections.rounds import Peer
from benchmarks.workloads import Workload

ROUNDS = {row.name: row for row in workloads.SIX_ROWS}
MODEL = models.mixed()
DENSE = [row for row in workloads.SIX_ROWS if row.kind == "dense"]
WEIGHTS = {f"weights-{row.name}": Workload(f"weights-{row.name}", "dense", row.shape) for row in DENSE}
# A training with an optimizer.
UPDATES = {model.name: model for model in (models.dense("updates-4MB"), models.dense("updates-31MB", 8))}
# The same with a backward pass that takes as long as the upload.
OVERLAPS = {model.name: model for model in (models.dense("overlap-31MB", 8),)}
OVERLAPPED = (2, 4)
ROWS = [*ROUNDS, MODEL.name, *UPDATES, *OVERLAPS, *WEIGHTS]
# Beyond this many workers, the processors of one machine are the limit of these rows.
MOST_UPDATING = 8
# The rows that show how a round grows with the number of workers. The others are measured with 4 and 8.
GROWING = ("sparse-10x16-of-1000", "sparse-1000x64-of-10000", "dense-4MB", "weights-dense-4MB")


# Bytes of a process of a peer, without its arrays: tensorflow-cpu 2.21, torch 2.13, and the others.
PROCESS = {"tensorflow": 220e6, "gloo": 140e6}
OTHER_PROCESS = 32e6
# A process holds two variants of each array, and TensorFlow as many variables.
COPIES = 4


def chosen(workers: int, only: Sequence[str] | None) -> list[str]:
    """Returns the names of the rows that are measured with a number of workers."""
    if only:
        return [name for name in ROWS if name in only]
    usual = dict.fromkeys(UPDATES, workers <= MOST_UPDATING) | dict.fromkeys(OVERLAPS, workers in OVERLAPPED)
    return [name for name in ROWS if usual.get(name, workers in (4, 8) or name in GROWING)]


def memory_needed(workers: int, only: Sequence[str] | None, peers: Sequence[str]) -> float:
    """Returns about how many bytes the processes need that measure a network at the same time."""
    arrays = COPIES * sum(ROUNDS[name].bytes for name in chosen(workers, only) if name in ROUNDS)
    # The server counts as one process more, because it holds all gradients.
    return sum((workers + 2) * (PROCESS.get(peer, OTHER_PROCESS) + arrays) for peer in peers)


def measure(run: Run, rate: float, workers: int, only: Sequence[str] | None, peers: Sequence[str]) -> dict[str, Any]:
    """Builds a network, measures its rows one after the other, and removes it.

    Args:
        run: the run.
        rate: rate of the links in Gbit/s.
        workers: number of workers.
        only: names of rows; None: the rows of this number of workers.
        peers: keys of peers.

    Returns:
        The results of each row, by name.
    """
    wanted = chosen(workers, only)
    found: dict[str, Any] = {"gigabits": rate, "workers": workers, "rows": {}, "names": {}, "versions": {}}
    with Hosts(host_names(workers, arrangements.SERVERS), rate) as hosts:
        found["congestion_control"] = hosts.congestion_control()
        # Weights are the gradient of one worker.
        for kind, every, crew in (("rounds", ROUNDS, workers), ("weights", WEIGHTS, 1)):
            rows = [every[name] for name in wanted if name in every]
            if rows:
                with _network(run, hosts, workers, kind, run.arrays(rows, [crew])) as network:
                    started = _start(network, peers, found)
                    # Three alternations of seven rounds.
                    effort = (3, 600.0, 1) if run.quick else (21, 600.0, 3)
                    block = 1 if run.quick else 7
                    found["rows"] |= rounds.compete(started, rows, *effort, block=block, memory=kind == "rounds")
        if MODEL.name in wanted:
            folder = run.directory / f"models-{rate:g}-{workers}"
            models.write(folder, [MODEL], workers)
            settings = {"arrays": str(folder), "workloads": [], "model": MODEL.name}
            with _network(run, hosts, workers, "steps", settings) as network:
                print(f"  a step of a model of {len(MODEL.leaves)} arrays")
                found["steps"] = steps.compete(_start(network, peers, found), 1 if run.quick else 21, 1)
        for model in [UPDATES[name] for name in wanted if name in UPDATES]:
            folder = run.directory / f"{model.name}-{rate:g}-{workers}"
            models.write(folder, [model], workers)
            settings = {"arrays": str(folder), "workloads": [], "model": model.name}
            with _network(run, hosts, workers, "updates", settings) as network:
                print(f"  {model.name}")
                started = _start(network, peers, found, arrangements.start)
                section = steps.compete(started, 3 if run.quick else 15, 2)
                for key, peer in section["peers"].items():
                    peer["wire_seconds"] = arrangements.wire_time(key, workers, model.bytes, rate)
                found.setdefault("updates", {})[model.name] = section
        for model in [OVERLAPS[name] for name in wanted if name in OVERLAPS]:
            folder = run.directory / f"{model.name}-{rate:g}-{workers}"
            models.write(folder, [model], workers)
            backward = arrangements.upload_time(workers, model.bytes, rate)
            settings = {"arrays": str(folder), "workloads": [], "model": model.name, "backward": backward}
            with _network(run, hosts, workers, "updates", settings) as network:
                print(f"  {model.name}, with a backward pass of {1e3 * backward:.0f} ms")
                started = _start(network, peers, found, arrangements.start_overlapping)
                section = steps.compete(started, 3 if run.quick else 15, 2)
                found.setdefault("overlap", {})[model.name] = {**section, "backward_seconds": backward}
    return found


@contextlib.contextmanager
def _network(run: Run, hosts: Hosts, workers: int, kind: str, settings: dict[str, Any]) -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        yield Network(run, hosts, workers, kind, settings, stack)


def _start(
    network: Network,
    keys: Sequence[str],
    found: dict[str, Any],
    start: Callable[[Network, Sequence[str]], list[Peer]] = start,
) -> list[Peer]:
    """Starts peers, and adds their names and versions to the results."""
    peers = start(network, keys)
    found["names"] |= {peer.key: peer.crew.name for peer in peers}
    found["versions"] |= {peer.crew.name: peer.crew.versions for peer in peers} | network.versions
    return peers
