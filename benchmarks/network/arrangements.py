"""Where the processes of a training with an optimizer run, and the peers that they are compared with.

The chief runs on the first worker's host. TensorFlow and ``rounds()`` have theirs on a host of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.network.crews import REDUCER, SERVER, UPDATER, Network, gloo, tensorflow
from benchmarks.sections.rounds import Peer

# The most hosts of their own that servers have in an arrangement.
SERVERS = 2
# Elements of weights and gradients are below 16.
_TOLERANCE = {"float32": 0.0, "bfloat16": 16 / 2**8}


@dataclass(frozen=True)
class Arrangement:
    """A training with an optimizer, or with ``rounds()``.

    Attributes:
        name: name in the report.
        encoding: how gradients and parameters are encoded.
        beside_workers: whether each worker's host has a node of the cluster.
        extra: how many hosts have only a server, or a node of the cluster.
        method: "updates", or "loop" for ``rounds()``. With a backward pass of ``backward`` seconds, a setting of the
            network: "after" if the gradient leaves after it, "streamed" if the leaves do during it.
    """

    name: str
    encoding: str = "float32"
    beside_workers: bool = False
    extra: int = 0
    method: str = "updates"

    def __call__(self, network: Network, key: str) -> Peer:
        """Starts the servers with their reducers, the chief and the workers."""
        beside = network.workers_hosts()
        extra = [SERVER, *(f"{SERVER}{number}" for number in range(1, self.extra))][: self.extra]
        hosts = [*(beside if self.beside_workers else ()), *extra]
        encoding, gradients = {"encoding": self.encoding}, {}
        if len(hosts) > 1:
            url, pids = network.cluster(hosts)
            gradients["partitions"] = len(hosts)
        else:
            url, pids = network.server(persistent=False, beside=REDUCER)
        where: dict[str, Any] = {"chief": beside[0]} if self.method != "loop" else {}
        more = {"url": url, "method": self.method, "tolerance": _TOLERANCE[self.encoding]}
        more |= {"chief_options": encoding, "worker_options": encoding, "gradient_options": gradients}
        return network.peer(key, self.name, sys.executable, "redisacc", pids=pids, **where, **more)


def bare(network: Network, key: str) -> Peer:
    """Starts bare sockets that do the same work as "a node on each worker's host"."""
    hosts = network.workers_hosts()
    started = [network.server(host, persistent=False) for host in hosts]
    nodes = [(parts.hostname, parts.port) for parts in (urlsplit(url) for url, _ in started)]
    pids = [pid for _, pids in started for pid in pids]
    helpers = (UPDATER,) * len(hosts)
    name = "bare sockets, a server on each worker's host"
    return network.peer(key, name, sys.executable, "bare", pids=pids, taker=False, helpers=helpers, nodes=nodes)


# The first one is what the others are compared with.
PEERS: dict[str, Callable[[Network, str], Peer | None]] = {
    "tensorflow": tensorflow,
    "gloo": gloo,
    "bare": bare,
    "rounds": Arrangement("rounds(), one server", extra=1, method="loop"),
    "nodes": Arrangement("a node on each worker's host", beside_workers=True),
    "nodes-bfloat16": Arrangement("a node on each worker's host, bfloat16", "bfloat16", beside_workers=True),
    "extra": Arrangement("nodes on two hosts of their own", extra=2),
    "extra-bfloat16": Arrangement("nodes on two hosts of their own, bfloat16", "bfloat16", extra=2),
    "both": Arrangement("a node on each worker's host and on one more", beside_workers=True, extra=1),
    "one": Arrangement("one server", extra=1),
    "one-bfloat16": Arrangement("one server, bfloat16", "bfloat16", extra=1),
}

# The peers of a row with a backward pass. The first one has none: its step is an upload and a download.
OVERLAPPING: dict[str, Callable[[Network, str], Peer | None]] = {
    "no-pass": Arrangement("no backward pass", beside_workers=True),
    "after": Arrangement("apply() after it", beside_workers=True, method="after"),
    "streamed": Arrangement("streamed during it", beside_workers=True, method="streamed"),
}


def start(network: Network, keys: Sequence[str]) -> list[Peer]:
    """Starts peers, but for those whose environment is missing."""
    return [peer for key in PEERS if key in keys and (peer := PEERS[key](network, key)) is not None]


def start_overlapping(network: Network, keys: Sequence[str]) -> list[Peer]:
    """Starts the peers of a row with a backward pass. The first is always there: others are compared with it."""
    wanted = [*OVERLAPPING][:1] + [key for key in [*OVERLAPPING][1:] if key in keys]
    return [peer for key in wanted if (peer := OVERLAPPING[key](network, key)) is not None]


def upload_time(workers: int, nbytes: int, gigabits: float) -> float:
    """Returns the least time in seconds in which a gradient leaves a worker's host that has one of the nodes."""
    return nbytes * (workers - 1) / workers / (gigabits * 1e9 / 8)


def wire_time(key: str, workers: int, nbytes: int, gigabits: float) -> float:
    """Returns the least time in seconds in which the links of a peer's hosts can carry a step.

    For n workers and k further hosts, t = 2n(n-1)M / ((n² + kn - 2k)B), from Jiang et al., A Unified Architecture for
    Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters (BytePS), OSDI 2020. It assumes that every
    host stores the share that suits it best. Without nodes on the workers' hosts, t = max(n / k, 1)M / B.

    Args:
        key: a key of ``PEERS``.
        workers: number of workers.
        nbytes: the bytes of a gradient in float32.
        gigabits: the rate of the links, in Gbit/s.
    """
    of, n = PEERS[key], workers
    size = nbytes / 2 if key.endswith("bfloat16") else nbytes
    one = size / (gigabits * 1e9 / 8)
    k = of.extra if isinstance(of, Arrangement) else 1 if key == "tensorflow" else 0
    if key in ("gloo", "bare") or (isinstance(of, Arrangement) and of.beside_workers):
        return one * 2 * n * (n - 1) / (n * n + k * n - 2 * k)
    # rounds(): the sum leaves the server together with W times the weights of the step.
    return one * max(n / k, 1)
