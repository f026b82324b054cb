"""A server that does not answer while a process takes over, begins a training or restores one: the process waits."""

import asyncio

import numpy as np
import pytest
from support.selection import thorough

import redisacc
import redisacc.asyncio
from redisacc.optim import SGD

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture(autouse=True)
def _brief(durations):
    """How long each call tries to reach the server before an outage is logged."""
    durations(poll=0.2, poll_every=0.1)


# A process that opens its handles and begins a training makes fewer requests than this.
EXCHANGES = 70
# The first ones open the first handle. If there is no server then, its address is wrong.
FIRST = 8

anywhere = pytest.mark.parametrize(
    ("after", "direction"),
    thorough(
        [(after, direction) for after in range(FIRST, EXCHANGES) for direction in ("request", "reply")],
        usual=[(FIRST, "request"), (22, "reply"), (30, "request"), (41, "reply"), (52, "request")],
    ),
)


def train(url):
    with redisacc.Training("train", np.zeros(2), optimizer=SGD(0.5), workers=1, redis=url) as one:
        for _, w in one.steps(until=20):
            one.apply(w - 3)
        step, found = one.latest()
    return step, found.round(3).tolist()


async def train_on_a_loop(url):
    async with redisacc.asyncio.Training("train", np.zeros(2), optimizer=SGD(0.5), workers=1, redis=url) as one:
        async for _, w in one.steps(until=20):
            await one.apply(w - 3)
        step, found = await one.latest()
    return step, found.round(3).tolist()


@pytest.mark.slow(keep="22")
@anywhere
def test_while_a_training_begins(proxy, outages, training, background, after, direction):
    outages.begin_after(after, direction)
    assert background(train, proxy.url).result(60) == (20, [3.0, 3.0])
    assert outages.number == 1
    training.chief(np.zeros(2), optimizer=SGD(0.5), reduction_type="MEAN").delete()


def test_while_a_training_begins_on_an_event_loop(proxy, outages, training, background):
    outages.begin_after(30)
    assert background(lambda: asyncio.run(train_on_a_loop(proxy.url))).result(60) == (20, [3.0, 3.0])
    assert outages.number == 1
    training.chief(np.zeros(2), optimizer=SGD(0.5), reduction_type="MEAN").delete()


def test_an_address_that_is_wrong_from_the_beginning(durations):
    """It is an error, and not an outage to wait for."""
    durations(opening=0.2)
    with pytest.raises(redisacc.ServerUnavailableError, match=r"no Redis server answers at 127\.0\.0\.1:1"):
        train("redis://127.0.0.1:1")


@pytest.mark.slow(keep="22")
@anywhere
def test_while_a_chief_takes_over(proxy, outages, training, background, until, caplog, after, direction):
    caplog.set_level("INFO")
    first = training.chief()
    one = training.work()
    rounds = first.rounds()
    next(rounds)
    first.publish({"w": np.ones(2, np.int64)})
    rounds.close()
    successor = background(lambda: training.chief(standby=True, redis=proxy.url))
    until(lambda: "is the chief; standing by to follow it" in caplog.text)
    outages.begin_after(after - FIRST, direction)
    first.close()
    second = successor.result(60)
    assert (second.step, second.parameters["w"].tolist()) == (1, [1, 1])
    training.lead(second, 30)
    assert one.result(60)[1] == list(range(30))
    assert outages.number == 1


@pytest.mark.slow(keep="optimizer-22")
@anywhere
@pytest.mark.parametrize("optimizer", [None, SGD(0.5)], ids=["update", "optimizer"])
def test_while_a_chief_restores_what_is_lost(
    proxy, outages, training, real_client, durations, after, direction, optimizer
):
    begin = {"w": np.zeros(2, np.float32)}
    training.work(gradient=lambda *_: {"w": np.ones(2, np.float32)})
    found = training.chief(begin, redis=proxy.url, optimizer=optimizer)

    def lose(step):
        if step == 3:
            durations(young=20.0)
            outages.begin_after(after - FIRST, direction)
            real_client.flushall()

    if optimizer is None:
        for taken in found.rounds(until=20):
            found.publish({"w": found.parameters["w"] - np.float32(0.5) * taken.gradient["w"]})
            lose(found.step)
    else:
        for step in found.updates(until=20):
            lose(step)
    step, tree = found.latest()
    assert (step, tree["w"].tolist()) == (20, [-10, -10])
    assert outages.number == 1


@pytest.mark.usefixtures("time_runs")
def test_another_process_leads_after_an_outage_while_a_chief_begins(proxy, outages, training, clock, until, caplog):
    """The outage lasts for longer than the lease. The process stands by again, and follows that one."""

    def elsewhere():
        began = clock.now()
        until(lambda: clock.now() - began > 12)
        training.give_lease("chief", "host:1", 1_500)

    outages.meanwhile = elsewhere
    outages.begin_after(22)
    found = training.chief(standby=True, redis=proxy.url)
    assert outages.number == 1
    assert "host:1 is the chief now. This process can no longer be the chief; standing by" in caplog.text
    training.work()
    training.lead(found, 2)
    assert found.parameters["w"].tolist() == [2, 1]


def test_while_a_chief_stands_by(proxy, outages, training, background, until, caplog):
    caplog.set_level("INFO")
    first = training.chief()
    successor = background(lambda: training.chief(standby=True, redis=proxy.url))
    until(lambda: "is the chief; standing by to follow it" in caplog.text)
    outages.begin_after(0)
    until(lambda: outages.number == 1 and not proxy.refuses)
    first.close()
    assert successor.result(60).step == 0
