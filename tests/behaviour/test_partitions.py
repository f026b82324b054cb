"""Accumulators whose gradients have their parts in several slots: what differs from those that lie in one."""

import logging

import numpy as np
import pytest
from support.command import collect_garbage
from support.leaks import leftovers
from support.model import assert_same
from support.selection import REAL

import redisacc

# Writers are interrupted in the main thread.
pytestmark = pytest.mark.fixed("client", "partitions")

SHAPE = [30]
IN_PARTS = redisacc.Limits(in_place=0, inline=0)
RECORD = "redisacc:{w}"
ATTEMPTS = f"{RECORD}:attempts"


def gradient(number):
    return np.arange(30, dtype=np.float32) * number


@pytest.fixture
def open_parted(open_dense):
    """Opens `w`, whose gradients have a part in each of three partitions, unless the test says otherwise."""

    def open_one(shared_name="w", **options):
        options = {"reduction_type": "SUM", "partitions": 3, "limits": IN_PARTS, "worker": "ann", **options}
        return open_dense("float32", SHAPE, shared_name, **options)

    return open_one


@pytest.fixture
def acc(proxy, open_parted):
    made = open_parted(redis=proxy.where)
    yield made
    made.delete()


@pytest.fixture
def other(acc, open_parted):
    """Another handle, whose requests do not pass through the proxy."""
    return open_parted(worker="bob")


def parts_of(client):
    return sorted(key.decode() for key in client.scan_iter("redisacc:{*/*}:partition:*"))


def attempts_of(client):
    return [member.decode() for member in client.zrange(ATTEMPTS, 0, -1)]


@pytest.fixture
def between(proxy, client):
    """Does something when the parts of the next gradient have been written, and before it is counted."""

    def arm(action):
        def with_the_attempt():
            (attempt,) = attempts_of(client)
            action(attempt)

        proxy.before("commit", with_the_attempt)

    return arm


def test_one_partition_is_none_and_a_single_server_needs_none(open_parted, client):
    for value in (None, 1, "auto"):
        acc = open_parted(partitions=value)
        assert acc.info().partitions == ()
        acc.apply_grad(gradient(1))
        assert parts_of(client) == []
        assert not client.hexists(acc.accumulator_ref, "partitions")
        acc.delete()


@pytest.mark.slow
def test_a_gradient_of_too_many_parts_is_refused(open_dense, client, tmp_path):
    acc = open_dense("float32", None, partitions=3)
    # A file without contents: nothing reads them.
    elements = 100_001 * 2**21 // 4
    gradient = np.memmap(tmp_path / "huge", np.float32, "w+", shape=(elements,))
    with pytest.raises(redisacc.InvalidArgumentError, match=f"at most 100000 parts, but .* {4 * elements} bytes has"):
        acc.apply_grad(gradient)
    assert leftovers(client) == []


def test_a_stale_gradient_is_refused_before_its_parts_are_written(acc, proxy, client):
    acc.set_global_step(5)
    assert acc.apply_grad(gradient(1), local_step=4).outcome == "stale"
    assert "SET" not in proxy.sent
    assert attempts_of(client) == []


@pytest.mark.every_server
@pytest.mark.servers(*REAL)
def test_a_writer_waits_once_for_the_replicas_of_all_parts_on_a_node(open_parted, client, durations):
    durations(replication=0.01)
    acc = open_parted(partitions=8, min_replicas=1)
    waits = []
    for _ in range(2):
        with pytest.raises(redisacc.NotReplicatedError) as failure:
            acc.apply_grad(gradient(1))
        assert failure.value.replicas == 0
        waits.append(client.info("commandstats")["cmdstat_wait"]["calls"])
    # Once for the parts, and once for the script that counts the gradient.
    assert waits[1] - waits[0] == 2


def test_an_attempt_that_was_swept_is_refused_and_its_writer_begins_a_new_one(acc, client, between, gc):
    removed = []

    def give_up(attempt):
        client.zadd(ATTEMPTS, {attempt: 1})
        assert gc("w", "--yes") == ([("w", "attempts")], 1)
        assert parts_of(client) == []
        removed.append(attempt)

    between(give_up)
    assert acc.apply_grad(gradient(1)).num_accumulated == 1
    assert len(removed) == 1
    assert len(parts_of(client)) == 3
    assert_same(acc.take_grad(1), gradient(1))


def test_an_attempt_is_refused_from_the_moment_in_which_a_sweeper_begins(acc, client, between):
    """It dies before it has removed the first part."""
    given_up = []

    def begin_to_sweep(attempt):
        client.zadd(ATTEMPTS, {attempt: 0})
        given_up.append(attempt.split()[0])

    between(begin_to_sweep)
    assert acc.apply_grad(gradient(1)).num_accumulated == 1
    assert not [key for key in parts_of(client) if given_up[0] in key]
    assert_same(acc.take_grad(1), gradient(1))
    assert (parts_of(client), attempts_of(client)) == ([], [])


def test_a_number_that_the_leader_gives_twice_names_other_parts(acc, client, between):
    """After a failover to a replica that lagged behind. Somebody may still be removing the parts of the first one."""
    forgotten = []

    def fail_over(attempt):
        client.zrem(ATTEMPTS, attempt)
        client.hincrby(RECORD, "places", -1)
        forgotten.extend(parts_of(client))

    between(fail_over)
    assert acc.apply_grad(gradient(1)).num_accumulated == 1
    for key in forgotten:
        client.delete(key)
    assert {key.split(":")[-2][-2:] for key in parts_of(client)} == {forgotten[0].split(":")[-2][-2:]}
    assert_same(acc.take_grad(1), gradient(1))


def lost_of(client, place):
    """Deletes a part of the gradient with that place in the round, and returns its key."""
    lost = next(key for key in parts_of(client) if key.rpartition(":")[0].endswith(f"-{place}"))
    client.delete(lost)
    return lost


@pytest.mark.forges
@pytest.mark.every_server
def test_a_lost_part_is_named_and_the_others_can_be_had(acc, client, caplog):
    for number in (1, 2, 4):
        acc.apply_grad(gradient(number))
    lost = lost_of(client, 2)
    with pytest.raises(redisacc.DataLossError, match=r"failed over .*recover\(skip_lost=True\) hands") as caught:
        acc.peek()
    assert (caught.value.part, caught.value.gradient) == (lost, lost.split(":")[-2])
    assert acc.num_accumulated() == 3
    with pytest.raises(redisacc.DataLossError, match="stays listed") as caught:
        acc.take_grad(3)
    assert (caught.value.part, caught.value.gradient) == (lost, lost.split(":")[-2])
    with pytest.raises(redisacc.DataLossError), acc.recover():
        pass
    with caplog.at_level(logging.WARNING, "redisacc"), acc.recover(skip_lost=True) as taken:
        assert taken.num_accumulated == 2
        assert_same(taken.gradient, gradient(5))
    assert caught.value.gradient in caplog.text
    assert (parts_of(client), acc.info().unacknowledged) == ([], [])


def test_a_lost_part_prevents_compacting_and_is_named(open_parted, client):
    acc = open_parted(limits=redisacc.Limits(in_place=0, inline=0, buffer=2 * 4 * 30))
    for number in (1, 2):
        acc.apply_grad(gradient(number))
    lost = lost_of(client, 1)
    with pytest.raises(redisacc.AccumulatorFullError, match=f"compacting needs {lost}, which is lost"):
        acc.apply_grad(gradient(4))
    with pytest.raises(redisacc.DataLossError) as caught:
        acc.take_grad(2)
    assert caught.value.part == lost
    with acc.recover(skip_lost=True) as taken:
        assert_same(taken.gradient, gradient(2))


@pytest.mark.forges
@pytest.mark.parametrize(("weights", "left"), [((4.0, 0.5), 0.5), ((0.1, 0.2, 0.3), 0), ((1e9, 0.01, 0.01), 0.02)])
def test_the_weight_of_what_is_left_is_exact(acc, client, weights, left):
    for weight in weights:
        acc.apply_grad(gradient(1), weight=weight)
    for place in range(1, len(weights) + 1) if left == 0 else [1]:
        lost_of(client, place)
    with pytest.raises(redisacc.DataLossError):
        acc.take_grad(len(weights))
    with acc.recover(skip_lost=True) as taken:
        assert (taken.num_accumulated, taken.total_weight) == (len(weights) - 1 if left else 0, left)


def test_a_writer_whose_accumulator_is_deleted_leaves_nothing(proxy, open_parted, client, between):
    acc, other = open_parted(redis=proxy.where), open_parted()
    between(lambda _: other.delete())
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        acc.apply_grad(gradient(1))
    assert list(client.scan_iter()) == []


def test_gc_asks_twice_because_a_leader_may_fail_over_between_its_questions(acc, client, dies, proxy):
    dies("commit", acc.apply_grad, gradient(1))
    (attempt,) = attempts_of(client)
    due = client.zscore(ATTEMPTS, attempt)
    parts = parts_of(client)
    # The leader that lists attempts has counted this one. Its replica, which lists gradients, has not heard of that.
    client.zrem(ATTEMPTS, attempt)
    proxy.listen_anew()
    proxy.after("ZRANGE", lambda: client.zadd(ATTEMPTS, {attempt: due}))
    assert collect_garbage(proxy.url, "w") == []
    assert proxy.sent.count("ZRANGE") == 2
    assert (parts_of(client), attempts_of(client)) == (parts, [attempt])
    acc.settle()


def test_gc_removes_parts_that_no_attempt_has_and_no_others(acc, open_parted, client, gc):
    # Its name is that of a partition.
    other = open_parted("w/0", partitions=None)
    other.apply_grad(gradient(1))
    acc.apply_grad(gradient(2))
    with pytest.raises(RuntimeError), acc.take(1):
        raise RuntimeError
    acc.apply_grad(gradient(4), local_step=1)
    assert gc() == ([], 0)
    first, second, *_ = acc.info().partitions
    late = f"redisacc:{{w/{first:05}}}:partition:part:1-1-1:0"
    client.set(late, b"late")
    client.set(f"redisacc:{{w/{second:05}}}:partition:part:1-1-2:1", b"expires", px=60_000)
    assert gc("--yes") == ([("w", "partition")], 1)
    assert not client.exists(late)
    assert gc() == ([], 0)
    with acc.recover() as taken:
        assert_same(taken.gradient, gradient(2))
    assert_same(acc.take_grad(1), gradient(4))
    assert_same(other.take_grad(1), gradient(1))


def test_parts_of_a_private_accumulator_live_as_long_as_its_owner(open_parted, client, clock):
    acc = open_parted(None)
    acc.apply_grad(gradient(1))
    parts = parts_of(client)
    assert len(parts) == 3
    clock.advance(120.0)
    assert parts_of(client) == parts
    assert all(0 < client.pttl(key) <= 60_000 for key in parts)
    acc.close()
    assert parts_of(client) == []


def test_a_foreign_attempt_stands_in_nobodys_way(acc, client):
    client.zadd(ATTEMPTS, {"x" * 100 + "!": 0, "y": 0})
    acc.apply_grad(gradient(1))
    assert_same(acc.take_grad(1), gradient(1))
    assert (parts_of(client), client.exists(ATTEMPTS)) == ([], 0)
    # A deletion removes it with the key.
    client.zadd(ATTEMPTS, {"y": 2e12})
    acc.delete()
    assert not client.exists(ATTEMPTS)
    assert leftovers(client) == []
