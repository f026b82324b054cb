"""Records when the threads of a process talk to the server and when they wait, through the ``Waits`` of a transport.

redisacc itself knows nothing of it: a transport opens connections and makes alarms as its ``Waits`` say, and these
are such that note the time. The clock is CLOCK_MONOTONIC, which all processes of a machine share, also those in network
namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from redisacc._wire import script_loader
from redisacc._wire.connect import transport_to
from redisacc._wire.sockets import SocketConnection
from redisacc._wire.transport import Transport
from redisacc._wire.waits import ThreadAlarm, Waits

SCRIPTS = {load.sha: name for name in script_loader.names() for load in [script_loader.load(name)]}
SCRIPTS |= {script_loader.load(name).sharded.sha: name for name in script_loader.names()}


class Recording:
    """What the threads of this process have done.

    A span has the name of its thread, kind, text, begin, end, the thread's CPU time at both, the address of the
    connection, the commands, and the number of the thread. Times are in nanoseconds.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Any, ...]] = []
        # The ids of threads come again.
        self._own, self._numbers = threading.local(), itertools.count()

    @contextlib.contextmanager
    def span(self, kind: str, text: str = "", connection: Any = None, commands: tuple[str, ...] = ()) -> Iterator[None]:
        """Notes a block."""
        cpu, began = time.thread_time_ns(), time.monotonic_ns()
        try:
            yield
        finally:
            ended, after = time.monotonic_ns(), time.thread_time_ns()
            local = connection and connection.local
            if not hasattr(self._own, "number"):
                self._own.number = next(self._numbers)
            name = threading.current_thread().name
            self.spans.append((name, kind, text, began, ended, cpu, after, local, commands, self._own.number))

    def write(self, path: Path, **more: Any) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps({"spans": self.spans, **more}))


class _Connection(SocketConnection):
    def __init__(self, recording: Recording, opened: Any, tick: float) -> None:
        super().__init__(opened, opened._sock, tick)
        self._recording = recording
        self.local = ":".join(map(str, self.sock.getsockname()[:2]))

    def exchange(self, commands: Any, deadline: float) -> list[Any]:
        words = tuple(SCRIPTS.get(str(one[1]), "") if one[0] == "EVALSHA" else str(one[0]) for one in commands)
        with self._recording.span("exchange", " ".join(words), self, words):
            return super().exchange(commands, deadline)

    def fetch(self, arrivals: Any, deadline: float, *more: Any) -> None:
        with self._recording.span("fetch", "parts", self, ("fetch",)):
            super().fetch(arrivals, deadline, *more)

    def hear(self) -> list[Any]:
        with self._recording.span("listen"):
            return super().hear()


class _Alarm(ThreadAlarm):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def wait(self, timeout: float) -> None:
        with self._recording.span("wait"):
            super().wait(timeout)


class RecordingWaits(Waits):
    """Waits as threads do, and notes it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def open(self, endpoint: Any, tick: float) -> Any:
        return _Connection(self._recording, endpoint.open(), tick)

    def alarm(self) -> Any:
        return _Alarm(self._recording)

    def sleep(self, seconds: float) -> None:
        with self._recording.span("pause"):
            super().sleep(seconds)


def _ask_all(transport: Transport, url: str, *command: str) -> dict[str, Any]:
    """Returns the reply of each master to a command, as it is."""
    found, way = {}, urlsplit(url)
    for address in transport.on_masters([("PING",)])[0]:
        host, _, port = address.partition("/")[0].rpartition(":")
        client = redis.Redis(host, int(port), username=way.username, password=way.password)
        connection = client.connection_pool.make_connection()
        connection.send_command(*command)
        found[address] = connection.read_response(disable_decoding=True)
        connection.disconnect()
    return found


def note_commands(transport: Transport, url: str) -> None:
    """Lets the servers note each command, and how long it takes."""
    _ask_all(transport, url, "CONFIG", "SET", "slowlog-log-slower-than", "0")
    _ask_all(transport, url, "CONFIG", "SET", "slowlog-max-len", "1000000")


def noted_commands(transport: Transport, url: str) -> dict[str, list[tuple[str, str, int]]]:
    """Returns for each server its commands in order: who sent it, its name or that of its script, microseconds."""
    return {
        address: [
            (client.decode(), SCRIPTS.get(words[1].decode(), "") if words[0] == b"EVALSHA" else words[0].decode(), took)
            for _, _, took, words, client, *_ in reversed(entries)
        ]
        for address, entries in _ask_all(transport, url, "SLOWLOG", "GET", "-1").items()
    }


def recorded(url: str) -> tuple[Recording, Transport]:
    """Returns a recording, and the way to a server or cluster that it records, for ``redis=``."""
    recording = Recording()
    return recording, transport_to(url, RecordingWaits(recording))
