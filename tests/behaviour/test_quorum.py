"""The quorum: what a take waits for that does not say so itself, and how it follows changes while it waits."""

import pytest

import redisacc

RECORD = "redisacc:{w}"
HOUR = 3600


def times_out(acc, **options):
    with pytest.raises(redisacc.TakeTimeoutError) as failure:
        acc.take_grad(timeout=0, **options)
    return failure.value


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
