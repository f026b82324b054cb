"""Partitions whose masters fail: what replicas have confirmed is kept, and what is lost is reported by name."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
import redis
from support.command import collect_garbage
from support.leaks import leftovers
from support.proxy import Proxy
from support.resharding import hold_back, hold_back_no_more, replication, wait_for_promotion
from support.servers import ClusterClient

import redisacc

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("short_wait"),
    # The redis.RedisCluster of a test forgets a node that has failed, and leaves its socket open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Elements of a gradient. Each gradient is 1 at one of them and 0 elsewhere, so the sum lists the gradients in it.
SIZE = 200
RECORD = "redisacc:{w}"
IN_PARTS = redisacc.Limits(in_place=0, inline=0)


@pytest.fixture
def short_wait(durations):
    durations(replication=0.5)


class Spread:
    """An accumulator of two partitions, each on a master of its own that has a replica.

    Attributes:
        leader: the master that has the record, and one of the partitions.
        other: the master that has the other partition and nothing else.
    """

    def __init__(self, cluster, until, **options):
        self.cluster = cluster
        self._options = options
        self._until = until
        self._handles = []
        self._proxies = {}
        self.partitions = self.open().info().partitions
        self.homes = [f"redisacc:{{w/{partition:05}}}" for partition in self.partitions]
        self.leader = cluster.owner(RECORD)
        owners = [cluster.owner(home) for home in self.homes]
        (self.other,) = [node for node in owners if node is not self.leader]

    def open(self, where=None, **options):
        options = {
            "partitions": 2,
            "limits": IN_PARTS,
            "reduction_type": "SUM",
            **self._options,
            **options,
        }
        made = redisacc.ConditionalAccumulator("float32", [SIZE], "w", redis=where or self.cluster.url, **options)
        self._handles.append(made)
        return made

    def close(self):
        for handle in self._handles:
            handle.close()
        for proxy in self._proxies.values():
            proxy.close()

    def client(self):
        return ClusterClient(host="127.0.0.1", port=self.cluster.owner(RECORD).port)

    def proxied(self):
        """Returns a client that reaches each node through a proxy."""

        def by_proxy(address):
            host, port = address
            if port not in self._proxies:
                self._proxies[port] = Proxy((host, port))
            return host, self._proxies[port].port

        start = redis.cluster.ClusterNode(*by_proxy(("127.0.0.1", self.leader.port)))
        return redis.RedisCluster(startup_nodes=[start], address_remap=by_proxy)

    def proxy_before(self, node):
        return self._proxies[node.port]

    def replica_of(self, master):
        return next(
            node
            for node in self.cluster.nodes
            if node not in (self.leader, self.other) and replication(node)["master_port"] == str(master.port)
        )

    @contextlib.contextmanager
    def stalled(self, replica):
        """It stays connected and confirms nothing."""
        os.kill(replica.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(replica.pid, signal.SIGCONT)

    def hold_back(self, master):
        """From now on, its replica receives nothing, but still belongs to the cluster."""
        hold_back(self.replica_of(master), master, self._until)

    def fail_over(self, master, *, in_step=False):
        """Kills a master, and lets its replica take over; with ``in_step``, when it has everything."""
        replica = self.replica_of(master)
        if in_step:
            hold_back(replica, master, self._until)
        master.kill()
        hold_back_no_more(replica)
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_for_promotion(replica)

    def parts(self):
        return sorted(key.decode() for key in self.client().scan_iter("redisacc:{w/*}:partition:*"))


@pytest.fixture
def spread(request, make_cluster, until):
    made = Spread(make_cluster(2, 1, dir=None, durable=False), until, **getattr(request, "param", {}))
    yield made
    made.close()


def gradient(number):
    values = np.zeros(SIZE, np.float32)
    values[number] = 1
    return values


def numbers_of(taken):
    """Returns the numbers of the gradients in a sum, each as often as it is in it."""
    return [number for number, times in enumerate(taken.tolist()) for _ in range(int(times))]


@pytest.fixture
def proxied(spread):
    """A handle that reaches each node through a proxy of its own."""
    with spread.proxied() as client:
        yield spread.open(client)


# min_replicas


def test_replicas_of_every_master_confirm_a_gradient(spread):
    acc = spread.open(min_replicas=1)
    assert acc.apply_grad(gradient(1))
    for master in (spread.leader, spread.other):
        with spread.stalled(spread.replica_of(master)):
            with pytest.raises(redisacc.NotReplicatedError, match="the gradient was counted") as caught:
                acc.apply_grad(gradient(2))
            assert (caught.value.replicas, caught.value.min_replicas) == (0, 1)
    # They are counted all the same.
    assert numbers_of(acc.take_grad(3, timeout=20)) == [1, 2, 2]
    assert spread.parts() == []


def test_what_was_not_confirmed_is_lost_by_name_and_nothing_else(spread, caplog):
    acc, watcher = spread.open(min_replicas=1), spread.open()
    assert acc.apply_grad(gradient(1))
    known = set(spread.parts())
    spread.hold_back(spread.other)
    with pytest.raises(redisacc.NotReplicatedError):
        acc.apply_grad(gradient(2))
    lost = {key for key in set(spread.parts()) - known if spread.cluster.owner(key) is spread.other}
    spread.fail_over(spread.other)
    with pytest.raises(redisacc.DataLossError, match="without that gradient") as caught:
        watcher.take_grad(2, timeout=20)
    assert {caught.value.part} == lost
    assert f":{caught.value.gradient}:" in caught.value.part
    with watcher.recover(skip_lost=True) as left:
        assert (numbers_of(left.gradient), left.num_accumulated) == ([1], 1)
    assert caught.value.gradient in caplog.text
    # The rest of the gradient that was lost is gone as well.
    assert (spread.parts(), watcher.info().unacknowledged) == ([], [])


@pytest.mark.parametrize("spread", [{"limits": redisacc.Limits(0, 2 * 4 * SIZE, 0)}], indirect=True)
def test_a_sum_that_replicas_do_not_confirm_replaces_nothing(spread):
    """Other workers were told that their gradients were confirmed."""
    acc = spread.open(min_replicas=1)
    assert acc.apply_grad(gradient(1))
    assert acc.apply_grad(gradient(2))
    spread.hold_back(spread.other)
    with pytest.raises(redisacc.AccumulatorFullError, match="replicas do not confirm a sum of them"):
        acc.apply_grad(gradient(3))
    assert len(spread.parts()) == 4
    spread.fail_over(spread.other)
    assert numbers_of(spread.open().take_grad(2, timeout=20)) == [1, 2]


def test_a_round_keeps_its_parts_until_replicas_know_that_it_is_over(spread):
    """Otherwise, a leader that took over would list a round whose parts are gone."""
    acc = spread.open(min_replicas=1)
    assert acc.apply_grad(gradient(1))
    with acc.take(1, timeout=20) as taken:
        spread.hold_back(spread.leader)
        assert numbers_of(taken.gradient) == [1]
    assert (len(spread.parts()), spread.client().zcard(f"{RECORD}:attempts"), acc.info().unacknowledged) == (2, 1, [])
    spread.fail_over(spread.leader)
    with spread.open().recover() as again:
        assert numbers_of(again.gradient) == [1]
    assert spread.parts() == []


# Masters that fail


@pytest.mark.parametrize("which", ["leader", "other"])
def test_a_master_fails_while_workers_apply(spread, which, background, until):
    """Every gradient is in one round, except that one that was not confirmed may be in none."""
    confirmed, unconfirmed, stop = [], [], threading.Event()

    def work(first):
        acc = spread.open(min_replicas=1)
        for number in range(first, first + SIZE // 2):
            if stop.is_set():
                return
            operate = acc.apply_grad
            arguments = (gradient(number), 10**6)
            try:
                while True:
                    try:
                        assert operate(*arguments)
                        break
                    except redisacc.OutcomeUnknownError as error:
                        operate, arguments = error.settle, ()
            except (redisacc.NotReplicatedError, redisacc.DataLossError):
                unconfirmed.append(number)
            else:
                confirmed.append(number)

    crew = [background(work, first) for first in (0, SIZE // 2)]
    until(lambda: len(confirmed) > 10)
    spread.fail_over(getattr(spread, which))
    # The one that has taken over has no replica.
    until(lambda: len(unconfirmed) > 4)
    stop.set()
    for one in crew:
        one.result(60)
    taker = spread.open()
    # The lost gradient may also be one whose worker was killed with its master.
    try:
        found = numbers_of(taker.take_grad(1, timeout=20))
    except redisacc.DataLossError:
        with taker.recover(skip_lost=True) as taken:
            found = numbers_of(taken.gradient)
    assert len(found) == len(set(found))
    assert set(confirmed) <= set(found) <= {*confirmed, *unconfirmed}
    collect_garbage(spread.cluster.url)
    assert leftovers(spread.client()) == []


@pytest.mark.parametrize("which", ["leader", "other"])
def test_a_master_fails_while_a_taker_reads(spread, proxied, which):
    """Its replica has everything, so nobody notices."""
    for number in (1, 2, 3):
        proxied.apply_grad(gradient(number))
    node = getattr(spread, which)
    failed = []
    spread.proxy_before(node).before("GET", lambda: failed.append(spread.fail_over(node, in_step=True)))
    assert numbers_of(proxied.take_grad(3, timeout=60)) == [1, 2, 3]
    assert (len(failed), spread.parts(), proxied.info().unacknowledged) == (1, [], [])


@pytest.mark.parametrize("lags", [False, True])
def test_the_leader_fails_between_the_registration_and_the_commit(spread, proxied, lags):
    """A leader that does not know the attempt refuses it, and its writer begins a new one."""
    proxied.apply_grad(gradient(1))
    if lags:
        # Before the registration, so that it is lost.
        spread.hold_back(spread.leader)
    proxy = spread.proxy_before(spread.leader)
    proxy.before("commit", lambda: spread.fail_over(spread.leader, in_step=not lags))
    assert proxied.apply_grad(gradient(2)).num_accumulated == 2
    assert numbers_of(proxied.take_grad(2, timeout=60)) == [1, 2]
    collect_garbage(spread.cluster.url)
    assert leftovers(spread.client()) == []


# Parameters, which have the same partitions


@pytest.fixture
def weights(spread):
    with redisacc.Parameters("w", redis=spread.cluster.url, partitions=2) as made:
        made.publish(np.zeros(40_000), 0)
        partitions = spread.client().hget(f"{RECORD}:parameters", "partitions")
        assert partitions == ",".join(map(str, spread.partitions)).encode()
        yield made
        made.delete()


def test_the_leader_of_parameters_forgets_a_version(spread, weights):
    """What the version before consists of was only retired, so readers have it, and the publisher publishes again."""
    spread.hold_back(spread.leader)
    weights.publish(np.ones(40_000), 1)
    spread.fail_over(spread.leader)
    with redisacc.Parameters("w", redis=spread.cluster.url) as reader:
        step, values = reader.latest()
        assert (step, set(values.tolist())) == (0, {0.0})
        weights.publish(np.ones(40_000), 1)
        step, values = reader.latest()
        assert (step, set(values.tolist())) == (1, {1.0})
    # The other master still has its part of the version that was forgotten.
    assert [one["why"] for one in collect_garbage(spread.cluster.url)].count("blob") == 1
    assert collect_garbage(spread.cluster.url, "--dry-run") == []
