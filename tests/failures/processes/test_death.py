"""Processes that are killed, or stopped for a while, at every step of every operation: the others go on."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from support.fork_server import CHILDS_VALUE, NAME, gradient_of, open_shared, value_of
from support.leaks import leftovers
from support.proxy import Fault
from support.selection import everything, thorough

import redisacc
from redisacc._format.keys import Keys

pytestmark = pytest.mark.servers("valkey")

SMALL, IN_PARTS, LEAF, LARGE = 6, 20_000, 80_000, 1_200_000

# operation, in_place_limit, elements, kind
CASES = {
    "apply in place": ("apply", 10**9, SMALL, "dense"),
    "apply buffered": ("apply", 0, SMALL, "dense"),
    "apply large": ("apply", 0, LARGE, "dense"),
    "apply making room": ("apply", 0, SMALL, "dense"),
    "take in place": ("take", 10**9, SMALL, "dense"),
    "take buffered": ("take", 0, SMALL, "dense"),
    "take large": ("take", 0, LARGE, "dense"),
    "recover": ("recover", 0, SMALL, "dense"),
    "set_global_step": ("set_global_step", 0, SMALL, "dense"),
    "open": ("open", 0, SMALL, "dense"),
    "delete": ("delete", 0, SMALL, "dense"),
    "apply a tree in place": ("apply", 10**9, SMALL, "tree"),
    "apply a tree in parts": ("apply", 0, IN_PARTS, "tree"),
    "apply a tree making room": ("apply", 0, SMALL, "tree"),
    "take a tree in place": ("take", 10**9, SMALL, "tree"),
    "take a tree in parts": ("take", 0, IN_PARTS, "tree"),
    "recover a tree": ("recover", 0, IN_PARTS, "tree"),
    "delete a tree": ("delete", 0, IN_PARTS, "tree"),
    "apply in partitions": ("apply", 0, IN_PARTS, "partitions"),
    "take in partitions": ("take", 0, IN_PARTS, "partitions"),
    "recover in partitions": ("recover", 0, IN_PARTS, "partitions"),
    "delete in partitions": ("delete", 0, IN_PARTS, "partitions"),
    "stream": ("stream", 0, LEAF, "leaves"),
    "stream in partitions": ("stream", 0, LEAF, "leaves in partitions"),
    "apply in partitions making room": ("apply", 0, IN_PARTS, "partitions"),
}
# Of trees, the operations with most steps.
USUAL = [case for case, (_, _, _, kind) in CASES.items() if kind == "dense"]
USUAL += ["apply a tree in parts", "take a tree in parts", "apply in partitions", "take in partitions"]
USUAL += ["stream in partitions"]


class Scene:
    """The state before the operation, and the state required after it, whatever its outcome."""

    def __init__(self, client, case: str) -> None:
        self.operation, self.limit, self.size, self.kind = CASES[case]
        self.case = case
        client.flushall()
        self.client = client
        self.acc = self.open("survivor")
        # The gradients that the survivors know to be counted.
        self.sum = 0.0
        if case.endswith("making room") or self.operation in ("take", "delete"):
            self.apply(2.0)
            self.apply(4.0)
        if self.operation in ("recover", "delete"):
            if self.operation == "recover":
                self.apply(2.0)
            with pytest.raises(ZeroDivisionError), self.acc.take(1):
                raise ZeroDivisionError
            if self.operation == "delete":
                self.apply(8.0)

    def open(self, worker: str | None = None):
        return open_shared(self.client, self.size, self.limit, worker, kind=self.kind)

    def start(self, child_processes):
        """Starts the process that does the operation."""
        return child_processes.start(self.operation, self.limit, self.size, self.kind)

    def apply(self, value: float, acc=None) -> None:
        acc = acc or self.acc
        assert acc.apply_grad(gradient_of(self.kind, self.size, value), local_step=2**62)
        self.sum += value

    def survivors_go_on(self, finished=None) -> None:
        """``finished``: the operation's result in the process that did it, if that is known."""
        try:
            self.acc.num_accumulated()
        except redisacc.NotFoundError:
            assert self.operation == "delete"
            assert leftovers(self.client) == []
            # The next process that opens the name finishes the deletion.
            self.acc, self.sum = self.open("survivor"), 0.0
            assert self.acc.info().unacknowledged == []
        # As if time had passed: the leases of dead writers are over, and the next taker removes their parts.
        for attempt in self.client.zrange(Keys(NAME).attempts, 0, -1):
            self.client.zadd(Keys(NAME).attempts, {attempt: 1}, xx=True)
        self.apply(16.0)
        total = 0.0
        while True:
            with self.acc.recover() as found:
                if found is None:
                    break
                total += value_of(found.gradient)
        total += value_of(self.acc.take_grad(1, timeout=30))
        if self.operation in ("apply", "stream"):
            # Counted once or not at all.
            assert total - self.sum in ((CHILDS_VALUE,) if finished == "applied" else (0.0, CHILDS_VALUE))
        elif isinstance(finished, float):
            assert total + finished == self.sum
        elif self.operation in ("take", "recover"):
            # A taker that had the round in memory, had acknowledged it, and died before it could report that.
            held = self.sum - 16.0
            assert total in (self.sum, self.sum - held)
        else:
            assert total == self.sum
        info = self.acc.info()
        assert (info.num_accumulated, info.waiting, info.unacknowledged) == (0, [], [])
        self.apply(32.0, self.open())
        assert value_of(self.acc.take_grad(1, timeout=30)) == 32.0
        assert leftovers(self.client) == []
        self.acc.delete()
        left = [key for key in self.client.scan_iter() if self.client.pttl(key) < 0]
        assert left == []


def places(proxy, child_processes, client, until, case, request, clock):
    """Returns every place in an operation's messages, found by doing it twice, so that the server knows all scripts."""
    for _ in range(2):
        scene = Scene(client, case)
        proxy.arm(None)
        child = scene.start(child_processes)
        until(lambda child=child: child.done)
        lengths = proxy.lengths
        with clock.running():
            scene.survivors_go_on(child.value)
    found = [
        Fault(direction, number, offset, "stall")
        for direction in ("request", "reply")
        for number, length in enumerate(lengths[direction])
        for offset in (0, length // 2, None)
    ]
    options = request.config.option
    most = 10**6 if options.long else 8 if everything(request.config) else 3
    # Not always from the first place.
    return found[len(found) % 2 :: len(found) // most + 1]


@pytest.mark.parametrize("case", thorough(CASES, usual=USUAL))
def test_whoever_is_killed_at_any_step_leaves_nothing_behind(
    proxy, child_processes, real_client, until, case, request, clock
):
    for number, fault in enumerate(places(proxy, child_processes, real_client, until, case, request, clock)):
        scene = Scene(real_client, case)
        proxy.arm(fault)
        child = scene.start(child_processes)
        assert proxy.happened(), (fault, proxy.lengths, child.done and child.value)
        child.signal(signal.SIGKILL)
        until(lambda child=child: child.gone)
        if number % 2:
            # The requests that it had sent still arrive.
            proxy.resume()
        proxy.cut_all()
        proxy.resume()
        try:
            with clock.running():
                scene.survivors_go_on(child.value if child.done else None)
        except BaseException as error:
            error.add_note(str(fault))
            raise


@pytest.mark.parametrize(
    "case",
    thorough(
        ["apply in place", "apply buffered", "apply making room", "take in place", "take buffered"],
        usual=["apply buffered", "take buffered"],
    ),
)
def test_whoever_is_stopped_at_any_step_goes_on_when_it_wakes(
    proxy, child_processes, real_client, until, case, request, clock
):
    faults = places(proxy, child_processes, real_client, until, case, request, clock)
    for fault in faults if request.config.getoption("--long") else faults[::3]:
        scene = Scene(real_client, case)
        proxy.arm(fault)
        child = scene.start(child_processes)
        assert proxy.happened(), (fault, proxy.lengths, child.done and child.value)
        child.signal(signal.SIGSTOP)
        proxy.resume()
        try:
            with clock.running():
                # The others continue meanwhile, and find everything that the stopped process has not taken.
                scene.apply(64.0, scene.open())
                child.signal(signal.SIGCONT)
                until(lambda child=child: child.done)
                scene.survivors_go_on(child.value)
        except BaseException as error:
            error.add_note(str(fault))
            raise


@pytest.mark.usefixtures("time_runs")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_queue_goes_on_without_its_head(child_processes, real_client, until, end):
    acc = open_shared(real_client, SMALL, 10**9)
    first = child_processes.start("wait", 10**9, SMALL)
    until(lambda: acc.info().waiting)
    first.signal(end)
    acc.apply_grad(np.full(SMALL, 2.0))
    acc.apply_grad(np.full(SMALL, 4.0))
    # Its lease runs out, and it is passed over.
    assert acc.take_grad(1, timeout=60)[0] == 6.0
    if end == signal.SIGSTOP:
        # It resumes, at the end of the queue.
        first.signal(signal.SIGCONT)
        until(lambda: acc.info().waiting)
        for value in (8.0, 16.0):
            acc.apply_grad(np.full(SMALL, value), local_step=1)
        until(lambda: first.done)
        assert first.value == 24.0
    info = acc.info()
    assert (info.waiting, info.unacknowledged) == ([], [])


@pytest.mark.parametrize("limit", [0, 10**9], ids=["buffered", "in_place"])
def test_a_round_that_was_recovered_is_not_touched_by_who_wakes(proxy, child_processes, real_client, until, limit):
    """A taker is stopped before it has read its round, and the next chief assumes that it is dead. Then it resumes."""
    acc = open_shared(real_client, SMALL, limit)
    for value in (2.0, 4.0):
        acc.apply_grad(np.full(SMALL, value))
    # From reply to reply until the one that grants the round; those before it open the name.
    number = 0
    proxy.arm(Fault("reply", 0, 0, "stall"))
    child = child_processes.start("take", limit, SMALL)
    assert proxy.happened()
    while not acc.info().unacknowledged:
        number += 1
        assert number < 20
        proxy.arm(Fault("reply", 1, 0, "stall"))
        proxy.resume()
        assert proxy.happened()
    child.signal(signal.SIGSTOP)
    with acc.recover() as found:
        proxy.resume()
        child.signal(signal.SIGCONT)
        until(lambda: child.done)
        assert found.gradient[0] == 6.0
        # Whether it has read the whole round already or not, it knows that the round is no longer its own.
        assert child.value == "ConflictError"
        assert len(acc.info().unacknowledged) == 1
    assert acc.info().unacknowledged == []
    acc.delete()


@pytest.mark.slow
def test_a_fork_in_the_middle_of_an_apply(proxy, real_client):
    """The child begins to use the same handle while the reply is outstanding."""
    script = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import redisacc
from redisacc._format.keys import Keys
acc = redisacc.ConditionalAccumulator("float64", [1], "forked", reduction_type="SUM", redis=sys.argv[1])
acc.apply_grad([1.0])
print("ready", flush=True)
sys.stdin.readline()
results = []
thread = threading.Thread(target=lambda: results.append(acc.apply_grad([2.0])))
thread.start()
print("applying", flush=True)
sys.stdin.readline()
pid = os.fork()
if pid == 0:
    os._exit(0 if acc.apply_grad([4.0]) else 1)
assert os.waitpid(pid, 0)[1] == 0
print("forked", flush=True)
thread.join()
assert results[0], results
assert acc.apply_grad([8.0])
assert acc.info().duplicates == 0
print(acc.take_grad(4, timeout=20).tolist(), flush=True)
acc.delete()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, proxy.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:

        def said():
            return process.stdout.readline().strip()

        assert said() == "ready"
        proxy.arm(Fault("reply", 0, 0, "hold"))
        print(file=process.stdin, flush=True)
        assert said() == "applying"
        assert proxy.happened()
        print(file=process.stdin, flush=True)
        assert said() == "forked"
        proxy.resume()
        assert said() == "[15.0]"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
