"""Builds hosts with real links on one machine, and removes them.

Each host is a network namespace with one port on a switch, which is a bridge in a namespace of its own. So nothing but
these hosts can reach the switch, and they reach nothing else; the machine's own network is not touched. Both ends of
each link send at a limited rate (``tc tbf``) and queue a limited time: what does not fit is dropped, as by a switch.

Names say which process has built a namespace. `remove_leftovers` removes those whose process no longer exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PREFIX = "redisacc-bench"
_OURS = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\w+")
INTERFACE = "eth0"
MOST_HOSTS = 250

# Longest time in milliseconds that a packet waits in a port. With 100 ms, small requests wait behind uploads; with
# 5 ms, TCP loses packets as soon as 8 workers send at once.
QUEUE_MS = 20
# Bytes that a port may send at once. The kernel hands over up to 64 KiB in one piece.
_BURST = 128 * 1024
# Seconds that the processes of a host get to end.
_END = 10.0


class HostsError(Exception):
    """The hosts cannot be built."""


def obstacles() -> list[str]:
    """Returns why this process cannot build hosts, a sentence for each reason; an empty list if it can try."""
    if sys.platform != "linux":
        return [f"Network namespaces exist only on Linux, and this is {sys.platform}."]
    found = []
    if os.geteuid() != 0:
        found.append("Building network namespaces needs root: run this with sudo.")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        found.append(f"Not on the PATH: {', '.join(missing)}. Install iproute2 (apt-get install iproute2).")
    return found


def remove_leftovers() -> list[str]:
    """Removes the namespaces, and ends their processes, that earlier runs of the benchmark have left behind.

    A run that is still going on keeps its namespaces.

    Returns:
        The names of the removed namespaces.
    """
    removed = []
    for name in _namespaces():
        owner = _OURS.fullmatch(name)
        if owner and _started(int(owner[1])) != owner[2]:
            _remove(name)
            removed.append(name)
    return removed


class Hosts:
    """Hosts on a switch, from the beginning of a ``with`` block to its end.

    Args:
        names: names of the hosts, of letters, digits and underscores.
        gigabits: rate of each link in each direction, in Gbit/s.

    Raises:
        HostsError: on entry, if the kernel or iproute2 refuses. Nothing is left behind then.
    """

    def __init__(self, names: Sequence[str], gigabits: float) -> None:
        if len(names) > MOST_HOSTS:
            raise HostsError(f"{len(names)} hosts are too many: a network has at most {MOST_HOSTS}")
        self._gigabits = gigabits
        self._prefix = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-"
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    def address(self, name: str) -> str:
        """Returns the IPv4 address of a host."""
        return f"10.77.0.{self._numbers[name]}"

    def command(self, name: str) -> list[str]:
        """Returns the beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self._prefix + name]

    def cut_off(self, name: str) -> None:
        """Takes a host from the network, as if its cable was pulled. Its processes run on, with open connections."""
        _run("ip", "-n", self._switch, "link", "set", f"p{self._numbers[name]}", "down")

    def connect(self, name: str) -> None:
        """Connects a host again that was cut off."""
        _run("ip", "-n", self._switch, "link", "set", f"p{self._numbers[name]}", "up")

    def traffic(self) -> dict[str, dict[str, int]]:
        """Returns what each host has received and sent in bytes, and how many packets its two ports have dropped."""
        ports = {port["ifname"]: port["stats64"] for port in _json("ip", "-n", self._switch, "-j", "-s", "link")}
        queues = {queue["dev"]: queue for queue in _json("tc", "-n", self._switch, "-j", "-s", "qdisc")}
        return {
            name: {
                "in": ports[f"p{number}"]["tx"]["bytes"],
                "out": ports[f"p{number}"]["rx"]["bytes"],
                "dropped": queues[f"p{number}"]["drops"],
            }
            for name, number in self._numbers.items()
        }

    def congestion_control(self) -> str:
        """Returns the hosts' TCP congestion control, which is the machine's.

        The kernel refuses another one in a namespace, unless the machine allows it to everybody.
        """
        name = next(iter(self._numbers))
        return _run(*self.command(name), "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip()

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    def _build(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for name, number in self._numbers.items():
            host, port = self._prefix + name, f"p{number}"
            _run("ip", "netns", "add", host)
            link = ("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host)
            _run("ip", "-n", switch, *link)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(name)}/24", "dev", INTERFACE)
            _run("ip", "-n", host, "link", "set", INTERFACE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            for namespace, device in ((host, INTERFACE), (switch, port)):
                limit = ("rate", f"{self._gigabits * 1000:g}mbit", "burst", f"{_BURST}b", "latency", f"{QUEUE_MS}ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def _end(self) -> None:
        for name in _namespaces():
            if name.startswith(self._prefix):
                _remove(name)

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HostsError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _json(*command: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_run(*command))
    return found


def _namespaces() -> list[str]:
    # A line is "NAME" or "NAME (id: 3)".
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _started(pid: int) -> str | None:
    """Returns when a process was started, in the kernel's unit; None if there is no such process.

    Together with its id this identifies a process, also after the id has been used again.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _remove(namespace: str) -> None:
    """Removes a namespace, if it exists, after its processes: with one inside, it would lose only its name."""
    try:
        _empty(namespace)
        _run("ip", "netns", "delete", namespace)
    except HostsError:
        # Another run may remove leftovers at the same time.
        if namespace in _namespaces():
            raise


def _empty(namespace: str) -> None:
    """Kills the processes of a namespace, and waits until they have ended."""
    deadline = time.monotonic() + _END
    while pids := _run("ip", "netns", "pids", namespace).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise HostsError(f"processes {', '.join(pids)} of {namespace} did not end within {_END:.0f} s of SIGKILL")
        time.sleep(0.02)
