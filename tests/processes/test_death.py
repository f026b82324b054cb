"""Processes that are killed, or stopped for a while, at every step of every operation: the others go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from faults.proxy import Fault, proxy_before
from leaks import leftovers
from processes.nursery import MINE, opened

import redisacc

pytestmark = pytest.mark.servers("valkey")

NURSERY = Path(__file__).with_name("nursery.py")
SMALL, LARGE = 6, 1_200_000

# operation, in_place_limit, elements
CASES = {
    "apply in place": ("apply", 10**9, SMALL),
    "apply parked": ("apply", 0, SMALL),
    "apply large": ("apply", 0, LARGE),
    "apply making room": ("apply", 0, SMALL),
    "take in place": ("take", 10**9, SMALL),
    "take parked": ("take", 0, SMALL),
    "take large": ("take", 0, LARGE),
    "recover": ("recover", 0, SMALL),
    "set_global_step": ("set_global_step", 0, SMALL),
    "open": ("open", 0, SMALL),
    "delete": ("delete", 0, SMALL),
}


class Mortal:
    """A process that does one operation, through a proxy."""

    def __init__(self, pid: int, out: Path) -> None:
        self.pid = pid
        self._out = out

    def signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            # What it was stalled behind was the end of its last reply, and it has ended by itself.
            assert self.done

    @property
    def done(self) -> bool:
        return self._out.exists()

    @property
    def value(self):
        return json.loads(self._out.read_text())

    @property
    def gone(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


class Nursery:
    def __init__(self, url: str, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._born: list[Mortal] = []

    def bear(self, operation: str, limit: int, size: int) -> Mortal:
        self._number += 1
        out = self._directory / f"out{self._number}"
        task = {"operation": operation, "limit": limit, "size": size, "out": str(out)}
        print(json.dumps(task), file=self._process.stdin, flush=True)
        self._born.append(Mortal(int(self._process.stdout.readline()), out))
        return self._born[-1]

    def end(self) -> None:
        for mortal in self._born:
            if not mortal.done and not mortal.gone:
                mortal.signal(signal.SIGKILL)
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


@pytest.fixture
def proxy(real_server):
    address = urlsplit(real_server.url)
    with proxy_before((address.hostname, address.port)) as proxy:
        yield proxy


@pytest.fixture
def nursery(proxy, real_client, tmp_path):
    nursery = Nursery(proxy.url, tmp_path)
    yield nursery
    nursery.end()


class Scene:
    """What stands there before the operation, and what has to be there after it, whatever became of it."""

    def __init__(self, client, case: str) -> None:
        self.operation, self.limit, self.size = CASES[case]
        self.case = case
        client.flushall()
        self.client = client
        self.acc = opened(client, self.size, self.limit, "survivor")
        # What the survivors know to be counted.
        self.sum = 0.0
        if case == "apply making room" or self.operation in ("take", "delete"):
            self.apply(2.0)
            self.apply(4.0)
        if self.operation in ("recover", "delete"):
            if self.operation == "recover":
                self.apply(2.0)
            with pytest.raises(ZeroDivisionError), self.acc.take(1):
                raise ZeroDivisionError
            if self.operation == "delete":
                self.apply(8.0)

    def apply(self, value: float, acc=None) -> None:
        acc = acc or self.acc
        assert acc.apply_grad(np.full(self.size, value, np.float32), local_step=2**62)
        self.sum += value

    def survivors_go_on(self, finished=None) -> None:
        """``finished``: what the operation came to for the one who did it, if that is known."""
        try:
            self.acc.num_accumulated()
        except redisacc.AccumulatorNotFoundError:
            assert self.operation == "delete"
            assert leftovers(self.client) == []
            # Whoever opens the name finishes what was begun.
            self.acc, self.sum = opened(self.client, self.size, self.limit, "survivor"), 0.0
            assert self.acc.info().unacknowledged == []
        self.apply(16.0)
        total = 0.0
        while True:
            with self.acc.recover() as found:
                if found is None:
                    break
                assert found.gradient[0] == found.gradient[-1]
                total += float(found.gradient[0])
        gradient = self.acc.take_grad(1, timeout=30)
        assert gradient[0] == gradient[-1]
        total += float(gradient[0])
        if self.operation == "apply":
            # Counted once or not at all.
            assert total - self.sum in ((MINE,) if finished == "applied" else (0.0, MINE))
        elif isinstance(finished, float):
            assert total + finished == self.sum
        elif self.operation in ("take", "recover"):
            # A taker that had the round in memory, had acknowledged it, and died before it could say so.
            held = self.sum - 16.0
            assert total in (self.sum, self.sum - held)
        else:
            assert total == self.sum
        info = self.acc.info()
        assert (info.num_accumulated, info.waiting, info.unacknowledged) == (0, [], [])
        self.apply(32.0, opened(self.client, self.size, self.limit))
        assert self.acc.take_grad(1, timeout=30)[0] == 32.0
        assert leftovers(self.client) == []
        self.acc.delete()
        left = [key for key in self.client.scan_iter() if self.client.pttl(key) < 0]
        assert left == []


def places(proxy, nursery, client, until, case, request):
    """Every place in the messages of an operation, found by doing it; the second time the server knows all scripts."""
    for _ in range(2):
        scene = Scene(client, case)
        proxy.arm(None)
        mortal = nursery.bear(scene.operation, scene.limit, scene.size)
        until(lambda mortal=mortal: mortal.done)
        lengths = proxy.lengths
        scene.survivors_go_on(mortal.value)
    found = [
        Fault(direction, number, offset, "stall")
        for direction in ("request", "reply")
        for number, length in enumerate(lengths[direction])
        for offset in (0, length // 2, None)
    ]
    most = 10**6 if request.config.getoption("--long") else 8
    # From a place that isn't always the first.
    return found[len(found) % 2 :: len(found) // most + 1]


@pytest.mark.parametrize("case", CASES)
def test_whoever_is_killed_at_any_step_leaves_nothing_behind(proxy, nursery, real_client, until, case, request):
    for number, fault in enumerate(places(proxy, nursery, real_client, until, case, request)):
        scene = Scene(real_client, case)
        proxy.arm(fault)
        mortal = nursery.bear(scene.operation, scene.limit, scene.size)
        assert proxy.happened(), fault
        mortal.signal(signal.SIGKILL)
        until(lambda mortal=mortal: mortal.gone)
        if number % 2:
            # What it had sent still arrives.
            proxy.resume()
        proxy.cut_all()
        proxy.resume()
        try:
            scene.survivors_go_on(mortal.value if mortal.done else None)
        except BaseException as error:
            error.add_note(str(fault))
            raise


@pytest.mark.parametrize(
    "case", ["apply in place", "apply parked", "apply making room", "take in place", "take parked"]
)
def test_whoever_is_stopped_at_any_step_goes_on_when_it_wakes(proxy, nursery, real_client, until, case, request):
    faults = places(proxy, nursery, real_client, until, case, request)
    for fault in faults if request.config.getoption("--long") else faults[::3]:
        scene = Scene(real_client, case)
        proxy.arm(fault)
        mortal = nursery.bear(scene.operation, scene.limit, scene.size)
        assert proxy.happened(), fault
        mortal.signal(signal.SIGSTOP)
        proxy.resume()
        # The others go on meanwhile; what has not been taken by the one who sleeps, they find.
        scene.apply(64.0, opened(real_client, scene.size, scene.limit))
        mortal.signal(signal.SIGCONT)
        until(lambda mortal=mortal: mortal.done)
        try:
            scene.survivors_go_on(mortal.value)
        except BaseException as error:
            error.add_note(str(fault))
            raise


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_queue_goes_on_without_its_head(nursery, real_client, until, end):
    acc = opened(real_client, SMALL, 10**9)
    first = nursery.bear("wait", 10**9, SMALL)
    until(lambda: acc.info().waiting)
    first.signal(end)
    acc.apply_grad(np.full(SMALL, 2.0))
    acc.apply_grad(np.full(SMALL, 4.0))
    # Its lease runs out, and it is passed over.
    assert acc.take_grad(1, timeout=60)[0] == 6.0
    if end == signal.SIGSTOP:
        # It wakes, and stands at the end of the queue.
        first.signal(signal.SIGCONT)
        until(lambda: acc.info().waiting)
        for value in (8.0, 16.0):
            acc.apply_grad(np.full(SMALL, value), local_step=1)
        until(lambda: first.done)
        assert first.value == 24.0
    info = acc.info()
    assert (info.waiting, info.unacknowledged) == ([], [])


@pytest.mark.parametrize("limit", [0, 10**9], ids=["parked", "in_place"])
def test_a_round_that_was_recovered_is_not_touched_by_who_wakes(proxy, nursery, real_client, until, limit):
    """A taker is stopped before it has read its round, and the next chief takes it for dead. Then it wakes."""
    acc = opened(real_client, SMALL, limit)
    for value in (2.0, 4.0):
        acc.apply_grad(np.full(SMALL, value))
    # From one reply to the next, until it is the one that grants the round: what comes before opens the name.
    number = 0
    proxy.arm(Fault("reply", 0, 0, "stall"))
    mortal = nursery.bear("take", limit, SMALL)
    assert proxy.happened()
    while not acc.info().unacknowledged:
        number += 1
        assert number < 20
        proxy.arm(Fault("reply", 1, 0, "stall"))
        proxy.resume()
        assert proxy.happened()
    mortal.signal(signal.SIGSTOP)
    with acc.recover() as found:
        proxy.resume()
        mortal.signal(signal.SIGCONT)
        until(lambda: mortal.done)
        assert found.gradient[0] == 6.0
        # It had all in memory already, or finds it gone.
        assert mortal.value in (6.0, "CorruptDataError")
        assert len(acc.info().unacknowledged) == 1
    assert acc.info().unacknowledged == []
    acc.delete()


def test_a_fork_in_the_middle_of_an_apply(proxy, real_client):
    """The reply is outstanding when the child begins to use the same handle."""
    script = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import redisacc
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
