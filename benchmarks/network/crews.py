"""Starts the peers' processes, each on its host: workers, a taker, and a server or parameter server."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.crew import START_TIMEOUT, Crew, Member
from benchmarks.environment import Run
from benchmarks.network.hosts import INTERFACE, Hosts
from benchmarks.sections.rounds import Peer

SERVER = "server"
TAKER = "taker"


def host_names(workers: int) -> list[str]:
    """Returns the names of the hosts of a crew."""
    return [SERVER, TAKER, *(f"worker{number}" for number in range(workers))]


@dataclass
class Network:
    """Hosts, and what is measured between them.

    Attributes:
        run: the run.
        hosts: the hosts.
        workers: number of workers.
        settings: settings of every process.
        stack: ends crews and servers.
        ports: ports of the server's host that are free.
    """

    run: Run
    hosts: Hosts
    workers: int
    settings: dict[str, Any]
    stack: contextlib.ExitStack
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(6400))

    def crew(self, name: str, python: str, program: str, **more: Any) -> Crew:
        """Starts the processes of a peer; arguments that `Crew` does not know are settings."""
        own = {key: more.pop(key) for key in ("taker", "helpers") if key in more}
        crew = Crew(
            name,
            python,
            program,
            workers=self.workers,
            settings={**self.settings, **more},
            directory=self.run.directory,
            host=self._prefix,
            **own,
        )
        self.stack.callback(crew.end)
        return crew

    def _prefix(self, role: str, number: int) -> list[str]:
        return self.hosts.command({"ps": SERVER, "server": SERVER, "taker": TAKER}.get(role, f"worker{number}"))

    def server(self, *, persistent: bool, beside: Sequence[str] = ()) -> tuple[str, list[int]]:
        """Starts a Redis server, and returns its URL and the ids of the processes that belong to it.

        Args:
            persistent: whether it writes to disk what the embedded server writes by default.
            beside: arguments of a Python process that runs beside the server; ``{url}`` becomes the URL of its socket.
        """
        port = next(self.ports)
        settings = {
            "role": "server",
            "number": port,
            "address": self.hosts.address(SERVER),
            "port": port,
            "socket": str(self.run.directory / f"{port}-{self.workers}.sock"),
            "executable": self.run.server,
            "persistent": persistent,
            "beside": list(beside),
        }
        prefix = self.hosts.command(SERVER)
        member = Member(sys.executable, "server_host", settings, None, self.run.directory, prefix=prefix)
        self.stack.callback(member.end)
        started = member.receive(START_TIMEOUT)
        return started["url"], started["pids"]

    def totals(self) -> dict[str, float]:
        """Returns the bytes that have passed the links of server and taker, and the packets that were dropped."""
        traffic = self.hosts.traffic()
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
        tolerance: how much an element of a result may differ from numpy's, if gradients are rounded on the wire.
        beside: arguments of a Python process beside the server, in which ``{url}`` is the URL of its socket.
        persistent: whether the server writes to disk what the embedded server writes by default.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    beside: tuple[str, ...] = ()
    persistent: bool = False

    def __call__(self, network: Network, key: str) -> Peer:
        """Starts the peer on a server of its own."""
        url, pids = network.server(persistent=self.persistent, beside=self.beside)
        more = {"url": url, "options": self.options, "tolerance": self.tolerance}
        crew = network.crew(self.name, sys.executable, "redisacc_peer", **more)
        return Peer(key, crew, pids, totals=network.totals)


def bare(network: Network, key: str) -> Peer:
    """Starts bare sockets that do the same transfers and additions, through a server that writes nothing to disk."""
    url, pids = network.server(persistent=False)
    return Peer(key, network.crew("bare sockets", sys.executable, "bare_round", url=url), pids, totals=network.totals)


def tensorflow(network: Network, key: str) -> Peer | None:
    """Starts TensorFlow over gRPC; returns None if there is no environment that has it."""
    if network.run.tensorflow is None:
        return None
    workers = [f"worker{number}" for number in range(network.workers)]
    cluster = {
        job: [f"{network.hosts.address(host)}:2222" for host in hosts]
        for job, hosts in (("ps", [SERVER]), ("taker", [TAKER]), ("worker", workers))
    }
    crew = network.crew("TensorFlow, gRPC", network.run.tensorflow, "tensorflow_grpc", cluster=cluster, helpers=("ps",))
    return Peer(key, crew, crew.helper_pids, totals=network.totals)


def gloo(network: Network, key: str) -> Peer | None:
    """Starts torch's all_reduce over gloo; returns None if there is no environment that has it."""
    if network.run.torch is None:
        return None
    place = {"address": network.hosts.address("worker0"), "port": 2223, "interface": INTERFACE}
    crew = network.crew("torch all_reduce, gloo", network.run.torch, "torch_gloo", taker=False, **place)
    return Peer(key, crew, [], totals=network.totals)


# The first one is what the others are compared with.
PEERS: dict[str, Callable[[Network, str], Peer | None]] = {
    "tensorflow": tensorflow,
    "redisacc": Redisacc("redisacc"),
    "bare": bare,
    "gloo": gloo,
}
