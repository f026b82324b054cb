"""Slots move while workers apply and a taker waits: every gradient is counted once, in one round, and nothing hangs."""

import itertools
import re
import threading

import numpy as np
import pytest
from support.resharding import Move, migrate_at_once, slot_of
from support.selection import thorough
from support.until import until

import redisacc

WORKERS = 3
# Elements of a gradient: summed in place, buffered in a field, and buffered in parts.
SIZES = {"in_place": (8, 10**9), "inline": (8, 0), "parts": (100_000, 0), "partitions": (100_000, 0)}


class Load:
    """Workers that apply numbers until they are told to stop, and a chief that takes their sum."""

    def __init__(self, url, name, size, in_place_limit, partitions=None):
        self._options = {"redis": url, "limits": redisacc.Limits(in_place=in_place_limit), "reduction_type": "SUM"}
        self._options["partitions"] = partitions
        self._schema = ("int32", [size], name)
        # Numbers of each worker that were applied, and of all that were taken.
        self._sent = [0] * WORKERS
        self.received = self.rounds = 0
        self._stop, self._count_is_final = threading.Event(), threading.Event()
        self.acc = self._open()

    def _open(self):
        return redisacc.ConditionalAccumulator(*self._schema, **self._options)

    def work(self, number):
        with self._open() as acc:
            while not self._stop.is_set():
                gradient = np.full(self._schema[1], self._sent[number] + 1, self._schema[0])
                assert acc.apply_grad(gradient, local_step=10**6)
                self._sent[number] += 1

    def take(self):
        taken = 0
        while not self._count_is_final.is_set() or taken < sum(self._sent):
            try:
                with self.acc.take(1, timeout=2) as found:
                    assert (found.gradient == found.gradient[0]).all()
                    self.received += int(found.gradient[0])
                    taken += found.num_accumulated
                    self.rounds += 1
            except redisacc.TakeTimeoutError:
                continue

    def run(self, background, move, moves):
        workers = [background(self.work, number) for number in range(WORKERS)]
        chief = background(self.take)
        for _ in range(moves):
            before = self.rounds
            move()
            until(lambda before=before: self.rounds > before, details=lambda: "no round is completed any more")
        self._stop.set()
        for call in workers:
            call.result(60)
        self._count_is_final.set()
        chief.result(60)
        assert self.received == sum(n * (n + 1) // 2 for n in self._sent)
        info = self.acc.info()
        assert (info.applied, info.num_accumulated, info.unacknowledged) == (sum(self._sent), 0, [])


class Refusals:
    """The codes of the errors by which nodes have redirected, or put off, commands."""

    def __init__(self, nodes):
        self._nodes = nodes
        self.forget()

    def forget(self):
        for node in self._nodes:
            node.ask("CONFIG", "RESETSTAT")

    @property
    def codes(self):
        texts = [node.ask("INFO", "errorstats") for node in self._nodes]
        return {code for text in texts for code in re.findall(r"errorstat_(\w+):", text)}


@pytest.fixture
def refusals(shared_cluster):
    return Refusals(shared_cluster.nodes)


def moves_of(cluster, key):
    """Returns the source, the target and the other nodes of the next move of a slot."""
    source = cluster.owner(key)
    target, *others = [node for node in cluster.nodes if node is not source]
    return source, target, others


@pytest.mark.slow(keep="in_place")
@pytest.mark.parametrize(
    ("how", "size"),
    thorough(
        [(how, size) for how in ("key by key", "at once") for size in SIZES],
        usual=[("key by key", "parts"), ("at once", "in_place"), ("key by key", "partitions")],
    ),
)
def test_nothing_is_lost_or_doubled(shared_cluster, background, until, refusals, how, size):
    load = Load(shared_cluster.url, f"moving {how} {size}", *SIZES[size], 3 if size == "partitions" else None)
    # With partitions, all four slots move, one after the other.
    name = f"moving {how} {size}"
    partitions = load.acc.info().partitions or ()
    turns = itertools.cycle([f"redisacc:{{{name}}}", *(f"redisacc:{{{name}/{p:05}}}" for p in partitions)])

    def move():
        key = next(turns)
        slot = slot_of(key)
        source, target, others = moves_of(shared_cluster, key)
        if how == "at once":
            migrate_at_once(slot, source, target, until)
        else:
            Move(slot, source, target, others).whole()

    load.run(background, move, moves=8)
    assert refusals.codes & {"MOVED", "ASK", "TRYAGAIN"}
    load.acc.delete()


def test_a_slot_that_stays_half_moved(shared_cluster, background, until, refusals):
    """Scripts wait until all of their keys are on one node. Single keys are read wherever they are."""
    acc = redisacc.ConditionalAccumulator("float32", [8], "half", redis=shared_cluster.url, reduction_type="SUM")
    assert acc.apply_grad(np.ones(8))
    source, target, others = moves_of(shared_cluster, acc.accumulator_ref)
    move = Move(slot_of(acc.accumulator_ref), source, target, others)
    move.begin()
    move.move(acc.accumulator_ref)
    assert acc.num_accumulated() == 1
    assert "ASK" in refusals.codes
    waiting = background(acc.apply_grad, np.ones(8))
    until(lambda: "TRYAGAIN" in refusals.codes)
    assert waiting.running
    move.move_all()
    move.end()
    assert waiting.result()
    assert acc.take_grad(2, timeout=20).tolist() == [2] * 8


def test_a_waiting_take_is_woken_after_its_slot_has_moved(shared_cluster, background, until, durations):
    """The subscription follows the slot: the wait would time out if messages stayed away and no poll came."""
    durations(poll_every=3600.0)
    acc = redisacc.ConditionalAccumulator("float32", [1], "woken", redis=shared_cluster.url)
    taking = background(acc.take_grad, 1, timeout=30)
    until(lambda: acc.info().waiting)
    source, target, others = moves_of(shared_cluster, acc.accumulator_ref)
    Move(slot_of(acc.accumulator_ref), source, target, others).whole()
    channel = f"{acc.accumulator_ref}:wake"
    until(lambda: target.ask("PUBSUB", "SHARDNUMSUB", channel)[1] == 1)
    with redisacc.ConditionalAccumulator("float32", [1], "woken", redis=shared_cluster.url) as other:
        other.apply_grad([5], local_step=10)
    assert taking.result().tolist() == [5]
