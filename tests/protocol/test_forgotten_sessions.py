"""The table of sessions forgets those that were idle for an hour, a few at a time, and none of them counts twice."""

import time

import pytest
from support.proxy import Fault
from support.selection import REAL

import redisacc

SESSIONS = "redisacc:{idle}:sessions"
HOUR = 3600


def handle(where, **options):
    return redisacc.ConditionalAccumulator(
        "float32", [2], "idle", reduction_type="SUM", redis=where, limits=redisacc.Limits(in_place=0), **options
    )


def fill(client, idle, fresh):
    """Puts sessions into the table, idle for a bit more than an hour or for a bit less."""
    now = int(time.time() * 1000)
    for name, number, seen in (("idle", idle, now - 3_605_000), ("fresh", fresh, now - 3_540_000)):
        for k in range(number):
            client.hset(SESSIONS, f"{now - 3 * 3_600_000}-{name}{k}", f"1 applied 0 1 {seen} 1 0 somebody")


def left(client, what):
    return sum(what.encode() in name for name in client.hkeys(SESSIONS))


def take(acc):
    acc.set_global_step(0)
    acc.apply_grad([1, 2])
    acc.take_grad(1)


# The operations that check the table. Each is done by a handle that has sent nothing yet, or opens one.
OPERATIONS = {
    "take": take,
    "apply": lambda acc: acc.apply_grad([1, 2], local_step=1 << 40),
    "step": lambda acc: acc.set_global_step(0),
}


@pytest.mark.parametrize("what", ["open", *OPERATIONS])
def test_the_idle_are_forgotten_a_few_at_a_time_and_nobody_else(client, what):
    known = handle(client)
    known.apply_grad([1, 2])
    handles = [handle(client) for _ in range(200 if what in OPERATIONS else 0)]
    fill(client, idle=40, fresh=3)

    def operate():
        if what in OPERATIONS:
            OPERATIONS[what](handles.pop())
        else:
            handle(client)

    operate()
    assert 40 - 8 <= left(client, "idle") < 40
    while left(client, "idle"):
        operate()
    assert left(client, "fresh") == 3
    # Who is known looks at nobody.
    fill(client, idle=40, fresh=0)
    for _ in range(20):
        known.apply_grad([1, 2], local_step=1 << 40)
    assert left(client, "idle") == 40


@pytest.mark.slow
@pytest.mark.servers(*REAL)
def test_the_table_stays_small_however_many_clients_come_and_go(client):
    sizes = []
    for _ in range(300):
        handle(client).apply_grad([1, 2])
        # More than an hour passes.
        for name, text in client.hgetall(SESSIONS).items():
            words = text.decode().split(" ")
            words[4] = str(int(words[4]) - 7_200_000)
            client.hset(SESSIONS, name, " ".join(words))
        sizes.append(client.hlen(SESSIONS))
    assert max(sizes) < 20


@pytest.mark.every_server
def test_a_late_copy_of_a_session_that_was_forgotten_is_not_counted(real_client, proxy, clock):
    """It may have been counted while the session was known. So a new session might count it twice."""
    acc, other = handle(proxy.where), handle(real_client)
    clock.advance(2 * HOUR)
    for operate in (lambda: acc.apply_grad([1, 2]), lambda: acc.set_global_step(5)):
        proxy.arm(Fault("request", 0, 0, "late"))
        with pytest.raises(redisacc.OutcomeUnknownError, match="forgotten") as failure:
            operate()
        with pytest.raises(redisacc.OutcomeUnknownError, match="forgotten"):
            failure.value.settle()
        assert proxy.deliver_late() == 1
    info = other.info()
    assert (info.num_accumulated, info.applied, info.global_step) == (0, 0, 0)


@pytest.mark.every_server
def test_a_handle_that_was_idle_for_long_goes_on(real_client, proxy, clock):
    acc = handle(proxy.where)
    acc.apply_grad([1, 2])
    (session,) = real_client.hkeys(SESSIONS)
    # A session of this age may be unknown because it is new.
    clock.advance(HOUR - 120)
    real_client.delete(SESSIONS)
    with pytest.raises(redisacc.DataLossError):
        acc.set_global_step(0)
    assert acc.apply_grad([1, 2])
    for act in (lambda: acc.apply_grad([1, 2]), lambda: acc.set_global_step(0), lambda: acc.take_grad(1)):
        clock.advance(2 * HOUR)
        real_client.delete(SESSIONS)
        act()
        (other,) = real_client.hkeys(SESSIONS)
        assert other != session
        session = other
    # It knows the time from then on.
    proxy.listen_anew()
    acc.apply_grad([1, 2], local_step=1)
    assert proxy.sent == ["commit"]


@pytest.mark.servers(*REAL)
def test_a_taker_may_wait_for_longer_than_clients_are_known(
    client,
    background,
    until,
    clock,
    durations,
):
    durations(poll_every=600.0, taker_lease=1800.0)
    acc = handle(client)
    waiting = background(acc.take_grad, 1, timeout=3 * HOUR)
    until(lambda: acc.info().waiting)
    clock.advance(2 * HOUR)
    client.delete(SESSIONS)
    assert waiting.running
    handle(client).apply_grad([1, 2])
    assert waiting.result().tolist() == [1.0, 2.0]
    assert acc.info().unacknowledged == []
    acc.apply_grad([3, 4], local_step=1)
    assert acc.take_grad(1).tolist() == [3.0, 4.0]
