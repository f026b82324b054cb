"""The quorum: what a take waits for that does not say so itself, and how it follows changes while it waits."""

from __future__ import annotations

import pytest
from support.proxy import Fault

import redisacc

RECORD = "redisacc:{w}"
FIELDS = ("quorum", "quorum_most", "quorum_grace_ms")
HOUR = 3600


@pytest.fixture
def stored(client):
    """Returns the quorum as it is in the record."""
    return lambda: client.hmget(RECORD, FIELDS)


def times_out(acc, **options):
    with pytest.raises(redisacc.TakeTimeoutError) as failure:
        acc.take_grad(timeout=0, **options)
    return failure.value


@pytest.mark.every_server
def test_takes_that_wait_follow_a_change(open_dense, open_sparse, open_tree, background, until, durations):
    # Nothing but the change wakes the takers.
    durations(poll_every=10.0 * HOUR)
    dense, sparse, tree = (
        open_dense("float32", [1], "d"),
        open_sparse("float32", [9, 1], "s"),
        open_tree({"w": ("float32", (1,))}, "t"),
    )
    for acc in (dense, sparse, tree):
        acc.set_quorum(least=4)
    takes = [
        background(dense.take_grad),
        background(sparse.take_indexed_slices_grad),
        background(tree.take_grad),
    ]
    until(lambda: all(acc.info().waiting for acc in (dense, sparse, tree)))
    for _ in range(2):
        dense.apply_grad([1.0])
        sparse.apply_grad([3], [[2.0]])
        tree.apply_grad({"w": [3.0]})
    assert all(take.running for take in takes)
    for acc in (dense, sparse, tree):
        acc.set_quorum(least=2)
    one, slices, leaves = [take.result() for take in takes]
    assert (one.tolist(), slices.values.tolist(), leaves["w"].tolist()) == ([1.0], [[2.0]], [3.0])
    # The crew has grown again.
    dense.set_quorum(least=3)
    dense.apply_grad([1.0], 1)
    dense.apply_grad([1.0], 1)
    assert times_out(dense).num_required == 3


@pytest.mark.every_server
def test_a_crew_that_grows_is_waited_for(open_dense, background, until):
    acc = open_dense("float32", [1], "w", reduction_type="SUM", worker="chief")
    acc.set_quorum(least=2)
    take = background(acc.take_grad)
    until(lambda: acc.info().waiting)
    acc.apply_grad([1.0])
    acc.set_quorum(least=3)
    acc.apply_grad([2.0])
    until(lambda: [taker.num_required for taker in acc.info().waiting] == [3])
    assert take.running
    acc.apply_grad([4.0])
    assert take.result().tolist() == [7.0]


@pytest.mark.every_server
def test_a_grace_can_be_shortened_while_a_take_waits(open_dense, background, until, client):
    acc = open_dense("float32", [1], "w", reduction_type="SUM")
    acc.set_quorum(least=1, grace=HOUR)
    take = background(acc.take_grad)
    until(lambda: acc.info().waiting)
    acc.apply_grad([1.0])
    until(lambda: int(client.hget(RECORD, "grace_began_ms") or 0))
    assert str(times_out(acc)).partition(" timed out")[0].endswith("a take of 1, or up to more within 3600 s")
    acc.set_quorum(most=2)
    assert take.running
    acc.set_quorum(grace=0.01)
    assert take.result().tolist() == [1.0]


def test_arguments_of_the_take_win(open_dense, background, until):
    acc = open_dense("float32", [1], "w", worker="chief")
    acc.set_quorum(least=1, most=2, grace=HOUR)
    take = background(acc.take_grad, 3)
    until(lambda: acc.info().waiting)
    (taker,) = acc.info().waiting
    assert (taker.num_required, taker.most, taker.grace) == (3, None, 0)
    acc.apply_grad([1.0])
    acc.set_quorum(least=2)
    acc.apply_grad([1.0])
    assert take.running
    acc.apply_grad([1.0])
    assert take.result().tolist() == [1.0]


@pytest.mark.every_server
def test_numbers_that_are_left_out_stay(open_dense, stored):
    acc, other = (open_dense("float32", [1], "w", worker=name) for name in ("one", "other"))
    assert acc.quorum() == acc.info().quorum == redisacc.Quorum()
    assert stored() == [None] * 3
    acc.set_quorum(least=2, most=4, grace=0.0001)
    assert stored() == [b"2", b"4", b"1"]
    other.set_quorum(least=3)
    assert acc.quorum() == redisacc.Quorum(3, 4, 0.001)
    other.set_quorum()
    acc.set_quorum(most=None)
    assert other.info().quorum == redisacc.Quorum(3, None, 0.001)
    acc.set_quorum(least=None, grace=None)
    assert stored() == [None] * 3


@pytest.mark.every_server
def test_numbers_that_do_not_go_together(open_dense, stored):
    acc = open_dense("float32", [1], "w")
    for change in ({"most": 2}, {"grace": 1}, {"least": 1, "most": 2}):
        with pytest.raises(redisacc.InvalidArgumentError, match="Change them together"):
            acc.set_quorum(**change)
        assert stored() == [None] * 3
    acc.set_quorum(least=2, most=4, grace=1)
    for change in ({"least": None}, {"grace": None}, {"least": 5}, {"most": 1}):
        with pytest.raises(redisacc.InvalidArgumentError, match="Change them together"):
            acc.set_quorum(**change)
        assert stored() == [b"2", b"4", b"1000"]
    acc.set_quorum(least=5, most=5)


INVALID = {
    "least": (0, -1, 1.5, "1", True, 10**15, 2**63),
    "most": (0, 1.5, "1", 10**15),
    "grace": (-1, float("nan"), float("inf"), 604801, 10**400, "1", True),
}


def test_invalid_ones(open_dense, client):
    acc = open_dense("float32", [1], "w")
    before = client.hgetall(RECORD)
    for name, values in INVALID.items():
        for value in values:
            with pytest.raises(redisacc.InvalidArgumentError, match=f"{name} must be"):
                acc.set_quorum(**{"least": 1, name: value})
    assert client.hgetall(RECORD) == before


NOT_SAID = r"num_required is missing, .*: give it, or set the quorum by set_quorum\(\) or `redisacc set`"


def test_a_take_needs_a_number(open_dense, background, until):
    acc = open_dense("float32", [1], "w", worker="chief")
    acc.apply_grad([1.0])
    with pytest.raises(redisacc.InvalidArgumentError, match=NOT_SAID):
        acc.take_grad(timeout=0)
    for option in ({"most": 2}, {"grace": 1}, {"most": 2, "grace": 1}):
        with pytest.raises(redisacc.InvalidArgumentError, match="needs num_required"):
            acc.take_grad(timeout=0, **option)
    # One that waits must not wait for what will never be said.
    acc.set_quorum(least=2)
    take = background(acc.take_grad)
    until(lambda: acc.info().waiting)
    acc.set_quorum(least=None)
    with pytest.raises(redisacc.InvalidArgumentError, match="or no longer"):
        take.result()
    assert acc.info().waiting == []
    assert acc.take_grad(1).tolist() == [1.0]


@pytest.mark.every_server
def test_takers_are_served_in_order_of_arrival(open_dense, background, until):
    first, second = (open_dense("float32", [1], "w", worker=name) for name in ("first", "second"))
    first.set_quorum(least=3)
    follows = background(first.take_grad)
    until(lambda: len(first.info().waiting) == 1)
    plain = background(second.take_grad, 1)
    until(lambda: len(first.info().waiting) == 2)
    first.apply_grad([1.0])
    assert plain.running
    first.set_quorum(least=1)
    assert follows.result().tolist() == [1.0]
    assert plain.running
    second.apply_grad([5.0], 1)
    assert plain.result().tolist() == [5.0]


@pytest.mark.every_server
def test_a_change_is_announced(open_dense):
    acc = open_dense("float32", [1], "w", worker="ann b")
    with acc.events(timeout=10) as events:
        acc.set_quorum(least=2, most=4, grace=0.5)
        acc.set_quorum(most=None, grace=None)
        acc.set_quorum(least=None)
        told = [next(events) for _ in range(3)]
    assert {event.kind for event in told} == {"quorum"}
    assert {(event.global_step, event.num_accumulated, event.who) for event in told} == {(0, 0, "ann b")}
    assert [event.details for event in told] == [
        {"quorum": "2", "quorum_most": "4", "quorum_grace_ms": "500"},
        {"quorum": "2"},
        {},
    ]


@pytest.mark.every_server
def test_a_late_copy_does_not_undo_a_later_change(proxy, open_dense, stored):
    acc, other = open_dense("float32", [1], "w", redis=proxy.where), open_dense("float32", [1], "w")
    acc.set_quorum(least=1)
    proxy.arm(Fault("request", 0, 0, "late"))
    acc.set_quorum(least=2)
    assert stored()[0] == b"2"
    other.set_quorum(least=3)
    assert proxy.deliver_late() == 1
    assert stored()[0] == b"3"
    assert acc.info().duplicates == 1


@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_record(open_dense, client, field):
    acc = open_dense("float32", [1], "w")
    other = {"least": 2} if field != "quorum" else {"grace": 2}
    for value in (b"", b"x", b"-1", b"1.5", b"9" * 16, b"none"):
        client.hdel(RECORD, *FIELDS)
        acc.set_quorum(least=1, grace=1)
        client.hset(RECORD, field, value)
        before = client.hgetall(RECORD)
        calls = [lambda: acc.take_grad(timeout=0)]
        if value:
            calls.append(acc.quorum)
        if value not in (b"", b"none"):
            calls.append(lambda: acc.set_quorum(**other))
        for call in calls:
            with pytest.raises(redisacc.CorruptDataError, match=field):
                call()
            assert client.hgetall(RECORD) == before


def test_numbers_by_hand_are_made_sense_of(open_dense, client):
    acc = open_dense("float32", [1], "w")
    client.hset(RECORD, mapping={"quorum": "2", "quorum_most": "1", "quorum_grace_ms": "0"})
    assert vars(acc.quorum()) == {"least": 2, "most": 1, "grace": 0, "min_weight": None}
    acc.apply_grad([1.0])
    assert times_out(acc).num_required == 2
    acc.apply_grad([1.0])
    assert acc.take_grad().tolist() == [1.0]
    client.hset(RECORD, "quorum", "0")
    assert acc.quorum().least is None
    with pytest.raises(redisacc.InvalidArgumentError, match="num_required is missing"):
        acc.take_grad(timeout=0)
