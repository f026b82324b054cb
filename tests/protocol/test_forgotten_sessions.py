"""The table of sessions forgets those that were idle for an hour, a few at a time, and none of them counts twice."""

from __future__ import annotations

import time

import numpy as np
import pytest
import redis
from support.selection import REAL

import redisacc
from redisacc._data.gradient import Gradient, Section
from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._protocol.parts.staging import stage_commands
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.base import ForgottenError, StaleSequenceError
from redisacc._protocol.scripts.requests import GradientRequest, Request
from redisacc._protocol.scripts.sessions import Session
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._redis.connect import connect

KEYS = Keys("idle")
HOUR = 3_600_000


def now_ms() -> int:
    return int(time.time() * 1000)


def handle(client: redis.Redis, **options: object) -> redisacc.ConditionalAccumulator:
    return redisacc.ConditionalAccumulator(
        "float32", [2], "idle", reduction_type="SUM", redis=client, limits=redisacc.Limits(in_place=0), **options
    )


def entry(seen_ms: int, sequence: int = 1) -> str:
    return f"{sequence} applied 0 1 {seen_ms} 1 0 somebody"


def fill(client: redis.Redis, idle: int, fresh: int) -> None:
    """Puts sessions into the table, idle for a bit more than an hour or for a bit less."""
    now = now_ms()
    for k in range(idle):
        client.hset(KEYS.sessions, f"{now - 3 * HOUR}-idle{k}", entry(now - HOUR - 5_000))
    for k in range(fresh):
        client.hset(KEYS.sessions, f"{now - 3 * HOUR}-fresh{k}", entry(now - HOUR + 60_000))


def left(client: redis.Redis, what: str) -> int:
    return sum(what.encode() in name for name in client.hkeys(KEYS.sessions))


def operations(client: redis.Redis):
    """The operations that check the table, and how often each does: by itself, and for a new session."""
    acc = handle(client)
    acc.apply_grad([1, 2])

    def take() -> None:
        acc.set_global_step(0)
        acc.apply_grad([1, 2])
        acc.take_grad(1)

    def new_client() -> None:
        acc._sessions._idle.clear()
        acc.apply_grad([1, 2])

    def buffer_in_vain() -> None:
        acc._sessions._idle.clear()
        acc.set_global_step(0)

    return {"open": lambda: handle(client), "take": take, "apply": new_client, "step": buffer_in_vain}


@pytest.mark.parametrize("what", ["open", "take", "apply", "step"])
def test_the_idle_are_forgotten_a_few_at_a_time_and_nobody_else(client: redis.Redis, what: str) -> None:
    operate = operations(client)[what]
    fill(client, idle=40, fresh=3)
    operate()
    assert 40 - 4 <= left(client, "idle") < 40
    for _ in range(1000):
        operate()
        if not left(client, "idle"):
            break
    assert (left(client, "idle"), left(client, "fresh")) == (0, 3)


def test_an_apply_of_a_known_client_looks_at_nobody(client: redis.Redis) -> None:
    acc = handle(client)
    acc.apply_grad([1, 2])
    fill(client, idle=40, fresh=0)
    for _ in range(20):
        acc.apply_grad([1, 2])
    assert left(client, "idle") == 40


@pytest.mark.slow
@pytest.mark.servers(*REAL)
def test_the_table_stays_small_however_many_clients_come_and_go(client: redis.Redis) -> None:
    sizes = []
    for _ in range(300):
        handle(client).apply_grad([1, 2])
        # More than an hour passes.
        for name, text in client.hgetall(KEYS.sessions).items():
            words = text.decode().split(" ")
            words[4] = str(now_ms() - 2 * HOUR)
            client.hset(KEYS.sessions, name, " ".join(words))
        sizes.append(client.hlen(KEYS.sessions))
    assert max(sizes) < 20


def buffer(scripts: Scripts, client: Session, sequence: int) -> object:
    gradient = f"{client.id}-{sequence}"
    packed = buffered_format.pack(Gradient((Section(np.ones(2, np.float32)),)))
    return scripts.buffer(
        GradientRequest(client, sequence, "w", 0, (2,)),
        gradient=gradient,
        header=packed.header,
        data=packed.data,
        lengths=packed.lengths,
        stage=stage_commands(KEYS, gradient, packed.parts),
    )


@pytest.mark.every_server
def test_a_client_that_was_forgotten_is_not_counted_twice(client: redis.Redis) -> None:
    """It sent its one request more than an hour ago, slept, and sends it again."""
    acc = handle(client)
    scripts = Scripts(connect(client), KEYS, incarnation=acc.info().incarnation)
    sender = Session(now_ms() - HOUR)
    with pytest.raises(ForgottenError) as failure:
        buffer(scripts, sender, 1)
    assert abs(failure.value.now_ms - now_ms()) < 60_000
    assert acc.num_accumulated() == 0
    assert not [key for key in client.scan_iter() if b":staged:" in key]
    for ask in (
        lambda: scripts.resolve(Request(sender, 1, "w")),
        lambda: scripts.set_global_step(Request(sender, 1, "w"), 5),
        scripts.take(token="t", session=sender, sequence=1, required=TakeRequirement(1, 1), lease_ms=60_000, taker="w"),
    ):
        with pytest.raises(ForgottenError):
            ask()
    assert acc.global_step() == 0
    assert acc.info().waiting == []
    # A known session may be of any age.
    client.hset(KEYS.sessions, sender.id, entry(now_ms()))
    assert buffer(scripts, sender, 2)
    # A session is refused well before one of its age can have been forgotten.
    assert buffer(scripts, Session(now_ms() - HOUR + 120_000), 1)
    with pytest.raises(ForgottenError):
        buffer(scripts, Session(now_ms() - HOUR + 30_000), 1)


@pytest.mark.every_server
def test_a_handle_that_was_idle_for_long_goes_on(client: redis.Redis) -> None:
    acc = handle(client)
    acc.apply_grad([1, 2])
    (lent,) = acc._sessions._idle
    for act in (lambda: acc.apply_grad([1, 2]), lambda: acc.set_global_step(0), lambda: acc.take_grad(1)):
        # Two hours pass: the session is unknown by now, and two hours old.
        lent.id = f"{now_ms() - 2 * HOUR}-{lent.id.partition('-')[2]}"
        old = lent.id
        lent._learnt -= 2 * HOUR / 1000
        acc._sessions.now_ms = now_ms() - 2 * HOUR
        client.delete(KEYS.sessions)
        act()
        assert lent.id != old
        assert client.hkeys(KEYS.sessions) == [lent.id.encode()]
        assert acc._sessions.now_ms > now_ms() - HOUR
    assert acc.info().applied == 2


def test_a_forgotten_request_whose_copy_was_lost_has_an_unknown_outcome(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient may have been counted while the session was known. A new session might count it twice."""
    acc = handle(client)
    acc._sessions.now_ms = now_ms() - 2 * HOUR
    send = Scripts.buffer

    def lose_one(self: Scripts, *args: object, **options: object) -> object:
        acc._transport.losses.count += 1
        return send(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Scripts, "buffer", lose_one)
    with pytest.raises(redisacc.OutcomeUnknownError, match="forgotten") as failure:
        acc.apply_grad([1, 2])
    with pytest.raises(redisacc.OutcomeUnknownError, match="forgotten"):
        failure.value.settle()
    assert acc.num_accumulated() == 0


# Acknowledged by hand, without its parts.
@pytest.mark.forges
def test_a_taker_may_wait_for_longer_than_clients_are_known(client: redis.Redis, background, until) -> None:
    acc = handle(client)
    acc._sessions.now_ms = now_ms() - HOUR + 120_000
    take = background(acc.take_grad, 1, timeout=30)
    (waiting,) = until(lambda: acc.info().waiting)
    # It was young enough on arrival, and no longer is.
    old = waiting.token.encode()
    aged = f"{now_ms() - 2 * HOUR}-aged-1".encode()
    queue, text = client.zscore(KEYS.queue, old), client.hget(KEYS.takers, old)
    scripts = Scripts(connect(client), KEYS, incarnation=acc.info().incarnation)
    # In this order, because a taker in the queue without a lease is passed over.
    client.hset(KEYS.takers, aged, text)
    client.zadd(KEYS.queue, {aged: queue - 0.5})
    sender = Session(0)
    sender.id = aged.decode().rpartition("-")[0]
    ask = {
        "token": aged.decode(),
        "session": sender,
        "sequence": 1,
        "required": TakeRequirement(1, 1),
        "lease_ms": 60_000,
        "taker": "w",
    }
    scripts.take(**ask)()
    assert [waiting.token for waiting in acc.info().waiting] == [aged.decode(), old.decode()]
    handle(client).apply_grad([1, 2])
    granted, _ = scripts.take(**ask)()
    assert granted == scripts.take(**ask)()[0]
    assert scripts.acknowledge(token=aged.decode(), parts=[], more=False)
    with pytest.raises(StaleSequenceError):
        scripts.take(**ask)()
    acc.apply_grad([3, 4], local_step=1)
    assert take.result().tolist() == [3.0, 4.0]
