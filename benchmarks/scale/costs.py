"""Measures on this machine what the pieces of a step cost: processor time of servers and of their clients."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import redis

from benchmarks.scale.observation import observe
from redisacc._format.attempts import parse_message, parts_arrived
from redisacc._protocol.parts.fetch import WholeParts
from redisacc._wire.connect import connect
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.script_loader import load
from redisacc._wire.waits import in_parallel
from redisacc.embedded import Server
from redisacc.optim import SGD
from redisacc.optim.kernel import update_part

SCRIPTS = ("register", "commit", "take", "register_version", "publish", "sweep", "stage")
# The crews of which the cost of a script is found, and the bytes of their model.
CREWS = (2, 12)
CREW_BYTES = 600_000
SMALL, LARGE = 32 * 1024, 1024 * 1024
LISTENERS = 32


@dataclass
class Costs:
    """Seconds of processor time. The last five are fitted: `benchmarks.scale.validation`.

    Attributes:
        server_call: a request that arrives alone.
        server_command: a command among others, without its script.
        server_in, server_out: a byte that a server receives or sends as part of a string.
        delivery, delivery_byte: a message to one of its listeners, and a byte of it.
        scripts: name → the time of the script, and of each gradient in its round.
        call, command, byte_in, byte_out: the same for a client.
        message: a message that a client hears.
        node: a node that a client sends something to at the same time as to others.
        add: a byte that a reducer adds.
        update: a byte of the weights that it updates, with SGD.
        worker, chief, reducer: whatever else such a process does in a step.
        worker_node, worker_byte: the same for a worker with each node, and with each byte of its gradient.
    """

    server_call: float = 0.0
    server_command: float = 0.0
    server_in: float = 0.0
    server_out: float = 0.0
    delivery: float = 0.0
    delivery_byte: float = 0.0
    scripts: dict[str, tuple[float, float]] = field(default_factory=dict)
    call: float = 0.0
    command: float = 0.0
    byte_in: float = 0.0
    byte_out: float = 0.0
    message: float = 0.0
    node: float = 0.0
    add: float = 0.0
    update: float = 0.0
    worker: float = 0.0
    chief: float = 0.0
    reducer: float = 0.0
    worker_node: float = 0.0
    worker_byte: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as a report stores them."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """Returns the costs that a report has stored."""
        return cls(**{**found, "scripts": {name: (of[0], of[1]) for name, of in found["scripts"].items()}})


def server_seconds(pid: int) -> float:
    """Returns the processor time of a process and its threads, to the nanosecond."""
    return (
        sum([int(Path(task, "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()]) / 1e9
    )


def measure(executable: str, rounds: int = 5) -> Costs:
    """Measures all costs but those that are fitted. Takes about half a minute.

    Args:
        executable: the server program.
        rounds: how often each is measured. The median counts.
    """
    found: dict[str, list[float]] = defaultdict(list)
    with Server(None, executable=executable) as server:
        for _ in range(rounds):
            for name, seconds in _exchanges(server):
                found[name].append(seconds)
            for name, seconds in _messages(server):
                found[name].append(seconds)
            for name, seconds in _arithmetic():
                found[name].append(seconds)
    return Costs(**{name: median(of) for name, of in found.items()}, scripts=_scripts(executable))


def _exchanges(server: Server) -> Iterator[tuple[str, float]]:
    """Measures commands and strings, of which some arrive alone."""
    transport = connect(server.url)

    def cost(repeat: int, do: Callable[[], object]) -> tuple[float, float]:
        """Returns what a repetition costs the server and this process."""
        do()
        before, own = server_seconds(server.pid), time.process_time()
        for _ in range(repeat):
            do()
        return (server_seconds(server.pid) - before) / repeat, (time.process_time() - own) / repeat

    transport.call("SET", "key", b"x")
    at_server, here = cost(1500, lambda: transport.call("EXISTS", "key"))
    yield "server_call", at_server
    yield "call", here
    many = [("PERSIST", "key")] * 1000
    at_server, here = cost(8, lambda: transport.pipeline(many))
    yield "server_command", at_server / len(many)
    yield "command", here / len(many)
    # Of strings of two lengths, so that the difference is what their bytes cost.
    sent, fetched = {}, {}
    for size in (SMALL, LARGE):
        data = np.zeros(size, np.uint8)
        keys = [f"part:{size}:{number}" for number in range(8)]
        sent[size] = cost(
            12, lambda keys=keys, data=data: transport.pipeline([("SET", key, data.data) for key in keys])
        )

        places = [np.zeros(size, np.uint8) for _ in keys]

        def fetch(keys: list[str] = keys, places: list[Any] = places) -> None:
            parts = zip(keys, range(len(keys)), places, strict=True)
            transport.fetch(WholeParts((), "the benchmark", 1, parts))

        fetched[size] = cost(12, fetch)
    nbytes = len(keys) * (LARGE - SMALL)
    for name, of in (("out", sent), ("in", fetched)):
        at_server, here = ((large - small) / nbytes for small, large in zip(of[SMALL], of[LARGE], strict=True))
        yield "server_in" if name == "out" else "server_out", at_server
        yield f"byte_{name}", here
    calls = [lambda: None] * 64
    began = time.process_time()
    for _ in range(5):
        in_parallel(calls, transport.waits)
    yield "node", (time.process_time() - began) / 5 / (len(calls) - 1)


def _messages(server: Server) -> Iterator[tuple[str, float]]:
    """Measures messages: what a delivery costs the server, and what a message costs a listener."""
    short, long = parts_arrived("0" * 40, 7, 3).encode(), bytes(4000)
    at_server = {}
    host, port = server.url.split("/")[2].split(":")
    for text in (short, long):
        costs = {}
        for listeners in (0, LISTENERS):
            with contextlib.ExitStack() as stack:
                for _ in range(listeners):
                    listener = stack.enter_context(socket.create_connection((host, int(port))))
                    listener.sendall(b"SUBSCRIBE messages\r\n")
                    listener.recv(1000)
                client = stack.enter_context(redis.Redis(host=host, port=int(port)))
                client.ping()
                before = server_seconds(server.pid)
                for _ in range(100):
                    client.publish("messages", text)
                costs[listeners] = (server_seconds(server.pid) - before) / 100
        at_server[len(text)] = (costs[LISTENERS] - costs[0]) / LISTENERS
    each = (at_server[len(long)] - at_server[len(short)]) / (len(long) - len(short))
    yield "delivery", at_server[len(short)] - len(short) * each
    yield "delivery_byte", each
    number, left = 2000, [2000]
    transport = connect(server.url)
    alarm = transport.waits.event()

    def hear(text: str | None) -> None:
        if text is not None:
            parse_message(text)
            left[0] -= 1
            if not left[0]:
                alarm.set()

    with pubsub_of(transport, "messages").listen("messages", hear), socket.create_connection((host, int(port))) as raw:
        packed = b"*3\r\n$7\r\nPUBLISH\r\n$8\r\nmessages\r\n$%d\r\n%s\r\n" % (len(short), short)
        began = time.process_time()
        raw.sendall(packed * number)
        alarm.wait(10)
        yield "message", (time.process_time() - began) / number


def _arithmetic() -> Iterator[tuple[str, float]]:
    """Measures the addition of a part and its update."""
    total, part = (np.zeros(LARGE // 4, np.float32) for _ in range(2))
    began = time.process_time()
    for _ in range(40):
        total += part
    yield "add", (time.process_time() - began) / 40 / LARGE
    optimizer = SGD(0.1)
    scalars = optimizer.scalars(0, 1)[0]
    began = time.process_time()
    for _ in range(40):
        update_part(
            optimizer, part, total, (), scalars=scalars, divisor=4, out_weights=np.empty_like(part), out_state=()
        )
    yield "update", (time.process_time() - began) / 40 / LARGE


def _scripts(executable: str) -> dict[str, tuple[float, float]]:
    """Returns how long the scripts of a training take, by the slow log: fixed, and for each gradient."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for partitions in (1, 3):
        for workers in CREWS:
            with Server(None, executable=executable) as server, server.client() as client:
                client.config_set("slowlog-log-slower-than", 0)
                client.config_set("slowlog-max-len", 100_000)

                def new_client(url: str = server.url) -> redis.Redis:
                    return redis.Redis.from_url(url)

                observe(new_client, [client], workers=workers, partitions=partitions, nbytes=CREW_BYTES, steps=12)
                times = _times(client)
            for name, of in times.items():
                if (name == "stage") == (partitions == 1) or name not in found:
                    found[name][workers] = median(of)
    few, many = CREWS
    costs = {}
    for name, of in found.items():
        each = max((of[many] - of[few]) / (many - few), 0.0)
        costs[name] = (of[few] - few * each, each)
    return costs


def _times(client: redis.Redis) -> dict[str, list[float]]:
    names = {load(name).sha: name for name in SCRIPTS}
    connection = client.connection_pool.make_connection()
    connection.send_command("SLOWLOG", "GET", -1)
    entries: Any = connection.read_response(disable_decoding=True)
    connection.disconnect()
    found: dict[str, list[float]] = defaultdict(list)
    for _, _, microseconds, words, *_ in entries:
        name = names.get(words[1].decode(errors="replace")) if words[0].upper() == b"EVALSHA" else None
        if name is not None:
            found[name].append(microseconds / 1e6)
    return found
