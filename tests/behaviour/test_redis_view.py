"""The contents of Redis, as people see them with redis-cli."""

import numpy as np
import pytest

import redisacc


@pytest.mark.every_server
def test_in_place_memory_is_bounded_by_the_rows_touched(real_client, open_sparse_stored, storage):
    acc = open_sparse_stored("float32", [10, 4], "w")
    for _ in range(30):
        acc.apply_grad([1, 2], np.ones((2, 4), np.float32))
    keys = {key.decode() for key in real_client.scan_iter()}
    if storage == "in_place":
        assert real_client.hlen("redisacc:{w}:sums") == 3
        assert real_client.hget("redisacc:{w}:sums", "total") == b"30 60"
        assert acc.info().buffered == 0
        assert not any(":part:" in key for key in keys)
    else:
        assert acc.info().buffered == 30
        assert "redisacc:{w}:sums" not in keys


@pytest.mark.every_server
def test_a_server_without_struct_gets_everything_buffered(open_dense, open_sparse, server):
    dense, sparse = (
        open_dense("float32", [2], "d", limits=redisacc.Limits(in_place=10**9)),
        open_sparse("float32", [2], "s"),
    )
    dense.apply_grad([1.0, 2.0])
    sparse.apply_grad([1], [2.0])
    buffered = 0 if server.real else 1
    assert dense.info().buffered == sparse.info().buffered == buffered


@pytest.mark.every_server
def test_the_parts_of_a_large_gradient_fit_the_blocks_of_the_allocator(open_dense, real_client):
    acc = open_dense("float32", [10**6], "large")
    acc.apply_grad(np.ones(10**6, np.float32))
    parts = list(real_client.scan_iter("redisacc:{large}:part:*"))
    assert len(parts) == 8
    # jemalloc has blocks of 512 KiB, and then of 640: a part that needs one byte more would waste a quarter.
    assert sum(real_client.memory_usage(part) for part in parts) < 1.12 * 4 * 10**6


# What a field of the record never holds. tests/hostile damages every value of every key, one at a time.
FORGED = {
    "staleness": (b"", b"x", b"0:", b"4:2", b"0:1,0:1", b"0:0,1:2", b"0:3"),
    "total_weight": (b"", b"0", b"nan", b"1e999", b"1e-40", b"1" * 25),
    "staleness_weight": (b"linear", b"1,0.5,0.25,0.125", b""),
    "partitions": (b"0", b"0,0", b"0,1,", b"01,2", b"-1,2", b"0,100000", b"1" * 50_000),
    "grace_count": (b"x", b"-1", b"9" * 16),
    "quorum": (b"x", b"-1", b"9" * 16),
}


@pytest.mark.forges
def test_a_field_that_holds_what_redisacc_never_writes_is_named(open_dense, open_parameters, client):
    options = {"staleness": redisacc.Staleness(3, weight="inverse_sqrt"), "shared_name": "w"}
    acc = open_dense("float32", [1], **options)
    for weight in (1.0, 0.5):
        acc.apply_grad([1.0], weight=weight)
    before = client.hgetall("redisacc:{w}")
    for field, texts in FORGED.items():
        for text in texts:
            client.hset("redisacc:{w}", field, text)
            with pytest.raises(redisacc.CorruptDataError, match=field.replace("total_weight", "total.weight")):
                acc.take_grad(3, timeout=0, grace=1) if field == "grace_count" else acc.info()
            if field == "partitions":
                with pytest.raises(redisacc.CorruptDataError, match=field):
                    open_dense("float32", [1], "w")
            client.delete("redisacc:{w}")
            client.hset("redisacc:{w}", mapping=before)
    open_parameters("p").publish(np.ones(2), 0)
    client.hset("redisacc:{p}:parameters", "partitions", "0,0")
    with pytest.raises(redisacc.CorruptDataError, match="partitions"):
        open_parameters("p")
    client.flushall()
