"""Reducers that are killed, stopped, doubled, powerless or starved: every round is right, and none has to wait."""

import signal

import numpy as np
import pytest
from support.proxy import Fault, all_faults, proxy_before_server
from support.selection import thorough

import redisacc

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.usefixtures("time_runs")]

NAME = "child"
RECORD = f"redisacc:{{{NAME}}}"
WORKERS = 3
# Three parts for each gradient.
SIZE = 150_000


@pytest.fixture(autouse=True)
def _patient_with_reducers(durations):
    """Takers try again at once after a reducer was late. On a busy machine, it stores the last parts of a sum late."""
    durations(without_reducer=0.0, sum_patience=0.5)


@pytest.fixture
def own_proxy(real_server):
    """The taker's own proxy, which counts what it fetches."""
    with proxy_before_server(real_server.url) as made:
        yield made


class Rounds:
    """Rounds of one accumulator, each compared with a plain sum, bit for bit.

    Attributes:
        reduced: how many of them have used a reducer's sum.
    """

    def __init__(self, acc, own_proxy, background, until, *, workers=WORKERS):
        self.acc, self.workers, self.reduced = acc, workers, 0
        self._own_proxy = own_proxy
        self._background, self._until = background, until
        self._random = np.random.default_rng(1)

    def gradients(self):
        return (self._random.normal(size=(self.workers, SIZE)) * 10.0 ** self._random.integers(-3, 3)).astype(
            np.float32
        )

    def play(self, between=lambda: None, *, exact=True):
        """Has a round, with something that happens after each gradient.

        Args:
            between: what happens.
            exact: whether the sum is formed in the order of the gradients. Compacting changes it.
        """
        step, rows = self.acc.global_step(), self.gradients()
        self._own_proxy.listen_anew()
        take = self._background(self.acc.take_grad, self.workers)
        self._until(lambda: len(self.acc.info().waiting) == 1)
        for row in rows:
            assert self.acc.apply_grad(row, local_step=step)
            between()
        expected = rows[0].copy()
        for row in rows[1:]:
            expected += row
        np.testing.assert_allclose(take.result(), expected, rtol=0, atol=0 if exact else 1e-6 * np.abs(rows).max())
        # The sum is as large as one gradient.
        self.reduced += sum(self._own_proxy.lengths["reply"]) < 1.5 * rows[0].nbytes

    def play_until_reduced(self):
        """Has rounds until one of them uses a reducer's sum."""
        before = self.reduced
        self._until(lambda: self.play() or self.reduced > before, timeout=60)


def opened(where, partitions=None, buffer=None):
    limits = redisacc.Limits(in_place=0, buffer=buffer)
    options = {"reduction_type": "SUM", "limits": limits, "partitions": partitions}
    return redisacc.ConditionalAccumulator("float32", [SIZE], NAME, redis=where, **options)


def reducer(url):
    """Returns the work of a process that adds up gradients until it is killed."""

    def work():
        redisacc.Reducer(NAME, redis=url).run()
        yield None

    return work


@pytest.fixture
def reduce(fork, proxy):
    """Starts a process that adds up gradients until it is killed."""
    return lambda: fork(reducer(proxy.url))


@pytest.fixture(params=thorough([None, 3], usual=[None]), ids=["whole", "partitions"])
def rounds(request, own_proxy, background, until):
    made = Rounds(opened(own_proxy.url, request.param), own_proxy, background, until)
    yield made
    made.acc.delete()


@pytest.fixture
def leases(rounds, real_client):
    """Returns what a field of the leases of the reducers says, as far as there are any."""
    partitions = rounds.acc.info().partitions
    keys = [f"{RECORD}:reducer:{partition}" for partition in partitions] if partitions else [f"{RECORD}:reducer"]

    def read(field):
        return {real_client.hget(key, field) for key in keys} - {None}

    return read


def places(proxy, rounds, most):
    """Returns faults within the messages of a reducer during a round."""
    proxy.listen_anew()
    rounds.play()
    found = [fault for fault in all_faults(proxy.lengths) if fault.offset is not None or fault.direction == "reply"]
    return found[:: len(found) // most + 1]


def number_of(request, usual):
    return 200 if request.config.option.long else 24 if request.getfixturevalue("everything") else usual


@pytest.mark.slow
@pytest.mark.parametrize("end", thorough([signal.SIGKILL, signal.SIGSTOP], usual=[signal.SIGSTOP]))
def test_a_reducer_that_dies_or_sleeps_anywhere(proxy, reduce, rounds, leases, until, end, request):
    child = reduce()
    rounds.play_until_reduced()
    for fault in places(proxy, rounds, number_of(request, 3)):
        proxy.arm(Fault(fault.direction, fault.number, fault.offset, "stall"))
        # It may have nothing to say at this place in this round.
        rounds.play()
        child.signal(end)
        # It may have been stopped in the middle of storing a part: what it had sent arrives only now.
        proxy.resume()
        rounds.play()
        if end == signal.SIGSTOP:
            until(lambda: not leases("who"))
            rounds.play()
            child.signal(signal.SIGCONT)
        else:
            child.kill()
            child = reduce()
        proxy.arm(None)
        rounds.play_until_reduced()


@pytest.mark.slow
def test_a_reducer_that_may_not_write(real_server, real_client, fork, reduce, rounds):
    real_client.execute_command(*("ACL", "SETUSER", "reader", "on", ">secret", "~*", "&*", "+@all", "-set", "-publish"))
    try:
        child = fork(reducer(real_server.url.replace("://", "://reader:secret@")))
        for _ in range(3):
            rounds.play()
        assert not child.has_value
        assert rounds.reduced == 0
        # Another one, which may, works on it as soon as the first one has given up its lease.
        reduce()
        rounds.play_until_reduced()
        child.close()
    finally:
        real_client.execute_command("ACL", "DELUSER", "reader")


def test_a_full_server(daemon, background, until, fork):
    server = daemon("--maxmemory-policy", "noeviction").start()
    child = fork(reducer(server.url))
    with server.client() as client, proxy_before_server(server.url) as own_proxy:
        rounds = Rounds(opened(own_proxy.url), own_proxy, background, until)
        rounds.play_until_reduced()
        step, rows = rounds.acc.global_step(), rounds.gradients()
        take = background(rounds.acc.take_grad, WORKERS)
        until(lambda: len(rounds.acc.info().waiting) == 1)
        for row in rows[:-1]:
            rounds.acc.apply_grad(row, local_step=step)
        # Neither the reducer nor a worker can store anything.
        client.config_set("maxmemory", 1)
        with pytest.raises(redisacc.ServerError, match="maxmemory"):
            rounds.acc.apply_grad(rows[-1], local_step=step)
        client.config_set("maxmemory", 0)
        rounds.acc.apply_grad(rows[-1], local_step=step)
        np.testing.assert_array_equal(take.result(), rows[0] + rows[1] + rows[2])
        rounds.play_until_reduced()
        assert not child.has_value
        rounds.acc.delete()
    child.close()


@pytest.mark.thorough
def test_a_take_never_waits_longer_for_a_reducer_than_it_may(durations, proxy, reduce, rounds, clock):
    """The patience is for all parts together: a reducer that stops in the middle costs it once."""
    child = reduce()
    rounds.play_until_reduced()
    durations(sum_patience=100.0)
    proxy.before("SET", lambda: child.signal(signal.SIGSTOP))
    began = clock.now()
    rounds.play()
    assert clock.now() - began < 200
    child.signal(signal.SIGCONT)
