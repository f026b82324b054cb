"""The memory of buffered gradients is bounded: beyond the limit, clients compact some of them."""

import contextlib

import numpy as np
import pytest

import redisacc


@pytest.fixture(params=["small", "in parts"])
def limits(request):
    """Makes limits of buffered gradients. What is tested with it holds for inline gradients and for large ones."""
    inline = 0 if request.param == "in parts" else None
    return lambda buffer: redisacc.Limits(in_place=0, buffer=buffer, inline=inline)


def buffered_bytes(client):
    """The real size of the parts and the inline gradients."""
    parts = sum(client.strlen(key) for key in set(client.scan_iter()) if b":part:" in key)
    return parts + sum(map(len, client.hvals("redisacc:{w}:inline")))


def test_the_limit_is_shown(open_dense):
    acc = open_dense("float32", [3], limits=redisacc.Limits(buffer=1000))
    assert (acc.info().buffered_bytes, acc.info().buffer_limit) == (0, 1000)
    assert open_dense("float32", [3]).info().buffer_limit == 256 * 2**20


@pytest.mark.slow(keep="in parts")
@pytest.mark.usual(client="asyncio")
@pytest.mark.every_server
def test_a_dense_round_of_many_times_the_limit(client, open_dense, limits):
    acc = open_dense("float32", [100], "w", reduction_type="SUM", limits=limits(2000))
    rng = np.random.default_rng(0)
    expected = None
    for _ in range(50):
        gradient = rng.standard_normal(100).astype(np.float32)
        expected = gradient if expected is None else expected + gradient
        assert acc.apply_grad(gradient)
        info = acc.info()
        assert info.buffered_bytes == buffered_bytes(client) <= 2000
    assert (acc.info().num_accumulated, acc.info().buffered) < (51, 6)
    assert not [key for key in client.scan_iter() if b":place:" in key or b":compacting" in key]
    # The oldest are compacted first, and here all of them: the order of the additions stays that of arrival.
    np.testing.assert_array_equal(acc.peek().gradient, expected)
    np.testing.assert_array_equal(acc.take_grad(50), expected)
    assert buffered_bytes(client) == acc.info().buffered_bytes == 0


@pytest.mark.parametrize("before", [0, 1])
def test_what_has_no_room_is_refused_and_not_stored(client, open_sparse, before, limits):
    acc = open_sparse("float64", None, "w", limits=limits(100))
    for _ in range(before):
        acc.apply_grad(range(5), np.ones(5))
    keys, record = sorted(client.scan_iter()), client.hgetall("redisacc:{w}")
    # The server is asked about the second one before it is uploaded.
    for elements in (7, 2**19 + 1):
        with pytest.raises(
            redisacc.AccumulatorFullError,
            match=r"bytes in 'w'.*\. Take the round, or create the accumulator with a larger limits.buffer",
        ):
            acc.apply_grad(range(100, 100 + elements), np.ones(elements))
    assert sorted(client.scan_iter()) == keys
    # Places are only an order. One that was reserved for a gradient that is refused is left out.
    assert client.hgetall("redisacc:{w}") | {b"places": b""} == record | {b"places": b""}
    # The round can be taken, which frees the buffer.
    if before:
        assert acc.take_grad(1)[0].tolist() == [0, 1, 2, 3, 4]
        assert acc.apply_grad([7], [1.0], local_step=1)


def test_a_gradient_without_elements_needs_no_room(open_sparse):
    acc = open_sparse("float64", None, "w", limits=redisacc.Limits(in_place=0, buffer=0))
    assert acc.apply_grad([], np.empty((0, 2)))
    with pytest.raises(redisacc.AccumulatorFullError):
        acc.apply_grad([1], [[1.0, 2.0]])


def test_a_stale_gradient_is_not_uploaded(client, real_server, open_dense):
    acc = open_dense("float64", [2**20], "w", limits=redisacc.Limits(in_place=0))
    acc.set_global_step(1)
    # A server's first apply loads the scripts, which would count.
    acc.apply_grad(np.ones(2**20))
    client.config_resetstat()
    assert acc.apply_grad(np.ones(2**20)).outcome == "stale"
    assert client.info("stats")["total_net_input_bytes"] < 10_000
    assert acc.info().stale == 2


@pytest.mark.forges
def test_foreign_headers_end_the_search_for_room_at_once(client, open_dense):
    acc = open_dense("float64", [10], "w", limits=redisacc.Limits(in_place=0, buffer=100, inline=0))
    acc.apply_grad(np.ones(10))
    (name,) = client.hkeys("redisacc:{w}:buffered")
    client.hset("redisacc:{w}:buffered", name, b"0 \xc1")
    with pytest.raises(redisacc.CorruptDataError, match="header"):
        acc.apply_grad(np.ones(10))
    assert acc.num_accumulated() == 1


@pytest.mark.slow(keep="in parts")
def test_many_clients_share_the_room(real_server, open_dense, limits, background):
    """Exact numbers reveal a gradient that is lost or counted twice."""
    options = {"reduction_type": "SUM", "limits": limits(4096)}
    accs = [open_dense("int64", [64], "w", redis=real_server.client(), **options) for _ in range(6)]

    def work(worker):
        for _ in range(40):
            assert accs[worker].apply_grad(np.full(64, 10**worker), local_step=2**40)

    working = [background(work, worker) for worker in range(3)]
    for one in working:
        one.result()
    # The others have a taker in between.
    working = [background(work, worker) for worker in range(3, 6)]
    total = np.zeros(64, np.int64)
    while any(one.running for one in working) or accs[0].num_accumulated():
        with contextlib.suppress(redisacc.TakeTimeoutError):
            total += accs[0].take_grad(1, timeout=0.05)
    assert set(total) == {40 * 111_111}


@pytest.mark.parametrize("others", [1, 2])
def test_room_that_others_fill_while_it_is_made_is_looked_for_again(client, proxy, open_dense, limits, others):
    """Before the buffered gradients are read, the round is taken, and before the swap, the next one is filled."""
    acc = open_dense("int64", [4], "w", reduction_type="SUM", limits=limits(64), redis=proxy.where)
    other = redisacc.ConditionalAccumulator("int64", [4], "w", reduction_type="SUM", limits=limits(64), redis=client)
    taken = []

    def take():
        taken.append(other.take_grad(1))
        proxy.before("commit", fill)

    def fill():
        for _ in range(others):
            assert other.apply_grad(np.full(4, 10), local_step=9)

    for _ in range(2):
        acc.apply_grad(np.full(4, 1))
    proxy.before("HSCAN", take)
    assert acc.apply_grad(np.full(4, 100), local_step=9)
    np.testing.assert_array_equal(taken, [np.full(4, 2)])
    np.testing.assert_array_equal(acc.take_grad(1), np.full(4, 100 + 10 * others))
    other.close()


def test_a_round_that_is_taken_before_the_swap_keeps_its_gradients(client, proxy, open_dense):
    """The request is stale then. The gradients that it was to replace are those of the taker."""
    limits = redisacc.Limits(in_place=0, buffer=7 * 2**20)
    acc = open_dense("float64", [3 * 2**17], "w", limits=limits, redis=proxy.where)
    other = redisacc.ConditionalAccumulator("float64", [3 * 2**17], "w", limits=limits, redis=client)
    for _ in range(2):
        acc.apply_grad(np.ones(3 * 2**17))
    refused = []

    def take():
        # The first one finds no room.
        refused.append(proxy.before("commit", lambda: other.take(2).__enter__()))

    proxy.before("commit", take)
    assert acc.apply_grad(np.ones(3 * 2**17)).outcome == "stale"
    assert refused
    with other.recover() as taken:
        np.testing.assert_array_equal(taken.gradient, np.ones(3 * 2**17))
    other.close()


@pytest.mark.slow
def test_what_is_too_much_for_one_fold_is_compacted_if_nothing_else_helps(client, open_sparse):
    """And of the oldest, no more are compacted than necessary."""
    limit, width = 150 * 2**20, 2**18
    acc = open_sparse("float64", None, "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0, buffer=limit))
    for _ in range(2):
        acc.apply_grad(range(35), np.ones((35, width)))
    for row in range(3):
        acc.apply_grad([50 + row], np.ones((1, width)))
    # The three small ones are the longest run of up to 128 MiB, but have no row in common. The large ones have all.
    assert acc.apply_grad([100, 101, 102], np.ones((3, width)))
    assert acc.info().buffered == 4
    assert acc.info().buffered_bytes == buffered_bytes(client) <= limit
    assert acc.take_grad(6)[1][:, 0].tolist() == [2.0] * 35 + [1.0] * 6
