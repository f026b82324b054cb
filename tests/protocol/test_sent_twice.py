"""Every script may be sent twice: redis-py, and we, send a request again if a broken connection may have lost it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.base import StaleSequenceError
from redisacc._protocol.scripts.opening import Opened, Schema
from redisacc._protocol.scripts.requests import Counted, GradientRequest, Request
from redisacc._protocol.scripts.taking import Granted, Queued
from support.selection import REAL

import redisacc
from redisacc._data.gradient import Gradient, Section
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.keys import Keys
from redisacc._format.record import FORMAT
from redisacc._protocol.applying import compaction
from redisacc._protocol.parts.staging import stage_commands
from redisacc._protocol.scripts.sessions import Session, SessionPool
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._redis.connect import connect
from redisacc._redis.transport import Transport

pytestmark = pytest.mark.every_server


def new_session() -> Session:
    return Session(int(time.time() * 1000))


SCHEMA = Schema(FORMAT, "dense", "float32", "[2]", "SUM", "index", "zero", "")


@pytest.fixture
def scripts(client: redis.Redis) -> Scripts:
    """The scripts on a new accumulator named "twice"."""
    accumulator = redisacc.ConditionalAccumulator("float32", [2], "twice", reduction_type="SUM", redis=client)
    return Scripts(connect(client), Keys("twice"), incarnation=accumulator.info().incarnation)


def handle(client: redis.Redis) -> redisacc.ConditionalAccumulator:
    return redisacc.ConditionalAccumulator("float32", [2], "twice", reduction_type="SUM", redis=client)


def buffer(scripts: Scripts, client: Session, sequence: int, values: list[float], local_step: int = 0) -> object:
    gradient_id = f"{client.id}-{sequence}"
    packed = buffered_format.pack(Gradient((Section(np.array(values, np.float32)),)))
    return scripts.buffer(
        GradientRequest(client, sequence, "w", local_step, (2,)),
        gradient=gradient_id,
        header=packed.header,
        data=packed.data,
        lengths=packed.lengths,
        stage=stage_commands(Keys("twice"), gradient_id, packed.parts),
    )


def buffer_in_parts(
    scripts: Scripts, client: Session, sequence: int, values: list[float], local_step: int = 0
) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffered_format, "INLINE_BYTES", 0)
        patch.setattr(buffered_format, "ANNOUNCED_BYTES", 0)
        return buffer(scripts, client, sequence, values, local_step)


def apply(scripts: Scripts, client: Session, sequence: int, values: list[float], local_step: int = 0) -> object:
    rows = np.array(values, "<f4").tobytes()
    request = GradientRequest(client, sequence, "w", local_step, (2,))
    return scripts.apply(request, [in_place.PackedRows("", "f", "", "1024", b"0", rows)])


@pytest.fixture(
    params=[
        # The fake server's Lua can't add in place.
        pytest.param(apply, marks=pytest.mark.servers(*REAL), id="in_place"),
        pytest.param(buffer, id="buffered_inline"),
        pytest.param(buffer_in_parts, id="buffered_parts"),
    ]
)
def send(request: pytest.FixtureRequest) -> Any:
    """Sends a gradient, one way or the other."""
    return request.param


def test_an_applied_gradient_is_counted_once(client: redis.Redis, scripts: Scripts, send: Any) -> None:
    sender = new_session()
    first = send(scripts, sender, 1, [1, 2])
    assert first == Counted("applied", 0, 1)
    send(scripts, new_session(), 1, [10, 20])
    assert send(scripts, sender, 1, [1, 2]) == first
    peeked = handle(client).peek()
    assert peeked.num_accumulated == 2
    np.testing.assert_array_equal(peeked.gradient, [11, 22])
    info = handle(client).info()
    assert (info.applied, info.duplicates) == (2, 1)
    assert not [key for key in client.scan_iter() if b":staged:" in key]


def test_a_stale_gradient_stays_stale(client: redis.Redis, scripts: Scripts, send: Any) -> None:
    handle(client).set_global_step(5)
    sender = new_session()
    first = send(scripts, sender, 1, [1, 2], 4)
    assert first == Counted("stale", 5, 0)
    handle(client).set_global_step(3)
    # Executed now it would be accepted; but it was executed, and its sender knows that it was dropped.
    assert send(scripts, sender, 1, [1, 2], 4) == first
    assert handle(client).num_accumulated() == 0
    assert not [key for key in client.scan_iter() if b":staged:" in key]


def test_an_old_copy_is_refused(client: redis.Redis, scripts: Scripts, send: Any) -> None:
    sender = new_session()
    send(scripts, sender, 2, [1, 2])
    with pytest.raises(StaleSequenceError, match="request 2"):
        send(scripts, sender, 1, [1, 2])
    assert handle(client).num_accumulated() == 1
    assert not [key for key in client.scan_iter() if b":staged:" in key]


@pytest.mark.usefixtures("force_parts")
def test_a_missing_part_is_told_and_changes_nothing(client: redis.Redis, scripts: Scripts) -> None:
    packed = buffered_format.pack(Gradient((Section(np.ones(2, np.float32)),)))
    before = client.hgetall(Keys("twice").record)
    reply = scripts.buffer(
        GradientRequest(new_session(), 1, "w", 0, (2,)),
        gradient="x-1",
        header=packed.header,
        data=b"",
        lengths=packed.lengths,
        stage=[("SET", Keys("twice").staged("x-1", 0), b"short")],
    )
    assert reply == "unstaged"
    assert client.hgetall(Keys("twice").record) == before
    assert not [key for key in client.scan_iter() if b":staged:" in key]


def a_take() -> dict[str, Any]:
    """Returns the arguments of a take of one gradient."""
    return {
        "token": "t1",
        "session": new_session(),
        "sequence": 1,
        "required": TakeRequirement(1, 1),
        "lease_ms": 3000,
        "taker": "me",
    }


# Acknowledged by hand, without its parts.
@pytest.mark.forges
def test_the_same_token_gets_the_same_round(client: redis.Redis, scripts: Scripts) -> None:
    handle(client).apply_grad([1, 2])
    ask = a_take()
    first, _ = scripts.take(**ask)()
    assert first == Granted("t1", 0, 1, "[2]")
    handle(client).apply_grad([3, 4], 1)
    assert scripts.take(**ask)()[0] == first
    assert scripts.leave(token="t1") == first
    assert handle(client).global_step() == 1
    assert handle(client).num_accumulated() == 1
    for expected in (True, False):
        assert scripts.acknowledge(token="t1", parts=[], more=False) is expected


# Removed by hand, because it has no parts.
@pytest.mark.forges
def test_a_round_that_is_being_removed_is_over(client: redis.Redis, scripts: Scripts) -> None:
    """Another process may have listed it a moment before, or an old copy of the take may arrive."""
    handle(client).apply_grad([1, 2])
    ask = a_take()
    scripts.take(**ask)()
    assert scripts.acknowledge(token="t1", parts=[], more=True)
    assert scripts.recover(old="t1", token="t2", taker="me") is None
    assert scripts.leave(token="t1") is None
    with pytest.raises(StaleSequenceError):
        scripts.take(**ask)()
    assert scripts.acknowledge(token="t1", parts=[], more=False)


def test_joining_the_queue_twice_keeps_one_place(client: redis.Redis, scripts: Scripts) -> None:
    clients = {"a": new_session(), "b": new_session()}
    for token, ahead in (("a", 0), ("b", 1), ("a", 0), ("b", 1)):
        reply, _ = scripts.take(
            token=token, session=clients[token], sequence=1, required=TakeRequirement(1, 1), lease_ms=60_000, taker="me"
        )()
        assert reply == Queued(0, 0, ahead)
    assert [waiting.token for waiting in handle(client).info().waiting] == ["a", "b"]
    for _ in range(2):
        assert scripts.leave(token="a") is None
    assert scripts.leave(token="b") is None
    assert handle(client).info().waiting == []


def test_setting_the_step_twice_sets_it_once(client: redis.Redis, scripts: Scripts) -> None:
    sender = new_session()
    ask = Request(sender, 1, "w")
    assert scripts.set_global_step(ask, 5) == Counted("set", 5, 0)
    handle(client).apply_grad([1, 2], 5)
    handle(client).take_grad(1)
    # A copy that arrives now must not set the step back.
    assert scripts.set_global_step(ask, 5) == Counted("set", 5, 0)
    assert handle(client).global_step() == 6


# Acknowledged by hand, without its parts.
@pytest.mark.forges
def test_recovering_twice_gives_the_same_round(client: redis.Redis, scripts: Scripts) -> None:
    handle(client).apply_grad([1, 2])
    scripts.take(
        token="dead", session=new_session(), sequence=1, required=TakeRequirement(1, 1), lease_ms=3000, taker="me"
    )()
    ask = {"old": "dead", "token": "new", "taker": "heir"}
    first = scripts.recover(**ask)
    assert first == Granted("new", 0, 1, "[2]")
    assert scripts.recover(**ask) == first
    assert scripts.recover(old="dead", token="newer", taker="late") is None
    assert scripts.acknowledge(token="dead", parts=[], more=False) is False
    assert scripts.acknowledge(token="new", parts=[], more=False) is True


def test_opening_and_deleting_twice(client: redis.Redis, scripts: Scripts) -> None:
    for _ in range(2):
        opened = scripts.open(
            incarnation="another",
            schema=SCHEMA,
            chunk=7,
            lease_ms=0,
            buffer_limit=7,
            once_per_worker=True,
            max_staleness=2,
        )
        assert isinstance(opened, Opened)
        assert (opened.incarnation, opened.schema) == (scripts.incarnation, SCHEMA)
    for _ in range(2):
        assert scripts.delete(finish=False) == "closed"
    assert scripts.delete(finish=True) == "deleted"
    assert scripts.delete(finish=True) == "missing"
    assert handle(client).num_accumulated() == 0
    # A late copy must not touch the new accumulator.
    assert scripts.delete(finish=False) == "replaced"
    assert scripts.delete(finish=True) == "replaced"


def test_a_client_is_nobody_elses_while_it_is_lent() -> None:
    clients = SessionPool(0)
    one, other = clients.borrow(), clients.borrow()
    assert one.id != other.id
    assert (one.next(), one.next(), other.next()) == (1, 2, 1)
    clients.give_back(one)
    assert clients.borrow() is one
    assert clients.borrow() not in (one, other)


def test_a_sum_is_not_staged_where_the_gradient_alone_was(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a late copy of the first staged parts could replace a sum before the script accepts it."""
    monkeypatch.setattr(buffered_format, "INLINE_BYTES", -1)
    accumulator = redisacc.ConditionalAccumulator(
        "float32",
        [2],
        "compact",
        reduction_type="SUM",
        redis=client,
        limits=redisacc.Limits(in_place=0, buffer=2 * 2 * 4),
    )
    staged = []
    buffer = Scripts.buffer

    def watch(self: Scripts, *args: Any, **options: Any) -> Any:
        staged.extend((command[1], bytes(command[2])) for command in options["stage"])
        return buffer(self, *args, **options)

    monkeypatch.setattr(Scripts, "buffer", watch)
    for _ in range(3):
        accumulator.apply_grad([1, 2])
    assert len(staged) > 3
    # The same key never gets two contents.
    assert len({key for key, _ in staged}) == len(set(staged))
    np.testing.assert_array_equal(accumulator.take_grad(3), [3, 6])


def test_whoever_makes_room_knows_his_own_first_copy(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, durations: Callable[..., None]
) -> None:
    """Otherwise, the client would wait for itself."""
    monkeypatch.setattr(compaction, "COMPACTING_MS", 60_000)
    durations(call=1.0)
    accumulator = redisacc.ConditionalAccumulator(
        "float32",
        [2],
        "compact",
        reduction_type="SUM",
        redis=client,
        limits=redisacc.Limits(in_place=0, buffer=2 * 2 * 4),
    )
    call = Transport.call

    def twice(self: Transport, *command: Any, **options: Any) -> Any:
        if command[0] == "SET":
            call(self, *command, **options)
        return call(self, *command, **options)

    monkeypatch.setattr(Transport, "call", twice)
    for _ in range(4):
        assert accumulator.apply_grad([1, 2])
    np.testing.assert_array_equal(accumulator.take_grad(4), [4, 8])
    assert not client.exists("redisacc:{compact}:compacting")


def test_forgetting_a_worker_twice_changes_nothing_else(client: redis.Redis, scripts: Scripts) -> None:
    sender = new_session()
    first = buffer(scripts, sender, 1, [1, 2])
    for _ in range(2):
        assert scripts.forget_worker(session=sender.id, worker="w")
        assert handle(client).info().known_workers == []
    assert not scripts.forget_worker(session=sender.id, worker="another")
    assert not scripts.forget_worker(session="0-nobody", worker="w")
    # A copy of the request is still recognised.
    assert buffer(scripts, sender, 1, [1, 2]) == first
    info = handle(client).info()
    assert (info.num_accumulated, info.workers, info.duplicates) == (1, {"w": 1}, 1)
