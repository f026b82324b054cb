"""Accumulators under shared names: opened by many, checked, deleted and created again."""

import pytest

import redisacc
from redisacc import raw_ops

# What an accumulator was created with, what another handle asks for, and how the error shows both.
DECIDED = [
    ({"order": "worker"}, {"order": "arrival"}, "its order is worker, not arrival"),
    ({"once_per_worker": True}, {"order": "worker"}, "its order is arrival, not worker"),
    ({"staleness": 3}, {"staleness": 4}, r"its staleness\.most is 3, not 4"),
    ({}, {"staleness": 1}, r"its staleness\.most is 0, not 1"),
    (
        {"staleness": redisacc.Staleness(1, weight="inverse_sqrt")},
        {"staleness": redisacc.Staleness(1, weight="constant")},
        r"its staleness\.weight is inverse_sqrt, not constant",
    ),
    ({"mean": redisacc.Mean(by="count")}, {"mean": redisacc.Mean(by="weights")}, r"its mean\.by is count, not weights"),
    ({"limits": redisacc.Limits(buffer=9)}, {"limits": redisacc.Limits(buffer=8)}, r"limits\.buffer is 9, not 8"),
    ({"partitions": 3}, {"partitions": 2}, "its number of partitions is 3, not 2"),
]


def test_handles_agree_in_what_the_creator_decided(open_dense, open_sparse):
    for given, asked, message in DECIDED:
        acc = open_dense("float32", [3], "w", **given)
        for same in ({}, given):
            assert open_dense("float32", [3], "w", **same).info() == acc.info()
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            open_dense("float32", [3], "w", **asked)
        acc.delete()
    open_sparse("float32", [3], "w", mean=redisacc.Mean(rows="round"))
    with pytest.raises(redisacc.InvalidArgumentError, match=r"its mean\.rows is round, not index"):
        open_sparse("float32", [3], "w")


@pytest.mark.every_server
def test_whoever_opens_a_name_first_creates_it_and_the_others_find_it(open_dense, background, server):
    opened = [background(open_dense, "float32", [1], "race", redis=server.client()) for _ in range(6)]
    accumulators = [one.result() for one in opened]
    for acc in accumulators:
        acc.apply_grad([1.0])
    assert accumulators[0].num_accumulated() == 6
    assert len({acc.info().incarnation for acc in accumulators}) == 1


def every_call(acc, sparse):
    args = ([1], [[1.0]]) if sparse else ([1.0],)
    return [
        lambda: acc.apply_grad(*args),
        lambda: acc.apply_grad(*args, local_step=-1),
        lambda: acc.take_grad(1),
        lambda: acc.take_grad(1, timeout=0),
        lambda: acc.take(1).__enter__(),
        lambda: acc.recover().__enter__(),
        lambda: acc.set_global_step(1),
        acc.num_accumulated,
        acc.global_step,
        acc.peek,
        acc.info,
    ]


def test_a_handle_of_an_earlier_incarnation_does_not_touch_the_new_one(open_dense_stored, open_sparse_stored, server):
    for make, sparse in ((open_dense_stored, False), (open_sparse_stored, True)):
        shape = [4, 1] if sparse else [1]
        old = make("float32", shape, "w")
        incarnation = old.info().incarnation
        make("float32", shape, "w", redis=server.client()).delete()
        new = make("float32", shape, "w", redis=server.client())
        assert new.info().incarnation != incarnation
        every_call(new, sparse)[0]()
        before = new.info()
        for call in every_call(old, sparse):
            with pytest.raises(redisacc.NotFoundError, match=r"after this handle was opened\. Open it again"):
                call()
        assert new.info() == before
        new.delete()


FORMAT = "has format '1' .* reads format '4': finish its run with the version that created it, or delete its keys"


def test_another_format_of_the_data_model_is_refused_by_its_number(open_dense, client):
    """Its fields may have other names, so unknown contents are not corruption."""
    open_dense("float32", [1], "w")
    client.hset("redisacc:{w}", "format", "1")
    client.hdel("redisacc:{w}", "buffer_limit", "buffered_bytes")
    before = client.hgetall("redisacc:{w}")
    for use in (
        lambda: open_dense("float32", [1], "w"),
        lambda: raw_ops.AccumulatorNumAccumulated(handle="redisacc:{w}", redis=client),
    ):
        with pytest.raises(redisacc.CorruptDataError, match=FORMAT):
            use()
    assert client.hgetall("redisacc:{w}") == before
    client.flushall()
