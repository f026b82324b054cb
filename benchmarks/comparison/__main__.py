"""Compares the same training under DDP, Horovod's documented form and redisacc: ``python -m benchmarks.comparison``.

Counts the lines that change, measures an epoch, and kills a process. Horovod is not run: only its lines are counted.
With --hosts, the processes are on hosts with real links, which are network namespaces: that needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from benchmarks.markdown import table
from benchmarks.network.hosts import INTERFACE, Hosts, obstacles, remove_leftovers
from redisacc.embedded import Server

HERE = Path(__file__).parent
PEERS = HERE.parent / "peers"
NAMES = {"with_redisacc": "redisacc", "ddp": "DDP (gloo)"}
SERVER = "server"
PORT = 29500
# Seconds that a run has to end, and that the others have to make an epoch after a kill.
LIMIT = 240.0
PATIENCE = 30.0
# A killed process dies after the first epoch, so this many more show whether the others continue.
EPOCHS = 12


def changed_lines(name: str) -> int:
    """Returns how many lines of a program are new, or different from those of ``alone.py``."""
    before, after = ((HERE / f"{each}.py").read_text().splitlines() for each in ("alone", name))
    return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))


class Crew:
    """Processes of one program, from the beginning of a ``with`` block to its end.

    Args:
        name: the program.
        workers: how many processes.
        epochs: how many epochs each makes.
        hosts: where they are, one on each; None: on this host.
    """

    def __init__(self, name: str, workers: int, epochs: int, hosts: Hosts | None = None) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._name = name
        self._hosts = hosts
        self._stack = contextlib.ExitStack()
        self._folder = Path()
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COMPARISON_EPOCHS": str(epochs),
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": hosts.address("host0") if hosts else "127.0.0.1",
            "MASTER_PORT": str(PORT),
            **({"GLOO_SOCKET_IFNAME": INTERFACE} if hosts else {}),
        }

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="redisacc-comparison-")))
        if self._name == "with_redisacc":
            url = _server_on(self._hosts, self._folder) if self._hosts else _server()
            self._environment["REDISACC_URL"] = self._stack.enter_context(url)
        self._stack.callback(self._end)
        for number in range(int(self._environment["WORLD_SIZE"])):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for each in self.processes.values():
            each.kill()
            each.wait()

    def start(self, number: int) -> None:
        """Starts a process, for the first time or again."""
        before = self._hosts.command(f"host{number}") if self._hosts else []
        with (self._folder / f"{number}.out").open("a") as out, (self._folder / f"{number}.err").open("a") as err:
            self.processes[number] = subprocess.Popen(
                [*before, sys.executable, "-m", f"benchmarks.comparison.{self._name}"],
                env={**self._environment, "RANK": str(number)},
                stdout=out,
                stderr=err,
            )

    def epochs(self, number: int) -> list[tuple[int, float, str]]:
        """Returns the epochs of a process: their numbers, when they were over, and the digests of the weights."""
        words = [line.split() for line in (self._folder / f"{number}.out").read_text().splitlines()]
        return [(int(each[1]), float(each[2]), each[3]) for each in words if each[:1] == ["epoch"] and len(each) == 4]

    def errors(self, number: int) -> str:
        """Returns what a process has written to its standard error."""
        return (self._folder / f"{number}.err").read_text().strip()

    def wait_for_epoch(self, number: int, epoch: int, limit: float) -> bool:
        """Returns whether a process comes to the end of an epoch within a time, in seconds."""
        give_up = time.monotonic() + limit
        while not (came := any(each[0] >= epoch for each in self.epochs(number))):
            if time.monotonic() > give_up or self.processes[number].poll() is not None:
                break
            time.sleep(0.01)
        return came or any(each[0] >= epoch for each in self.epochs(number))


@contextlib.contextmanager
def _server() -> Iterator[str]:
    with Server() as server:
        yield server.url


@contextlib.contextmanager
def _server_on(hosts: Hosts, folder: Path) -> Iterator[str]:
    settings = {"data": str(folder / "data"), "socket": str(folder / "socket"), "executable": None, "beside": None}
    path = folder / "server.json"
    path.write_text(json.dumps({**settings, "address": hosts.address(SERVER), "port": PORT + 1}))
    command = [*hosts.command(SERVER), sys.executable, str(PEERS / "server_host.py"), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.communicate()


def seconds_of_an_epoch(name: str, workers: int, epochs: int, hosts: Hosts | None = None) -> str:
    """Returns the median time of an epoch, without the first one, in which processes and connections begin."""
    with Crew(name, workers, epochs, hosts) as crew:
        for number, each in crew.processes.items():
            if each.wait(LIMIT):
                raise RuntimeError(crew.errors(number))
        times = [when for _, when, _ in crew.epochs(0)]
        return f"{statistics.median(after - before for before, after in itertools.pairwise(times)):.2f} s"


def after_a_kill(name: str, epochs: int) -> str:
    """Kills one of two processes after its first epoch; returns what the other one does, in words."""
    with Crew(name, 2, epochs) as crew:
        if not crew.wait_for_epoch(1, 0, LIMIT):
            raise RuntimeError(crew.errors(1))
        killed = time.monotonic()
        crew.processes[1].kill()
        crew.processes[1].wait()
        is_ours = name == "with_redisacc"
        if is_ours:
            # As `redisacc run` does. One process of DDP cannot be started again: the others do not accept it.
            crew.start(1)
        if crew.wait_for_epoch(0, epochs - 1, LIMIT if is_ours else PATIENCE):
            crew.processes[1].wait(LIMIT)
            ends = {crew.epochs(number)[-1][2] for number in range(2)}
            times = [killed, *(when for _, when, _ in crew.epochs(0) if when > killed)]
            longest = max(after - before for before, after in itertools.pairwise(times))
            same = "the same weights" if len(ends) == 1 else "**different weights**"
            return f"it is started again, and both end with {same}; the longest epoch takes {longest:.1f} s"
        if crew.processes[0].poll() is None:
            return f"the other one stands still for at least {PATIENCE:.0f} s"
        seconds = time.monotonic() - killed
        said = next((line for line in reversed(crew.errors(0).splitlines()) if "Error" in line), "no error")
        return f"the other one ends after {seconds:.1f} s: `{said[:90]}`"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes on one host (default: 2)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs of each run (default: {EPOCHS})")
    parser.add_argument("--hosts", type=int, default=0, help="number of hosts; 0: only this one (default)")
    parser.add_argument("--rate", type=float, default=1.0, help="rate of the hosts' links in Gbit/s (default: 1)")
    given = parser.parse_args()
    if given.hosts and (reasons := obstacles()):
        print("error: the hosts of this benchmark cannot be built.", *reasons, sep="\n", file=sys.stderr)
        return 2
    heads = ["", "lines that change", f"an epoch, {given.processes} processes", "one of two processes is killed"]
    rows = []
    for name, title in NAMES.items():
        cells = [seconds_of_an_epoch(name, given.processes, given.epochs), after_a_kill(name, given.epochs)]
        rows.append([title, f"{changed_lines(name)}", *cells])
    rows.append(["Horovod", f"{changed_lines('horovod_form')}", "not run", "not run"])
    if given.hosts:
        heads.append(f"an epoch, {given.hosts} hosts at {given.rate:g} Gbit/s")
        remove_leftovers()
        with Hosts([*(f"host{number}" for number in range(given.hosts)), SERVER], given.rate) as hosts:
            cells = [seconds_of_an_epoch(name, given.hosts, given.epochs, hosts) for name in NAMES]
        for row, cell in zip(rows, [*cells, "not run"], strict=True):
            row.append(cell)
    print(table(heads, rows, text=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
