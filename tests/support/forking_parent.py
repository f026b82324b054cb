"""A program that forks while its other threads use clients; each child uses the same clients.

python forking_parent.py at_random CLUSTER PORT FORKS KIND...   forks at any moment, while threads open connections
python forking_parent.py held CLUSTER PORT FORKS KIND...        forks while another thread holds every lock

CLUSTER is 1 if the port is that of a cluster's node. KIND is "url", "client" for the class of clusters of redis-py, or
a name in clients.ALL. A child that does not end prints the stacks of its threads, and the program fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import redis

import redisacc
import redisacc.asyncio
from redisacc import raw_ops
from redisacc._clock import durations
from support import clients

# From Python 3.12 on, a fork beside threads warns.
warnings.simplefilter("ignore", DeprecationWarning)

# How long a child may take, in seconds. It needs a few milliseconds, and a machine may be busy.
PATIENCE = 60
# A busy machine may take longer than a second to subscribe. Events would begin without it, and the one that the child
# waits for would be missed.
durations.confirmation = PATIENCE
# A step that no round reaches.
LATEST = 10**9
LOCK_TYPES = (type(threading.Lock()), type(threading.RLock()))
# Locks of these are held as their way to wait, and those of threading itself are renewed by it.
ALARMS = {"ThreadAlarm"}


def main(mode: str, cluster: bool, port: int, forks: int, kinds: list[str]) -> None:
    for kind in kinds:
        with connected(kind, cluster, port) as redis_:
            for number in {"at_random": at_random, "held": held}[mode](redis_, kind, forks):
                print(kind, number, flush=True)


@contextlib.contextmanager
def connected(kind: str, cluster: bool, port: int) -> Iterator[Any]:
    """Yields a client, or a URL."""
    if kind == "url":
        yield f"redis{'+cluster' if cluster else ''}://127.0.0.1:{port}"
    elif kind == "client":
        with redis.RedisCluster("127.0.0.1", port) as client:
            yield client
    else:
        with clients.ALL[kind].connected(port, socket_timeout=20) as client:
            yield client


def child(function: Callable[[], object]) -> int:
    """Forks a child that does something. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        sys.setswitchinterval(0.005)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def check(pid: int, what: str) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        sys.exit(f"a child failed: {what}")


# Forks at any moment


def at_random(redis_: Any, kind: str, forks: int) -> Iterator[int]:
    """Forks while other threads open connections, apply, take and wait."""
    mine = redisacc.ConditionalAccumulator("float32", [2], redis=redis_)
    childs = redisacc.ConditionalAccumulator("float32", [2], redis=redis_)
    small = "two_pool" in kind or "blocking_pool" in kind
    # The threads run only around a fork, because they would take the processor from the child.
    running, stop = threading.Event(), threading.Event()
    opened: list[None] = []
    chance = random.Random(0)

    def open_connections() -> None:
        while running.wait() and not stop.is_set():
            for node in nodes_of(mine):
                pooled = node._get_connection()
                pooled.disconnect()
                node._pool.release(pooled)
            opened.append(None)

    def apply() -> None:
        while running.wait() and not stop.is_set():
            mine.apply_grad([1.0, 2.0], local_step=LATEST)

    def take() -> None:
        while running.wait() and not stop.is_set():
            with contextlib.suppress(redisacc.TakeTimeoutError):
                mine.take_grad(50, timeout=0.05)

    def work() -> None:
        for _ in range(2):
            childs.apply_grad([1.0, 2.0], local_step=LATEST)
        childs.take_grad(2, timeout=PATIENCE)
        assert childs.num_accumulated() == 0

    mine.num_accumulated()
    # A pool of two connections has none left for more threads.
    jobs = [open_connections] if small else [open_connections, open_connections, apply, take]
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    # A thread pauses anywhere, and so also where it holds a lock.
    sys.setswitchinterval(1e-6)
    try:
        for number in range(forks):
            running.set()
            before = len(opened)
            while len(opened) == before and all(thread.is_alive() for thread in threads):
                time.sleep(0.0005)
            # A thread that waits for the interpreter's lock gets it wherever the one that runs happens to be.
            time.sleep(chance.random() * 0.002)
            pid = child(work)
            running.clear()
            check(pid, f"{kind}, fork {number}")
        assert all(thread.is_alive() for thread in threads)
    finally:
        sys.setswitchinterval(0.005)
        stop.set()
        running.set()
        for thread in threads:
            thread.join()
    mine.close()
    childs.close()
    yield forks


def nodes_of(accumulator: Any) -> list[Any]:
    transport = accumulator._transport
    return [transport._server] if transport.cluster is None else list(transport.cluster._nodes.values())


# Forks while every lock is held


def held(redis_: Any, kind: str, forks: int) -> Iterator[int]:
    """Forks while another thread holds every lock of redisacc and of the client libraries."""
    small = "two_pool" in kind or "blocking_pool" in kind
    calls = Calls(redis_)
    # So everything that calls make is there.
    calls.make(waits=not small)
    for _ in range(forks):
        with all_locks_held() as number:
            pid = child(lambda: calls.make(waits=not small))
        check(pid, f"{kind}, while {number} locks were held")
        yield number
    calls.close()


@contextlib.contextmanager
def all_locks_held() -> Iterator[int]:
    """Lets another thread hold every lock that is free. Yields their number."""
    holding, let_go = threading.Event(), threading.Event()
    found: list[Any] = []

    def hold() -> None:
        found.extend(lock for lock in locks() if lock.acquire(blocking=False))
        holding.set()
        let_go.wait()
        for lock in found:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait()
    yield len(found)
    let_go.set()
    holder.join()


class Calls:
    """Every kind of call, on handles that the parent has opened."""

    def __init__(self, redis_: Any) -> None:
        self.redis = redis_
        self.small = redisacc.ConditionalAccumulator("float32", [2], "small", redis=redis_)
        self.buffered = redisacc.ConditionalAccumulator(
            "float32", [2], "buffered", redis=redis_, limits=redisacc.Limits(in_place=0)
        )
        self.rows = redisacc.SparseConditionalAccumulator("float32", [None, 2], "rows", redis=redis_)
        spec = {"a": ("float32", (2,)), "b": redisacc.Sparse("float32", (None,))}
        self.tree = redisacc.TreeAccumulator(spec, "tree", redis=redis_)
        self.partitions = redisacc.ConditionalAccumulator("float32", [8], "parts", redis=redis_, partitions=2)
        self.private = redisacc.ConditionalAccumulator("float32", [2], redis=redis_)
        self.parameters = redisacc.Parameters("parameters", redis=redis_)
        self.reducer = redisacc.Reducer("buffered", redis=redis_)

    def make(self, *, waits: bool) -> None:
        """Makes every call once. With ``waits``, also those that need more than two connections."""
        for acc, gradient in (
            (self.small, [1.0, 2.0]),
            (self.buffered, [1.0, 2.0]),
            (self.rows, ([1], [[1.0, 2.0]])),
            (self.tree, {"a": [1.0, 2.0], "b": None}),
            (self.partitions, [1.0] * 8),
            (self.private, [1.0, 2.0]),
        ):
            step = acc.info().global_step
            acc.set_global_step(step)
            arguments = gradient if isinstance(gradient, tuple) else (gradient,)
            assert acc.apply_grad(*arguments, local_step=step)
            assert acc.num_accumulated() == 1
            acc.peek()
            with acc.take(1, timeout=PATIENCE):
                pass
            acc.settle()
            with acc.recover() as taken:
                assert taken is None
        step = (self.parameters.step() or 0) + 1
        self.parameters.publish({"w": [float(step)] * 4}, step)
        assert self.parameters.latest()[0] == step
        with redisacc.ConditionalAccumulator("float32", [2], redis=self.redis) as another:
            another.apply_grad([1.0, 2.0])
        handle = raw_ops.ConditionalAccumulator(dtype="float32", shape=[2], shared_name="small", redis=self.redis)
        assert raw_ops.AccumulatorNumAccumulated(handle=handle, redis=self.redis) == 0
        if isinstance(self.redis, str):
            asyncio.run(self._call_on_a_loop())
        if waits:
            self._wait()

    async def _call_on_a_loop(self) -> None:
        async with redisacc.asyncio.ConditionalAccumulator("float32", [2], redis=self.redis) as acc:
            await acc.apply_grad([1.0, 2.0])
            await acc.take_grad(1, timeout=PATIENCE)

    def _wait(self) -> None:
        with self.small.events(timeout=PATIENCE) as events:
            got: list[Any] = []
            taker = threading.Thread(target=lambda: got.append(self.small.take_grad(1, timeout=PATIENCE)))
            taker.start()
            while next(events).kind != "waiting":
                pass
            self.small.apply_grad([3.0, 4.0], local_step=self.small.info().global_step)
            taker.join()
            assert got[0].tolist() == [3.0, 4.0]
        reducing = threading.Thread(target=self.reducer.run)
        reducing.start()
        self.reducer.close()
        reducing.join()

    def close(self) -> None:
        """Closes the handles, and deletes what they have made."""
        for acc in (self.small, self.buffered, self.rows, self.tree, self.partitions):
            acc.delete()
            acc.close()
        self.private.close()
        self.parameters.delete()


def locks() -> Iterator[Any]:
    """Yields the locks of all objects and modules of redisacc and of client libraries, whoever holds them."""
    for thing in gc.get_objects():
        kind = type(thing)
        name = thing.__name__ if isinstance(thing, ModuleType) else kind.__module__
        # The __module__ of some built-in classes is a descriptor.
        if str(name).partition(".")[0] not in ("redisacc", "redis", "valkey") or kind.__name__ in ALARMS:
            continue
        for value in list(getattr(thing, "__dict__", {}).values()):
            if isinstance(value, LOCK_TYPES):
                yield value
            elif isinstance(value, threading.Event):
                yield value._cond._lock  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
