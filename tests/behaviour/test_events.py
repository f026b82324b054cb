"""Events as typed objects, waiting for a step, and the states of workers."""

import datetime
import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
from support.proxy import Fault
from support.selection import REAL

import redisacc
from redisacc.types import Event


@pytest.mark.every_server
def test_events_are_typed_and_in_order(open_dense, background, until):
    acc = open_dense("float32", [1], "w", worker="ann lee")
    with acc.events(timeout=20) as events:
        acc.apply_grad([1.0], local_step=3)
        acc.apply_grad([1.0], local_step=-1)
        acc.take_grad(1)
        take = background(acc.take_grad, 2, timeout=0.3)
        until(lambda: not take.running)
        acc.set_global_step(9)
        acc.set_global_step(8)
        acc.delete()
        found = list(events)
    with pytest.raises(redisacc.TakeTimeoutError):
        take.result()
    assert [event.kind for event in found] == [
        "applied", "stale", "taken", "waiting", "left", "set", "lowered", "deleted",
    ]  # fmt: skip
    applied, stale, taken, waiting, left = found[:5]
    buffered = applied.details.pop("buffered", None)
    assert buffered is None or buffered.endswith("-1")
    assert applied == Event("applied", 0, 1, "ann lee", {"bytes": "4"})
    assert stale == Event("stale", 0, 1, "ann lee", {"local_step": "-1"})
    assert taken == Event("taken", 1, 0, "ann lee", {"taken": "1"})
    assert waiting == Event("waiting", 1, 0, "ann lee", {"num_required": "2"})
    assert left == Event("left", None, None, None, {})


def test_an_event_says_that_a_worker_has_contributed_already(open_dense):
    acc = open_dense("float32", [1], worker="ann", once_per_worker=True)
    with acc.events(timeout=10) as events:
        acc.apply_grad([1.0])
        acc.apply_grad([1.0], local_step=4)
        assert next(events).kind == "applied"
        event = next(events)
    assert (event.kind, event.global_step, event.num_accumulated, event.who) == ("repeated", 0, 1, "ann")
    assert event.details == {"local_step": "4"}


def test_an_iterator_ends_with_its_timeout_and_its_handle(open_dense, background):
    acc = open_dense("float32", [1], "w")
    assert list(acc.events(timeout=0)) == []
    events = acc.events()
    reader = background(list, events)
    acc.close()
    assert reader.result() == []
    with pytest.raises(redisacc.CancelledError):
        acc.events()
    open_dense("float32", [1], "w").delete()


@pytest.mark.servers(*REAL)
def test_an_iterator_ends_though_nobody_told_it_of_the_deletion(open_dense, clock):
    acc, other = open_dense("float32", [1], "w"), open_dense("float32", [1], "w")
    other.delete()

    def heard():
        # A clock that runs would not wait for the subscription.
        events = acc.events()
        with clock.running():
            return [event.kind for event in events]

    assert heard() == ["deleted"]
    # Nor does it listen to another accumulator of the same name.
    anew = open_dense("float32", [1], "w")
    assert heard() == ["deleted"]
    assert list(anew.events(timeout=0)) == []
    anew.delete()


@pytest.mark.servers("valkey")
def test_what_was_done_last_comes_before_the_deletion(proxy, open_dense, durations):
    """The check of the server finishes before the subscription has delivered its last messages."""
    durations(last_events=20.0)
    acc, other = open_dense("float32", [1], "w", redis=proxy.where), open_dense("float32", [1], "w")

    def delete():
        # The next message to the one that listens is kept back.
        proxy.arm(Fault("reply", 0, 0, "hold"))
        other.apply_grad([1.0])
        other.delete()
        assert proxy.happened()

    # It listens, and checks that the accumulator exists.
    proxy.before("HGET", delete)
    with acc.events() as events:
        threading.Timer(0.2, proxy.resume).start()
        assert [event.kind for event in events] == ["applied", "deleted"]


@pytest.mark.servers("valkey")
def test_an_iterator_ends_though_the_deletion_fell_into_a_gap(real_server, open_dense):
    acc, other = open_dense("float32", [1], "gap"), open_dense("float32", [1], "gap")
    admin = real_server.client()
    with acc.events() as events:
        other.apply_grad([1.0])
        assert next(events).kind == "applied"
        # The listener pauses before it reconnects.
        assert admin.client_kill_filter(_type="pubsub")
        other.delete()
        assert [event.kind for event in events] == ["missed", "deleted"]


@pytest.mark.parametrize("how", ["silent", "refusing"])
def test_a_reader_of_events_outlasts_a_server_that_does_not_answer(proxy, open_dense, client, how):
    acc, other = open_dense("float32", [1], "w", redis=proxy.where), open_dense("float32", [1], "w")

    def cut():
        proxy.refuses = True
        proxy.cut_all()

    def rename():
        client.rename("redisacc:{w}", "renamed")
        client.set("redisacc:{w}", "of another type")

    # It checks that the accumulator exists.
    proxy.before("HGET", cut if how == "silent" else rename)
    with acc.events(timeout=20) as events:
        if how == "silent":
            proxy.refuses = False
        else:
            client.rename("renamed", "redisacc:{w}")
        other.delete()
        assert list(events)[-1].kind == "deleted"


def test_a_forgotten_iterator_stops_listening(open_dense):
    acc = open_dense("float32", [1], "w")
    events = acc.events()
    gone = weakref.ref(events)
    del events
    gc.collect()
    assert gone() is None
    # The listening thread ends soon: a fixture of all tests looks whether it does.


@pytest.mark.servers(*REAL)
def test_a_slow_reader_is_told_that_it_missed_events(open_dense, client):
    acc = open_dense("float32", [1], "w")
    events, other = acc.events(timeout=20), acc.events(timeout=20)
    # 10,000 of them are kept for a reader.
    for first in (0, 3335, 6670):
        numbers = range(first, first + 3335)
        with client.pipeline(transaction=False) as pipeline:
            for number in numbers:
                pipeline.publish("redisacc:{w}:events", f"applied step=0 count={number}")
            pipeline.execute()
        assert [event.num_accumulated for event in itertools.islice(other, 3335)] == list(numbers)
    acc.delete()
    found = list(events)
    assert found[0].kind == "missed"
    assert [event.num_accumulated for event in found[1:6]] == [10_000, 10_001, 10_002, 10_003, 10_004]
    assert found[6].kind == "deleted"
    other.close()


@pytest.mark.fixed("encoding")
def test_applied_says_how_large_and_how_late_a_gradient_is(open_dense_stored):
    acc = open_dense_stored("float32", [3], "w", staleness=2)
    acc.set_global_step(5)
    with acc.events(timeout=20) as events:
        for step in (5, 3, 9):
            acc.apply_grad([1.0, 2.0, 3.0], step)
        found = [next(events).details for _ in range(3)]
    assert [(details["bytes"], details["staleness"]) for details in found] == [("12", "0"), ("12", "2"), ("12", "0")]


LINES = [
    (None, Event("missed", None, None, None, {})),
    ("applied step=-5 count=2 worker=a b=c", Event("applied", -5, 2, "a b=c", {})),
    ("left", Event("left", None, None, None, {})),
    ("later step=1 new=x-y", Event("later", 1, None, None, {"new": "x-y"})),
    ("", Event("unknown", None, None, None, {"text": ""})),
    ("\x1b[2J", Event("unknown", None, None, None, {"text": "\x1b[2J"})),
    ("applied step=1 \x07", Event("unknown", None, None, None, {"text": "applied step=1 \x07"})),
    ("applied count=x", Event("applied", None, None, None, {})),
    ("applied step=" + "9" * 1000, Event("unknown", None, None, None, {"text": "applied step=" + "9" * 1000})),
]


def test_lines_of_whoever():
    for text, event in LINES:
        assert Event.parse(text) == event


@pytest.mark.every_server
def test_wait_for_step(open_dense, background):
    acc, chief = open_dense("float32", [1], "w"), open_dense("float32", [1], "w")
    assert acc.wait_for_step(0) == 0
    assert acc.wait_for_step(-5, timeout=0) == 0
    waits = [background(acc.wait_for_step, step) for step in (1, 2, 7)]
    # Wakes by an event, or within a second by polling.
    chief.apply_grad([1.0])
    chief.take_grad(1)
    assert waits[0].result() == 1
    assert waits[1].running
    chief.set_global_step(10)
    assert [wait.result() for wait in waits[1:]] == [10, 10]


def test_wait_for_step_ends_in_time(open_dense):
    acc = open_dense("float32", [1], "w", name="my accumulator")
    message = r"my accumulator \(w\): step 1 was not reached in time: it is 0"
    with pytest.raises(redisacc.WaitTimeoutError, match=message):
        acc.wait_for_step(1, timeout=0.2)


def test_wait_for_step_ends_with_the_handle_and_the_accumulator(open_dense, background):
    acc, other = open_dense("float32", [1], "w"), open_dense("float32", [1], "w")
    waits = background(acc.wait_for_step, 5), background(other.wait_for_step, 5)
    acc.close()
    with pytest.raises(redisacc.CancelledError):
        waits[0].result()
    open_dense("float32", [1], "w").delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        waits[1].result()


def test_log_records_have_fields(open_dense, caplog):
    caplog.set_level("DEBUG", "redisacc")
    acc = open_dense("float32", [1], "w", name="mine")
    acc.set_global_step(5)
    acc.set_global_step(3)
    acc.apply_grad([1.0], local_step=2)
    (lowered,) = [record for record in caplog.records if "lowered" in record.message]
    assert (lowered.name, lowered.levelname, lowered.accumulator, lowered.global_step) == (
        "redisacc",
        "WARNING",
        "w",
        3,
    )
    assert lowered.message == "mine (w): the global step was lowered to 3"
    (dropped,) = [record for record in caplog.records if "dropped" in record.message]
    assert (dropped.levelname, dropped.local_step, dropped.global_step) == ("DEBUG", 2, 3)


def test_reprs_say_what_and_where(open_dense):
    acc = open_dense("float32", [1], "w")
    events = acc.events(timeout=0)
    assert repr(events).startswith("Events('w' at ")
    events.close()
    assert repr(events).endswith(", ended)")


@pytest.mark.usefixtures("nobody_is_late")
def test_known_workers_and_their_states(open_dense):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    chief = open_dense("float32", [1], "w", worker="chief")
    again = open_dense("float32", [1], "w", worker="ann")
    for acc in (ann, bob, again):
        acc.apply_grad([1.0])
    chief.set_global_step(1)
    assert chief.take_grad(3) == np.float32(1)
    ann.apply_grad([1.0], local_step=2)
    bob.apply_grad([1.0], local_step=1)
    info = chief.info()
    assert [(w.name, w.in_round, w.applied, w.stale) for w in info.known_workers] == [
        ("ann", 1, 3, 0),
        ("bob", 0, 1, 1),
    ]
    states = {state: [worker.name for worker in workers] for state, workers in info.states.items()}
    assert states == {"in the round": ["ann"], "expected": ["bob"], "late": [], "gone": []}
    assert [worker.last_step for worker in info.known_workers] == [2, 2]
    seen = [worker.seen_at for worker in info.known_workers]
    assert info.last_activity == max(seen)
    assert info.created_at <= min(seen)
    assert max(seen) <= info.read_at <= max(seen) + datetime.timedelta(minutes=5)


def test_who_waits_says_until_when(open_dense, background, until):
    acc = open_dense("float32", [1], "w")
    take = background(acc.take_grad, 1, timeout=20)
    (waiting,) = until(lambda: acc.info().waiting)
    assert abs(waiting.lease_ends_at - acc.info().read_at) < datetime.timedelta(seconds=10)
    acc.apply_grad([1.0])
    take.result()


@pytest.mark.forges
def test_a_timeout_names_some_of_very_many_workers(open_dense, client):
    """Planted sessions and workers do not fill the message of an error."""
    chief = open_dense("float32", [1], "w", worker="chief")
    chief.apply_grad([1.0])
    sessions, workers, record = (f"redisacc:{{w}}{suffix}" for suffix in (":sessions", ":workers", ""))
    seen = int(time.time() * 1000) - 60_000
    client.hset(sessions, mapping={f"{seen}-{n:x}": f"1 applied 0 1 {seen + n} 1 0 worker-{n}" for n in range(3000)})

    def timed_out():
        with pytest.raises(redisacc.TakeTimeoutError) as caught:
            chief.take_grad(2, timeout=0)
        assert len(str(caught.value)) < 2000
        return caught.value

    error = timed_out()
    assert len(error.expected) == 3000
    assert error.expected[:2] == ["worker-2999", "worker-2998"]
    assert str(error).endswith(", 2990 more")
    client.hset(workers, mapping={f"worker-{n}": 1 for n in range(3000)})
    client.hset(record, "num_accumulated", 1)
    error = timed_out()
    assert error.expected == []
    assert str(error).endswith(", 2991 more")
