"""Starts the peers' processes, each on its host: workers, a taker, and a server or parameter server."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.crew import START_TIMEOUT, Crew, Member
from benchmarks.environment import Run
from benchmarks.network.hosts import INTERFACE, Hosts
from benchmarks.sections.rounds import Peer

SERVER = "server"
TAKER = "taker"
# The role of the process that updates a share of the weights on a worker's host.
UPDATER = "updater"


def host_names(workers: int, servers: int = 1) -> list[str]:
    """Returns the names of the hosts of a crew, with this many for servers."""
    return [
        SERVER,
        *(f"{SERVER}{number}" for number in range(1, servers)),
        TAKER,
        *(f"worker{number}" for number in range(workers)),
    ]


# The kinds of measurement, and for each kind the program of every peer.
PROGRAMS = {
    "rounds": {
        "redisacc": "redisacc_peer",
        "bare": "bare_round",
        "bare-reducer": "bare_parts",
        "tensorflow": "tensorflow_grpc",
        "gloo": "torch_gloo",
    },
    "steps": {"redisacc": "redisacc_steps", "bare": "bare_steps", "tensorflow": "tensorflow_steps"},
    "updates": {
        "redisacc": "redisacc_steps",
        "bare": "bare_updates",
        "tensorflow": "tensorflow_steps",
        "gloo": "torch_steps",
    },
    "weights": {
        "redisacc": "redisacc_weights",
        "bare": "bare_weights",
        "tensorflow": "tensorflow_weights",
        "gloo": "gloo_weights",
    },
}


@dataclass
class Network:
    """Hosts, and what is measured between them.

    Attributes:
        run: the run.
        hosts: the hosts.
        workers: number of workers.
        kind: what is measured, a key of `PROGRAMS`.
        settings: settings of every process.
        stack: ends crews and servers.
        ports: ports of the server's host that are free.
        versions: versions of the Redis servers.
    """

    run: Run
    hosts: Hosts
    workers: int
    kind: str
    settings: dict[str, Any]
    stack: contextlib.ExitStack
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(6400))
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def peer(
        self,
        key: str,
        name: str,
        python: str,
        program: str,
        *,
        pids: Sequence[int] = (),
        taker: bool = True,
        helpers: tuple[str, ...] = (),
        dense: bool = False,
        chief: str = TAKER,
        **more: Any,
    ) -> Peer:
        """Starts the processes of a peer.

        Args:
            key: its key in the results.
            name: its name in the report.
            python: interpreter of its environment.
            program: a key of ``PROGRAMS[self.kind]``.
            pids: processes whose CPU time and memory count as the server's, besides the helpers.
            taker: whether rounds have a taker.
            helpers: roles of processes that only have to run.
            dense: whether it takes part in dense rounds only.
            chief: the host of the process that takes.
            **more: more settings of its processes.
        """
        # All processes begin at once when weights are sent, and the first one sends.
        weights = self.kind == "weights"
        crew = Crew(
            name,
            python,
            PROGRAMS[self.kind][program],
            workers=self.workers + weights,
            settings={**self.settings, **more},
            directory=self.run.directory,
            taker=taker and not weights,
            helpers=helpers,
            host=partial(self._prefix, chief),
        )
        self.stack.callback(crew.end)
        return Peer(
            key,
            crew,
            [*pids, *crew.helper_pids],
            takes_part=lambda row: row.kind == "dense" or not dense,
            totals=self.totals,
            time=(lambda timing: timing.finished) if weights else (lambda timing: timing.elapsed),
        )

    def workers_hosts(self) -> list[str]:
        """Returns the name of each worker's host, in order. If weights are sent, the first worker is the chief."""
        hosts = [f"worker{number}" for number in range(self.workers)]
        return [TAKER, *hosts] if self.kind == "weights" else hosts

    def _prefix(self, chief: str, role: str, number: int) -> list[str]:
        if role in ("worker", UPDATER):
            return self.hosts.command(self.workers_hosts()[number])
        return self.hosts.command(chief if role == "taker" else SERVER)

    def server(self, host: str = SERVER, *, persistent: bool, beside: Sequence[str] = ()) -> tuple[str, list[int]]:
        """Starts a Redis server, and returns its URL and the ids of the processes that belong to it.

        Args:
            host: where it runs.
            persistent: whether it keeps its data on disk as the embedded server does by default.
            beside: arguments of a Python process that runs beside the server; ``{url}`` becomes the URL of its socket.
        """
        port = next(self.ports)
        settings = {
            "role": "server",
            "number": port,
            "address": self.hosts.address(host),
            "port": port,
            "socket": str(self.run.directory / f"{port}-{self.workers}.sock"),
            "executable": self.run.server,
            "data": tempfile.mkdtemp(prefix="server-", dir=self.run.directory) if persistent else None,
            "beside": list(beside),
        }
        prefix = self.hosts.command(host)
        member = Member(sys.executable, "server_host", settings, None, self.run.directory, prefix=prefix)
        self.stack.callback(member.end)
        started = member.receive(START_TIMEOUT)
        self.versions["server"] = started["versions"]
        return started["url"], started["pids"]

    def cluster(self, hosts: Sequence[str]) -> tuple[str, list[int]]:
        """Starts a cluster of a node and its reducer on each of some hosts. Returns as ``server`` does."""
        port = next(self.ports)
        everywhere = {
            "role": "node",
            "nodes": [(self.hosts.address(host), port) for host in hosts],
            "executable": self.run.server,
        }
        members, pids = [], []
        for number, host in enumerate(hosts):
            folder = tempfile.mkdtemp(prefix="node-", dir=self.run.directory)
            settings = {**everywhere, "number": number, "directory": folder}
            prefix = self.hosts.command(host)
            members.append(Member(sys.executable, "node_host", settings, None, self.run.directory, prefix=prefix))
            self.stack.callback(members[-1].end)
        for member in members:
            started = member.receive(START_TIMEOUT)
            self.versions["server"] = started["versions"]
            pids += started["pids"]
        return f"redis+cluster://{self.hosts.address(hosts[0])}:{port}", pids

    def totals(self) -> dict[str, float]:
        """Returns the bytes that have passed the links that matter, and the packets that were dropped."""
        traffic = self.hosts.traffic()
        if self.kind == "updates":
            # Which link is the busiest depends on where the servers are.
            links = {f"{host} {way}": one[way] for host, one in traffic.items() for way in ("in", "out")}
            return {**links, "dropped": sum(one["dropped"] for one in traffic.values())}
        return {
            "server_in": traffic[SERVER]["in"],
            "server_out": traffic[SERVER]["out"],
            "taker_in": traffic[TAKER]["in"],
            "dropped": sum(one["dropped"] for one in traffic.values()),
        }


@dataclass(frozen=True)
class Redisacc:
    """One way to use redisacc.

    Attributes:
        name: name in the report.
        options: arguments of every accumulator.
        parameters: arguments of every Parameters.
        tolerance: how much an element of a result may differ from numpy's, if gradients are rounded on the wire.
        beside: arguments of a Python process beside the server, in which ``{url}`` is the URL of its socket.
        persistent: whether the server keeps its data on disk as the embedded server does by default.
        dense: whether only dense gradients and steps are measured.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    beside: tuple[str, ...] = ()
    persistent: bool = False
    dense: bool = False

    def __call__(self, network: Network, key: str) -> Peer | None:
        """Starts the peer on a server of its own; returns None if its weights are plain redisacc's."""
        if network.kind == "weights" and (self.options or self.beside) and not self.parameters:
            return None
        url, pids = network.server(persistent=self.persistent, beside=self.beside)
        more: dict[str, Any] = {"url": url, "options": self.options, "parameters": self.parameters}
        more |= {"tolerance": self.tolerance, "method": "direct"}
        return network.peer(key, self.name, sys.executable, "redisacc", pids=pids, dense=self.dense, **more)


def bare(network: Network, key: str) -> Peer:
    """Starts bare sockets that do the same transfers and additions, through a server that writes nothing to disk."""
    url, pids = network.server(persistent=False)
    return network.peer(key, "bare sockets", sys.executable, "bare", pids=pids, url=url)


def parts(network: Network, key: str) -> Peer:
    """Starts bare sockets with a reducer beside the server that adds piece by piece."""
    url, pids = network.server(persistent=False)
    return network.peer(
        key,
        "bare sockets, reducer",
        sys.executable,
        "bare-reducer",
        pids=pids,
        helpers=("reducer",),
        dense=True,
        url=url,
    )


def tensorflow(network: Network, key: str) -> Peer | None:
    """Starts TensorFlow over gRPC; returns None if there is no environment that has it."""
    if network.run.tensorflow is None:
        return None
    jobs = {"ps": [SERVER], "worker": network.workers_hosts()}
    if network.kind != "weights":
        jobs["taker"] = [TAKER]
    cluster = {job: [f"{network.hosts.address(host)}:2222" for host in hosts] for job, hosts in jobs.items()}
    return network.peer(key, "TensorFlow, gRPC", network.run.tensorflow, "tensorflow", helpers=("ps",), cluster=cluster)


def gloo(network: Network, key: str) -> Peer | None:
    """Starts torch's all_reduce or broadcast over gloo; returns None if there is no environment that has it."""
    if network.run.torch is None:
        return None
    first = network.hosts.address(network.workers_hosts()[0])
    place: dict[str, Any] = {"address": first, "port": 2223, "interface": INTERFACE}
    return network.peer(key, "torch, gloo", network.run.torch, "gloo", taker=False, **place)


# The arguments of the reducer beside a server.
REDUCER = ("-m", "redisacc", "reduce", "--redis", "{url}")

# The first one is what the others are compared with.
PEERS: dict[str, Callable[[Network, str], Peer | None]] = {
    "tensorflow": tensorflow,
    "redisacc": Redisacc("redisacc"),
    "redisacc-reducer": Redisacc("redisacc, reducer", beside=REDUCER, dense=True),
    # Elements of rounds, steps and weights are below 16.
    "redisacc-bfloat16": Redisacc(
        "redisacc, bfloat16", {"encoding": "bfloat16"}, {"encoding": "bfloat16"}, tolerance=16 / 2**9, dense=True
    ),
    "redisacc-bfloat16-reducer": Redisacc(
        "redisacc, bfloat16, reducer", {"encoding": "bfloat16"}, tolerance=16 / 2**9, beside=REDUCER, dense=True
    ),
    "redisacc-int8": Redisacc("redisacc, int8", {"encoding": "int8"}, tolerance=0.1, dense=True),
    "redisacc-int8-reducer": Redisacc(
        "redisacc, int8, reducer", {"encoding": "int8"}, tolerance=0.1, beside=REDUCER, dense=True
    ),
    "bare": bare,
    "bare-reducer": parts,
    "gloo": gloo,
}


def start(network: Network, keys: Sequence[str]) -> list[Peer]:
    """Starts peers, but for those that do not measure this kind, or whose environment is missing."""
    able = [key for key in PEERS if isinstance(PEERS[key], Redisacc) or key in PROGRAMS[network.kind]]
    return [peer for key in able if key in keys and (peer := PEERS[key](network, key)) is not None]
