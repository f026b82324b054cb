"""Full servers: one that refuses (noeviction), and some that evict keys."""

import logging
import re

import numpy as np
import pytest
from support.command import diagnose
from support.leaks import leftovers, written
from support.proxy import proxy_before_server
from support.servers import contents

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")

RECORD = "redisacc:{w}"
# Gradients that are added in place, and buffered in one part, in several, and in partitions.
GRADIENTS = {
    "dense-buffered": ("dense", [600], (np.ones(600, np.float32),), 0),
    "dense-large": ("dense", [1_500_000], (np.ones(1_500_000, np.float32),), 0),
    "dense-partitions": ("dense", [1_500_000], (np.ones(1_500_000, np.float32),), 0),
    "sparse-in_place": ("sparse", [9, 2], ([1, 3], np.ones((2, 2), np.float32)), 10**9),
}


class Case:
    """An accumulator, and a gradient of ones for it."""

    def __init__(self, open_accumulator, where, kind, shape, grad, limit, partitions=None, inline=None):
        self.acc = open_accumulator(
            *(kind, "float32", shape, "w"),
            redis=where,
            limits=redisacc.Limits(in_place=limit, inline=inline),
            reduction_type="SUM",
            worker="ann",
            partitions=partitions,
        )
        self._grad = grad

    def apply(self, step=0):
        return self.acc.apply_grad(*self._grad, local_step=step)

    @staticmethod
    def value(gradient):
        """The value of every element of a gradient."""
        if isinstance(gradient, tuple):
            gradient = gradient[1]
        values = np.unique(np.asarray(getattr(gradient, "values", gradient)))
        assert len(values) == 1
        return float(values[0])

    def take(self, number, timeout=20):
        return self.value(self.acc.take_grad(number, timeout=timeout))


@pytest.fixture(params=GRADIENTS)
def case(request, daemon, open_accumulator):
    server = daemon("--maxmemory-policy", "noeviction").start()
    partitions = 3 if "partitions" in request.param else None
    return server, Case(open_accumulator, server.url, *GRADIENTS[request.param], partitions)


class Full:
    """Fills a server up to its maxmemory."""

    def __init__(self, server):
        self.admin = server.client()
        self.fill()

    def fill(self):
        # Less than an empty server uses.
        self.admin.config_set("maxmemory", 1)

    def empty(self):
        self.admin.config_set("maxmemory", 0)


@pytest.mark.every_server(case="sparse-in_place")
def test_a_full_server_refuses_a_gradient_and_stores_none_of_it(case):
    server, it = case
    it.apply()
    before = contents(server.client())
    full = Full(server)
    with pytest.raises(redisacc.ServerError, match=r"Take rounds, .* or give the server more"):
        it.apply()
    with pytest.raises(redisacc.ServerError, match="maxmemory"):
        it.apply(step=-1)
    assert contents(server.client()) == before
    assert written(server.client()) == []
    full.empty()
    assert it.apply()
    assert it.take(2) == 2


@pytest.mark.every_server(case="dense-buffered")
def test_a_full_server_can_be_drained(case, open_accumulator, background, until):
    server, it = case
    for _ in range(3):
        it.apply()
    if it.acc.info().partitions:
        # A worker has died.
        server.client().zadd(f"{RECORD}:attempts", {"given-up-1 3": 1})
    full = Full(server)
    # A chief that starts only now.
    chief = type(it.acc)("float32", it.acc.shape, "w", redis=server.url, reduction_type="SUM")
    with pytest.raises(redisacc.ServerError, match="maxmemory"):
        redisacc.ConditionalAccumulator("float32", [1], "new", redis=server.url)
    # Taken, lost, found, taken again.
    with pytest.raises(ZeroDivisionError), chief.take(3, timeout=20):
        raise ZeroDivisionError
    with chief.recover() as found:
        assert it.value(found.gradient) == 3
    assert chief.info().unacknowledged == []
    keys = list(server.client().scan_iter())
    assert not [key for key in keys if re.search(rb":part:|:partition:|:taken|:attempts", key)]
    # One that waits while the server is full, keeps its place, and is served when there is memory again.
    chief.set_global_step(5)
    chief.set_quorum(least=3)
    chief.set_quorum(least=2)
    waiting = background(it.take, None, timeout=60)
    until(lambda: chief.info().waiting)
    with pytest.raises(redisacc.TakeTimeoutError):
        chief.take_grad(1, timeout=0.1)
    full.empty()
    it.apply(step=5)
    full.fill()
    with pytest.raises(redisacc.ServerError, match="maxmemory"):
        it.apply(step=5)
    full.empty()
    it.apply(step=5)
    assert waiting.result(60) == 2
    # And accumulators can be deleted to free memory.
    it.apply(step=6)
    full.fill()
    chief.delete()
    assert leftovers(server.client()) == []
    assert set(server.client().scan_iter("redisacc:{w}*")) <= {*written(server.client())}
    chief.close()


@pytest.mark.every_server(kind="dense-buffered")
@pytest.mark.parametrize("kind", ["dense-buffered", "dense-large"])
def test_a_gradient_whose_staging_filled_the_server_is_taken_in(daemon, open_accumulator, kind, until):
    # Its memory is in use already, so a refusal at this point would free nothing.
    server = daemon("--maxmemory-policy", "noeviction").start()
    full = Full(server)
    full.empty()

    def fill():
        # What was sent before the script.
        until(lambda: written(server.client()))
        full.fill()

    with proxy_before_server(server.url) as proxy:
        it = Case(open_accumulator, proxy.url, *GRADIENTS[kind], inline=0)
        assert it.apply()
        if kind == "dense-large":
            # It asks first whether the gradient would count.
            proxy.before("commit", lambda: None)
        proxy.before("commit", fill)
        assert it.apply()
        full.empty()
        assert it.take(2) == 2
        assert written(server.client()) == []


def test_an_evicting_policy_is_said_in_the_log_when_one_opens(daemon, open_accumulator, caplog):
    server = daemon("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru").start()

    def said(name):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "redisacc"):
            open_accumulator("dense", "float32", [1], name, redis=server.url)
        return [record.getMessage() for record in caplog.records]

    (warning,) = said("w")
    assert "allkeys-lru" in warning
    assert warning.endswith(
        "Set it to noeviction: CONFIG SET maxmemory-policy noeviction, and in its configuration file"
    )
    # Each server once, and none that evicts nothing.
    assert said("v") == []
    for policy, memory in (("noeviction", "100mb"), ("allkeys-lru", 0)):
        server = daemon("--maxmemory", str(memory), "--maxmemory-policy", policy).start()
        assert said("w") == [], policy


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_what_is_missing_leads_to_doctor_which_knows_whether_keys_are_evicted(daemon, open_accumulator, policy):
    """A key may also have been removed by hand, where another policy would have changed nothing."""
    server = daemon("--maxmemory", "100mb", "--maxmemory-policy", policy).start()
    acc = open_accumulator("dense", "float32", [1], "w", redis=server.url)
    acc.apply_grad([1.0])
    server.client().delete(*[key for key in server.client().scan_iter() if b":sums" in key])
    with pytest.raises(redisacc.CorruptDataError) as failure:
        acc.take_grad(1)
    assert "`redisacc doctor` tells whether this server evicts keys" in str(failure.value)
    assert "noeviction" not in str(failure.value)
    advice = "run CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration file"
    assert diagnose(server.url)["eviction"]["advice"] == ("" if policy == "noeviction" else advice)


# tests/hostile removes every other key.
def test_an_evicted_record_does_not_lead_to_a_new_accumulator(daemon, open_accumulator):
    """It would begin with the sums of the old one."""
    server = daemon().start()
    acc = open_accumulator("dense", "float32", [1], "w", redis=server.url)
    acc.apply_grad([1.0])
    server.client().unlink(RECORD)
    for call in (lambda: acc.apply_grad([1.0]), lambda: acc.take_grad(1, timeout=5)):
        with pytest.raises(redisacc.NotFoundError, match="accumulator"):
            call()
    with pytest.raises(redisacc.CorruptDataError, match="evicted"):
        open_accumulator("dense", "float32", [1], "w", redis=server.url)


@pytest.mark.servers("valkey", "redis62")
@pytest.mark.every_server
def test_a_server_that_really_evicts_never_gives_a_wrong_sum(daemon, open_accumulator):
    server = daemon("--maxmemory-policy", "allkeys-random").start()
    admin = server.client()
    right = wrong = refused = 0
    for attempt in range(60):
        name = f"w{attempt}"
        kind = "sparse" if attempt % 2 else "dense"
        limit = 0 if attempt % 4 < 2 else 10**9
        try:
            acc = open_accumulator(
                kind,
                "float32",
                [64, 16] if kind == "sparse" else [1024],
                name,
                redis=server.url,
                limits=redisacc.Limits(in_place=limit),
                reduction_type="SUM",
            )
            ones = np.ones((64, 16) if kind == "sparse" else 1024, np.float32)
            grad = (np.arange(64), ones) if kind == "sparse" else (ones,)
            for number in range(6):
                acc.apply_grad(*grad)
                if number == 3:
                    # So little memory that some keys are evicted.
                    admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 3000)
            value = Case.value(acc.take_grad(6, timeout=0))
        except (
            redisacc.CorruptDataError,
            redisacc.NotFoundError,
            redisacc.DataLossError,
            redisacc.ServerError,
            redisacc.TakeTimeoutError,
        ):
            refused += 1
        else:
            right += value == 6
            wrong += value != 6
        finally:
            admin.config_set("maxmemory", 0)
            admin.flushall()
    assert wrong == 0
    assert refused > 0
    assert right + refused == 60
