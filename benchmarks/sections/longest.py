"""Measures the longest call of every script on an accumulator whose keys are as large as anybody can make them.

The slow log of the server is the clock: it holds the time of each command without the way to the server and back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import redis

import redisacc
from benchmarks.environment import Run
from benchmarks.slow_log import COUNTING, NOTHING
from benchmarks.stats import summary
from redisacc._format.entries import sessions_of
from redisacc._format.keys import Keys
from redisacc._handles.parameters import Parameters
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.rounds.granted_rounds import finish_acknowledgement
from redisacc._protocol.scripts import OF_ACCUMULATORS, Scripts
from redisacc._protocol.sessions import GradientRequest, Request, Session
from redisacc._wire.connect import connect
from redisacc._wire.scans import scan
from redisacc._wire.script_loader import load, names
from redisacc.tools.admin.garbage import find_garbage

HOUR_MS = 3_600_000
ROW = 16
ROWS = 2_000_000
APPLIERS = 4
# Shorter commands are not noted: Valkey also logs each command that a script calls, and writing these entries would
# take a good part of the time that is measured.
LEAST_US = 10


@dataclass(frozen=True)
class Sizes:
    """How many of each thing are planted, and how often each script is called."""

    sessions: int
    rows: int
    buffered: int
    takers: int
    rounds: int
    workers: int
    calls: int


FULL = Sizes(sessions=200_000, rows=100_000, buffered=10_000, takers=10_000, rounds=10_000, workers=10_000, calls=300)
QUICK = Sizes(sessions=20_000, rows=10_000, buffered=1_000, takers=1_000, rounds=1_000, workers=1_000, calls=50)
TINY = Sizes(sessions=700, rows=200, buffered=20, takers=20, rounds=10, workers=20, calls=3)


class Meter:
    """Reads from the slow log how long each script and each other command held the server, by operation."""

    def __init__(self, client: redis.Redis, least_us: int) -> None:
        # A connection of its own, because redis-py would transform the reply.
        self._connection = client.connection_pool.make_connection()
        self._client = client
        self._least_us = least_us
        self._names = {load(name).sha.encode(): name for name in names()}
        self._allocating = client.script_load("local t = {} for i = 1, 1000 do t[i] = 'text ' .. i end return t")
        client.hset("longest:warm", mapping={str(k): "x" * 100 for k in range(1000)})
        self._nothing, self._counting = client.script_load(NOTHING), client.script_load(COUNTING)
        self._names |= {self._nothing.encode(): "(does nothing)", self._counting.encode(): "(counts to 12,000)"}
        # Script or command -> microseconds of each call, and the operation during which the longest was made.
        self.times: dict[str, list[int]] = {}
        self.where: dict[str, str] = {}

    def close(self) -> None:
        """Closes the connection."""
        self._connection.disconnect()

    def _ask(self, *command: object) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response(disable_decoding=True)

    @contextlib.contextmanager
    def measure(self, operation: str, least_us: int | None = None) -> Iterator[None]:
        """Notes the times of all commands of the block that took at least ``least_us``."""
        # The server returns the memory of a long slow log to the system during one of the next commands that allocate
        # memory. It would look several milliseconds long, so these commands come first and are not noted.
        self._client.config_set("slowlog-log-slower-than", -1)
        self._ask("SLOWLOG", "RESET")
        self._ask("MEMORY", "PURGE")
        for _ in range(50):
            self._client.evalsha(self._allocating, 0)
            self._client.hrandfield("longest:warm", 4, withvalues=True)
            self._client.hscan("longest:warm", 0, count=250)
        self._client.config_set("slowlog-log-slower-than", self._least_us if least_us is None else least_us)
        yield
        for _, _, duration, words, *_ in reversed(self._ask("SLOWLOG", "GET", -1)):
            name = self._name(words)
            if name is None:
                continue
            known = self.times.setdefault(name, [])
            if not known or duration > max(known):
                self.where[name] = operation
            known.append(duration)

    def _name(self, words: Sequence[bytes]) -> str | None:
        command = words[0].upper()
        if command == b"EVALSHA":
            return self._names.get(words[1])
        if command in (b"SLOWLOG", b"CONFIG", b"SCRIPT", b"CLIENT", b"HELLO", b"INFO", b"EVAL"):
            return None
        return command.decode(errors="replace")

    def empty(self, calls: int) -> None:
        """Calls two scripts that touch no data, for comparison."""
        for _ in range(calls):
            self._client.evalsha(self._nothing, 0)
            self._client.evalsha(self._counting, 0)


def _plant_hash(client: redis.Redis, key: str, fields: dict[Any, Any]) -> None:
    names = list(fields)
    for start in range(0, len(names), 500):
        client.hset(key, mapping={name: fields[name] for name in names[start : start + 500]})


def plant(client: redis.Redis, keys: Keys, sizes: Sizes) -> None:
    """Writes keys that are large and well-formed, which would take real clients hours."""
    now = int(time.time() * 1000)
    worker = "w" * 200
    row = b"\1" + bytes(7 + ROW * 4)
    lengths = {"indices": [80], "counts": [], "values": [10 * ROW * 4]}
    header = msgpack.packb(
        {"version": 1, "dtype": "float32", "shape": [10, ROW], "gradients": 1, "inline": False, **lengths}
    )
    # Every second session has been idle for so long that it may be forgotten.
    seen = [now, now - 2 * HOUR_MS]
    born = now - 3 * HOUR_MS
    sessions = {f"{born}-planted{k}": f"1 applied 0 1 {seen[k % 2]} 1 0 {worker}" for k in range(sizes.sessions)}
    rows = {str(ROWS - 1 - k): row for k in range(sizes.rows)}
    in_parts = [f"1-parts{k}-1" for k in range(sizes.buffered)]
    current = keys.current
    _plant_hash(client, keys.sessions, sessions)
    _plant_hash(client, current.sums, {**rows, "total": f"{sizes.rows} {sizes.rows}"})
    _plant_hash(client, current.buffered, {name: b"%d " % k + header for k, name in enumerate(in_parts)})
    _plant_hash(client, current.inline, {f"1-inline{k}-1": bytes(2000) for k in range(sizes.buffered)})
    _plant_hash(client, current.workers, {f"{k}{worker}": 1 for k in range(sizes.workers)})
    _plant_hash(client, keys.taken, {f"planted{k}": f"granted 0 1 {now} [{ROW}] {worker}" for k in range(sizes.rounds)})
    for start in range(0, len(in_parts), 500):
        parts = {keys.part(name, 0): bytes(80) for name in in_parts[start : start + 500]}
        parts |= {keys.part(name, 1): bytes(10 * ROW * 4) for name in in_parts[start : start + 500]}
        client.mset(parts)
    client.hset(keys.record, mapping={"num_accumulated": 2 * sizes.buffered, "round_shape": f"[{ROW}]"})


def queue(client: redis.Redis, keys: Keys, number: int, lease_end_ms: int) -> None:
    """Puts takers at the end of the queue."""
    tokens = [f"taker{lease_end_ms}-{k}" for k in range(number)]
    text = f"1000000000 {lease_end_ms} {'t' * 200}"
    client.zadd(keys.queue, {token: k + 1 for k, token in enumerate(tokens)})
    _plant_hash(client, keys.takers, dict.fromkeys(tokens, text))


def never_suspend(client: redis.Redis) -> bool:
    """Gives all threads of the server precedence over all other processes. Returns False if that is not permitted.

    If only the main thread had it, it would wait for the thread that frees memory, which others keep from running.
    """
    try:
        for task in Path(f"/proc/{client.info('server')['process_id']}/task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


APPLY = """
import sys
import numpy as np
import redisacc
url, name, number = sys.argv[1:]
values = np.ones((10, 16), np.float32)
acc = redisacc.SparseConditionalAccumulator("float32", [2_000_000, 16], name, redis=url)
indices = np.arange(10) + 1000 * int(number)
print("ready", flush=True)
while True:
    acc.apply_grad(indices, values, local_step=2**40)
"""


@contextlib.contextmanager
def appliers(url: str, name: str, number: int) -> Iterator[None]:
    """Runs processes that apply gradients without a pause."""
    started = [
        subprocess.Popen([sys.executable, "-c", APPLY, url, name, str(k)], stdout=subprocess.PIPE)
        for k in range(number)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


class Hostile:
    """Runs every operation on the planted accumulator."""

    def __init__(self, client: redis.Redis, url: str, meter: Meter, sizes: Sizes) -> None:
        self._client = client
        self._url = url
        self._meter = meter
        self._sizes = sizes
        self.name = "longest"
        self._keys = Keys(self.name)
        self._transport = connect(url)
        # Nearly as large as a gradient may be that is added in place.
        self._indices = np.arange(32)
        self._values = np.ones((32, ROW), np.float32)

    def open(self, in_place: int | None = None) -> redisacc.SparseConditionalAccumulator:
        """Returns a new handle."""
        return redisacc.SparseConditionalAccumulator(
            "float32", [ROWS, ROW], self.name, redis=self._url, limits=redisacc.Limits(in_place, 2**40)
        )

    def _scripts(self) -> Scripts:
        incarnation = self._client.hget(self._keys.record, "incarnation") or b""
        return Scripts(self._transport, self._keys, OF_ACCUMULATORS, incarnation=incarnation.decode())

    def _session(self) -> Session:
        return Session(int(time.time() * 1000))

    def _repeat(self, operation: str, call: Callable[[], object], calls: int = 0) -> None:
        with self._meter.measure(operation):
            for _ in range(calls or self._sizes.calls):
                call()

    def gradients(self) -> None:
        """Opens, applies, buffers, resolves and sets the step, each also from sessions that are new."""
        self._repeat("open", self.open)
        step = 2**40
        acc, buffering = self.open(), self.open(0)
        self._repeat("apply", lambda: acc.apply_grad(self._indices, self._values, local_step=step))
        new = lambda: self.open().apply_grad(self._indices, self._values, local_step=step)  # noqa: E731
        self._repeat("apply, new session", new)
        self._repeat("buffer inline", lambda: buffering.apply_grad(self._indices, self._values, local_step=step))
        large = np.ones((5000, ROW), np.float32)
        many = np.arange(5000)
        self._repeat("buffer in parts", lambda: buffering.apply_grad(many, large, local_step=step))
        self._partitions(many, large)
        self._repeat("set_global_step", lambda: acc.set_global_step(0))
        self._repeat("set_quorum", lambda: acc.set_quorum(least=2))
        scripts = self._scripts()
        # Loaded as a user's apply would load it: the call itself may fail, because it only saves time.
        given = GradientRequest(self._session(), 1, "w", step, (ROW,)).arguments()
        about = {name: given[name] for name in ("worker", "local_step", "once", "round_shape", "weight")}
        stage = scripts.hint(
            "stage", **about, gradient="new-1", order="", header=bytes(2000).hex(), holds_ms=0, expiry_ms=60_000
        )
        self._transport.call("SCRIPT", "LOAD", load("stage").text)
        self._repeat("stage", lambda: self._transport.call(*stage))
        self._repeat(
            "resolve", lambda: scripts.resolve(**Request(self._session(), 1, "w").arguments(), allowed=("fenced",))
        )
        known = acc.info().known_workers[0].name
        (session, *_) = sessions_of(self._keys, scan(self._transport, self._keys.sessions), known)
        self._repeat("forget_worker", lambda: scripts.forget_worker(session=session, worker=known))
        reducer = Scripts(self._transport, self._keys, holder="h", who="w" * 200)
        hold = partial(reducer.hold_reducer, stored=0, late=0, sums="", lease_ms=60_000)
        self._repeat("hold_reducer", hold)
        self._repeat("release_reducer", reducer.release_reducer)
        self._repeat("info", acc.info, max(self._sizes.calls // 30, 1))

    def _partitions(self, indices: Any, values: Any) -> None:
        """Registers, commits and sweeps gradients whose parts lie in other slots."""
        acc = redisacc.SparseConditionalAccumulator(
            "float32", [ROWS, ROW], f"{self.name}-partitions", redis=self._url, limits=redisacc.Limits(0), partitions=3
        )
        calls = max(self._sizes.calls // 30, 1)
        self._repeat("buffer in partitions", lambda: acc.apply_grad(indices, values), calls)
        self._repeat("sweep", lambda: acc.take_grad(calls), 1)
        acc.delete()

    def training(self) -> None:
        """Publishes, finishes and deletes parameters, and takes leases in a large crew."""
        parameters = Parameters(self.name, redis=self._url)
        tree = {"table": np.zeros((100_000, ROW), np.float32), "w": np.zeros(1000, np.float32)}
        steps = itertools.count()
        self._repeat("publish", lambda: parameters.publish(tree, next(steps)), max(self._sizes.calls // 30, 1))
        rows = {"table": np.arange(500), "w": []}
        self._repeat("publish rows", lambda: parameters.publish(tree, next(steps), changed=rows))
        self._repeat("finish", parameters.finish)
        with Parameters(f"{self.name}-partitions", redis=self._url, partitions=3) as spread:
            self._repeat("publish rows in partitions", lambda: spread.publish(tree, next(steps), changed=rows))
            spread.delete()
        options = {"holder": "h", "process": "p", "who": "w" * 200}
        crew = Scripts(self._transport, self._keys, **options)
        places = [f"worker {number}" for number in range(self._sizes.calls)]
        held = iter(places)
        hold = partial(crew.hold_lease, lease_ms=1000, dead="", renews=False, extends=False)
        self._repeat("hold_lease", lambda: hold(place=next(held)))
        released = iter(places)
        self._repeat("release_lease", lambda: crew.release_lease(place=next(released)))
        self._repeat("delete parameters", parameters.delete, 1)

    def _take(self, scripts: Scripts, required: int, session: Session | None = None, sequence: int = 1) -> Any:
        session = session or self._session()
        token = f"{session.id}-{sequence}"
        return scripts.take(
            token=token,
            session=session.id,
            sequence=sequence,
            acknowledged=session.acknowledged,
            num_required=required,
            min_weight=0,
            most=required,
            grace_ms=0,
            lease_ms=60_000,
            taker="t" * 200,
            takes=0,
            losses=0,
        )

    def takes(self) -> None:
        """Waits and leaves behind a long queue, then behind one of dead takers; takes, recovers and acknowledges."""
        scripts, sizes = self._scripts(), self._sizes
        queue(self._client, self._keys, sizes.takers, int(time.time() * 1000) + HOUR_MS)

        def wait_and_leave() -> None:
            session = self._session()
            self._take(scripts, 10**9, session)
            scripts.leave(token=f"{session.id}-1", confirm=False)

        self._repeat("take behind live takers", wait_and_leave)
        acc = self.open()
        self._repeat("info, long queue", acc.info, max(sizes.calls // 30, 1))
        self._client.unlink(self._keys.queue, self._keys.takers)
        queue(self._client, self._keys, sizes.takers, 1)
        self._repeat("take behind dead takers", wait_and_leave)
        while self._client.zcard(self._keys.queue):
            wait_and_leave()
        session = self._session()
        self._repeat("take a large round", lambda: self._take(scripts, 1, session), 1)
        old, token = f"{session.id}-1", "recovered"
        self._repeat("recover a large round", lambda: scripts.recover(old=old, token=token, taker="t"), 1)
        finish = lambda: finish_acknowledgement(self._keys, scripts, token)  # noqa: E731
        self._repeat("acknowledge a large round", finish, 1)

        def small_round() -> None:
            acc.apply_grad(self._indices, self._values, local_step=2**40)
            acc.take_grad(1)

        self._repeat("take small rounds", small_round)

    def compaction(self) -> None:
        """Compacts inline gradients, and gradients in parts."""
        for label, rows in (("inline", 900), ("in parts", 60_000)):
            if self._sizes is TINY and rows > 900:
                continue
            name = f"longest-{label}"
            nbytes = rows * (ROW * 4 + 8)
            kept = 70 if rows == 900 else 40
            with redisacc.SparseConditionalAccumulator(
                "float32", [ROWS, ROW], name, redis=self._url, limits=redisacc.Limits(0, kept * nbytes)
            ) as acc:
                values = np.ones((rows, ROW), np.float32)
                with self._meter.measure(f"compact {label}"):
                    for k in range(3 * kept):
                        acc.apply_grad(np.arange(rows) + k % 7, values)
                acc.delete()

    def cleanup(self) -> None:
        """Removes orphans among many unacknowledged rounds, then the accumulator."""
        keys = self._keys
        self._client.mset({keys.part(f"1-orphan{k}-1", 0): b"x" for k in range(self._sizes.calls)})
        with self._meter.measure("gc"):
            for leftover in find_garbage(self._transport, self.name):
                leftover.remove()
        with self._meter.measure("delete"):
            delete(self._transport, keys, (self._client.hget(keys.record, "incarnation") or b"").decode())


def longest(run: Run) -> dict[str, Any]:
    """Measures every operation on planted keys, alone and while other clients apply."""
    sizes = TINY if run.tiny else QUICK if run.quick else FULL
    results: dict[str, Any] = {"sizes": vars(sizes), "runs": {}}
    with run.start_server("longest", persistent=False) as (server, client):
        results["real_time"] = not run.tiny and never_suspend(client)
        for label, others in (("alone", 0), (f"while {APPLIERS} clients apply", APPLIERS))[: 1 if run.tiny else 2]:
            client.flushall()
            meter = Meter(client, 0 if run.tiny else LEAST_US)
            hostile = Hostile(client, server.url, meter, sizes)
            hostile.open()
            plant(client, Keys(hostile.name), sizes)
            with appliers(server.url, hostile.name, others):
                with meter.measure("empty", 0):
                    meter.empty(sizes.calls * 10)
                hostile.gradients()
                hostile.takes()
            hostile.training()
            hostile.compaction()
            plant(client, Keys(hostile.name), sizes)
            hostile.cleanup()
            meter.close()
            results["runs"][label] = {
                name: {"calls": len(times), **summary(times), "where": meter.where[name]}
                for name, times in sorted(meter.times.items(), key=lambda item: -max(item[1]))
            }
            _say(label, results["runs"][label])
    return results


def _say(label: str, found: dict[str, Any]) -> None:
    print(f"  {label}")
    for name, times in found.items():
        print(
            f"    {name:<22}{times['calls']:>8}  median {times['median']:8.0f} longest {times['max']:8.0f} µs"
            f"  ({times['where']})",
            flush=True,
        )
