"""Measures an accumulator on one master and over three: ``python -m benchmarks.network.partitions``, as root, on Linux.

Three masters, a taker and the workers are hosts of their own (network namespaces), each with a link of --rate. Every
round, all workers apply a gradient at once and the taker takes their mean. Prints, for each way to store the gradients,
with and without a reducer beside each master, the median time of a round, the processor time of the busiest master per
round, the reducers' together, and the bytes that passed the busiest master's link and the taker's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis

import redisacc
from benchmarks import environment
from benchmarks.network import hosts

MASTERS = 3
PORT = 7000
# The bytes of a gradient, and the number of partitions.
GRADIENTS = {"dense 32 MB": 32 * 2**20, "tree 128 MB": 128 * 2**20}
PARTITIONS = (1, MASTERS)
# Arrays of the tree.
LEAVES = 100
_START = 30.0
_COLUMNS = (
    *("gradients", "partitions", "reducers", "ms", "busiest master, ms of CPU", "reducers, ms of CPU"),
    *("its link in, MB", "out, MB", "taker in, MB"),
)


def main() -> int:
    """Builds the hosts, measures, and removes them."""
    given = _parser().parse_args()
    if given.role:
        _work(given) if given.role == "worker" else _take(given)
        return 0
    if reasons := hosts.obstacles():
        print("error: the hosts of this benchmark cannot be built.", *reasons, sep="\n", file=sys.stderr)
        return 2
    hosts.remove_leftovers()
    masters = [f"node{number}" for number in range(MASTERS)]
    names = [*masters, "taker", *(f"worker{number}" for number in range(given.workers))]
    with hosts.Hosts(names, given.rate) as network, ExitStack() as stack:
        url, pids = _start_cluster(network, masters, stack)
        print(f"| {' | '.join(_COLUMNS)} |", "| --- " + "| ---: " * (len(_COLUMNS) - 1) + "|", sep="\n")
        ways = list(itertools.product(given.only or GRADIENTS, (False, True), PARTITIONS))
        for name, reduced, partitions in ways * given.repeat:
            arguments = ["--url", url, "--kind", name, "--partitions", str(partitions)]
            arguments += ["--rounds", str(given.rounds), "--workers", str(given.workers)]
            with _reducers(network, masters if reduced else (), url) as reducers:
                found = _measure(network, pids, reducers, given.workers, arguments)
            print(f"| {name} | {partitions} | {'yes' if reduced else 'no'} | {' | '.join(found)} |", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.partitions", description=__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1.0, help="Gbit/s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=1, help="how often everything is measured, in turns")
    parser.add_argument("--only", action="append", choices=GRADIENTS)
    for hidden in ("--role", "--url", "--kind"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--partitions", type=int, help=argparse.SUPPRESS)
    return parser


def _start_cluster(network: hosts.Hosts, masters: list[str], stack: ExitStack) -> tuple[str, list[int]]:
    """Starts a cluster with a master on each of these hosts. Returns its URL and the ids of the servers' processes."""
    pids, folder = [], stack.enter_context(tempfile.TemporaryDirectory(prefix="redisacc-benchmarks-"))
    for name in masters:
        place = Path(folder, name)
        place.mkdir()
        settings = {"port": PORT, "bind": network.address(name), "protected-mode": "no", "save": "", "appendonly": "no"}
        settings |= {"cluster-enabled": "yes", "dir": str(place), "unixsocket": str(place / "s"), "loglevel": "warning"}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [*network.command(name), environment.default_server(), *words]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        pids.append(server.pid)
    clients = [redis.Redis(unix_socket_path=str(Path(folder, name, "s"))) for name in masters]
    deadline = time.monotonic() + _START
    for number, client in enumerate(clients):
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                _check(deadline)
        first, last = (16384 * at // MASTERS for at in (number, number + 1))
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for name in masters[1:]:
        clients[0].execute_command("CLUSTER", "MEET", network.address(name), PORT)
    while not all(_is_ready(client) for client in clients):
        _check(deadline)
    return f"redis+cluster://{network.address(masters[0])}:{PORT}", pids


@contextmanager
def _reducers(network: hosts.Hosts, masters: Sequence[str], url: str) -> Iterator[list[int]]:
    """Runs a reducer beside each of these masters. Yields the ids of their processes."""
    with ExitStack() as stack:
        pids = []
        for name in masters:
            command = [sys.executable, "-m", "redisacc", "reduce", "--redis", url]
            command += ["--node", f"{network.address(name)}:{PORT}"]
            reducer = subprocess.Popen([*network.command(name), *command], stdout=subprocess.PIPE, text=True)
            stack.callback(reducer.wait)
            stack.callback(reducer.kill)
            assert reducer.stdout is not None
            reducer.stdout.readline()
            pids.append(reducer.pid)
        yield pids


def _is_ready(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    text = info if isinstance(info, str) else str(info)
    return "ok" in text.split("cluster_state")[1][:8] and len(client.execute_command("CLUSTER", "SLOTS")) == MASTERS


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SystemExit("the cluster did not start in time")
    time.sleep(0.05)


def _measure(
    network: hosts.Hosts, pids: list[int], reducers: list[int], workers: int, arguments: list[str]
) -> list[str]:
    """Returns the cells of a row."""
    program = [sys.executable, "-m", "benchmarks.network.partitions"]
    with _processes() as start:
        taker = start([*network.command("taker"), *program, "--role", "taker", *arguments])
        assert taker.stdout is not None
        # The accumulator exists now, and the first round, which opens connections, is not measured.
        taker.stdout.readline()
        for number in range(workers):
            start([*network.command(f"worker{number}"), *program, "--role", "worker", *arguments])
        taker.stdout.readline()
        before, cpu_before = network.traffic(), [_cpu_ms(pid) for pid in [*pids, *reducers]]
        times: list[float] = json.loads(taker.stdout.readline())
        after, cpu_after = network.traffic(), [_cpu_ms(pid) for pid in [*pids, *reducers]]
    used = [(end - begin) / len(times) for begin, end in zip(cpu_before, cpu_after, strict=True)]
    cpu, cpu_of_reducers = used[: len(pids)], used[len(pids) :]
    busiest = f"node{cpu.index(max(cpu))}"

    def megabytes(host: str, way: str) -> str:
        return f"{(after[host][way] - before[host][way]) / len(times) / 2**20:.1f}"

    # After the median, the fastest and the slowest.
    low, middle, high = (f"{1000 * value:.0f}" for value in (min(times), statistics.median(times), max(times)))
    return [
        f"{middle} ({low} to {high})",
        f"{max(cpu):.0f}",
        f"{sum(cpu_of_reducers):.0f}",
        megabytes(busiest, "in"),
        megabytes(busiest, "out"),
        megabytes("taker", "in"),
    ]


@contextmanager
def _processes() -> Iterator[Any]:
    running: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    try:
        yield start
        for process in running:
            process.wait(_START)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _gradient(kind: str) -> Any:
    elements = GRADIENTS[kind] // 4
    if kind.startswith("dense"):
        return np.ones(elements, np.float32)
    return {f"{number:02}": np.ones(elements // LEAVES, np.float32) for number in range(LEAVES)}


def _open(given: argparse.Namespace) -> Any:
    options = {"redis": given.url, "partitions": given.partitions, "limits": redisacc.Limits(buffer=2**33)}
    name = f"{given.kind} {given.partitions}"
    if given.kind.startswith("dense"):
        return redisacc.ConditionalAccumulator("float32", [GRADIENTS[given.kind] // 4], name, **options)
    return redisacc.TreeAccumulator.like(_gradient(given.kind), name, **options)


def _work(given: argparse.Namespace) -> None:
    acc, gradient = _open(given), _gradient(given.kind)
    for step in range(given.rounds + 1):
        acc.wait_for_step(step, timeout=600)
        assert acc.apply_grad(gradient, local_step=step)


def _take(given: argparse.Namespace) -> None:
    acc, times = _open(given), []
    print(flush=True)
    for step in range(given.rounds + 1):
        began = time.monotonic()
        mean = acc.take_grad(given.workers, timeout=600)
        times.append(time.monotonic() - began)
        first = mean if isinstance(mean, np.ndarray) else mean["00"]
        assert first[0] == first[-1] == 1
        if step == 0:
            print(flush=True)
    print(json.dumps(times[1:]), flush=True)
    acc.delete()


if __name__ == "__main__":
    sys.exit(main())
