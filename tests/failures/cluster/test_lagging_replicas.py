"""A replica that lagged behind takes over: handles are told what is lost, and sums are those of what is left."""

import contextlib
import os
import signal

import numpy as np
import pytest
from support.proxy import ClusterProxy
from support.resharding import hold_back, wait_for_promotion

import redisacc

pytestmark = [pytest.mark.thorough]

# Elements of a gradient, and in_place_limit: summed in place, buffered in a field, and buffered in parts.
SIZES = {"in_place": (8, 10**9), "inline": (8, 0), "parts": (100_000, 0)}


class Pair:
    """A master and its replica, which owns all slots."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.master, self.replica = cluster.nodes
        self._handles = []

    def open(self, size=8, in_place_limit=10**9, inline=None, **options):
        options = {
            "reduction_type": "SUM",
            "limits": redisacc.Limits(in_place=in_place_limit, inline=inline),
            "redis": self.cluster.url,
            **options,
        }
        self._handles.append(redisacc.ConditionalAccumulator("int32", [size], "w", **options))
        return self._handles[-1]

    def close(self):
        for handle in self._handles:
            handle.close()

    def hold_back(self, until):
        """From now on, the replica receives nothing, but still belongs to the cluster."""
        hold_back(self.replica, self.master, until)

    def take_over(self):
        self.master.kill()
        self.replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_for_promotion(self.replica)


@pytest.fixture
def pair(make_cluster):
    made = Pair(make_cluster(1, 1, dir=None, durable=False))
    yield made
    made.close()


def apply(acc, value, step=0):
    return acc.apply_grad(np.full(acc.shape, value, np.int32), local_step=step)


def total(gradient):
    """Returns the element of a gradient whose elements are all the same."""
    assert (gradient == gradient[0]).all()
    return int(gradient[0])


@pytest.fixture
def proxy(pair):
    """A proxy before the master; calls find their way to the replica when it is promoted."""
    with contextlib.closing(ClusterProxy([pair.master.port])) as proxy:
        yield proxy


@pytest.mark.parametrize("size", SIZES)
def test_what_the_replica_lacks_is_reported_once(pair, until, size):
    """Gradients of one worker, the round that the chief took, and the step itself are older than both were told."""
    worker, idle, chief = (pair.open(*SIZES[size]) for _ in range(3))
    apply(worker, 1)
    apply(idle, 2)
    assert total(chief.take_grad(2, timeout=20)) == 3
    apply(worker, 4, step=1)
    pair.hold_back(until)
    apply(worker, 8, step=1)
    assert total(chief.take_grad(2, timeout=20)) == 12
    apply(worker, 16, step=2)
    pair.take_over()
    with pytest.raises(redisacc.DataLossError, match="the last request of this session that the server knows is 2"):
        apply(worker, 32, step=2)
    # Whose outcomes are all known there notices nothing.
    assert apply(idle, 64, step=1)
    assert apply(worker, 128, step=1)
    with pytest.raises(redisacc.DataLossError, match="may also have been in a round that was taken before"):
        chief.take_grad(3, timeout=20)
    with chief.recover() as found:
        # 4 was in the round that was undone; 8 and 16 are lost.
        assert (found.global_step, total(found.gradient)) == (1, 4 + 64 + 128)
    apply(worker, 256, step=2)
    assert total(chief.take_grad(1, timeout=20)) == 256
    assert chief.info().unacknowledged == []


def test_a_take_waits_for_what_the_replica_lacks(pair, until, background):
    """Its place in the queue is lost, and so is a gradient. It does not hang, and gets what arrives afterwards."""
    worker, chief = pair.open(), pair.open()
    apply(worker, 1)
    pair.hold_back(until)
    apply(worker, 2)
    waiting = background(chief.take_grad, 3, timeout=60)
    until(lambda: chief.info().waiting)
    pair.take_over()
    # The replica has the first gradient. The take queues again.
    until(lambda: [one.num_required for one in chief.info().waiting] == [3])
    assert chief.num_accumulated() == 1
    with pytest.raises(redisacc.DataLossError):
        apply(worker, 4)
    apply(worker, 8)
    assert chief.num_accumulated() == 2
    assert waiting.running
    apply(worker, 16)
    assert total(waiting.result(60)) == 1 + 8 + 16
    info = chief.info()
    assert (info.takes, info.num_accumulated, info.waiting, info.unacknowledged) == (1, 0, [], [])


def test_a_gradient_whose_parts_the_replica_has_and_whose_entry_it_lacks(pair, until, proxy):
    """The failover falls between the upload and the script that admits the gradient. Parts alone are no gradient."""
    worker = pair.open(*SIZES["parts"], inline=0, redis=proxy.where)
    apply(worker, 1)
    first = len(pair.master.ask("KEYS", "*:part:*"))

    def fail_over():
        # The parts were sent before the script.
        until(lambda: len(pair.master.ask("KEYS", "*:part:*")) > first)
        pair.hold_back(until)
        pair.take_over()

    proxy.before("commit", fail_over)
    assert apply(worker, 2)
    assert worker.info().applied == 2
    assert total(worker.take_grad(2, timeout=20)) == 3


def test_a_round_is_confirmed_over_whatever_connection(pair, proxy, durations):
    """WAIT of Valkey knows only what its own connection wrote, and another one may have taken the round."""
    durations(replication=0.5)
    acc = pair.open(min_replicas=1, redis=proxy.where)
    assert apply(acc, 1)
    pid = pair.replica.pid
    proxy.before("leave", lambda: pair.master.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    # It is connected, but confirms nothing.
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(redisacc.NotReplicatedError, match="taken"):
            acc.take_grad(1, timeout=20)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert proxy.sent.count("leave") > 1
    with acc.recover() as found:
        assert total(found.gradient) == 1
