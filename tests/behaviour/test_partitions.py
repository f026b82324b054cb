"""Accumulators whose gradients have their parts in several slots: what differs from those that lie in one."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.interposing import before_next_call
from support.leaks import leftovers
from support.model import assert_same
from support.selection import REAL

import redisacc
from redisacc._admin.garbage import find_garbage, remove_garbage
from redisacc._format import attempts
from redisacc._format.attempts import StoredAttempt
from redisacc._format.keys import Keys
from redisacc._protocol.applying import partition_writer
from redisacc._protocol.leases import private_leases
from redisacc._protocol.parts.sweep import remove_parts, sweep
from redisacc._protocol.scripts.attempts import AttemptScripts
from redisacc._protocol.scripts.partitions import PartitionScripts, RegisteredGradient
from redisacc._redis.connect import connect
from redisacc._redis.transport import Transport

pytestmark = pytest.mark.usefixtures("force_parts")

SHAPE = [30]


def gradient(number):
    return np.arange(30, dtype=np.float32) * number


@pytest.fixture
def acc(open_dense):
    made = open_dense(
        "float32", SHAPE, "w", reduction_type="SUM", partitions=3, limits=redisacc.Limits(in_place=0), worker="ann"
    )
    yield made
    made.delete()


@pytest.fixture
def keys(acc):
    return Keys("w", acc.info().partitions)


def parts_of(client):
    return sorted(key.decode() for key in client.scan_iter("redisacc:{*/*}:partition:*"))


@pytest.fixture
def between(monkeypatch):
    """Does something when the parts of the next gradient have been written, and before it is committed."""

    def arm(action):
        def with_the_attempt(options):
            action(StoredAttempt(f"{options['gradient']}-{options['place']}", options["parts"]))

        before_next_call(monkeypatch, PartitionScripts, "commit", with_the_attempt)

    return arm


def swept(client, keys):
    return sweep(connect(client), keys)


class WriterDiesError(BaseException):
    """Stands for the death of the process."""


def die(attempt):
    raise WriterDiesError


@pytest.mark.parametrize("value", [0, -1, 1001, 10_000, True, 1.5, "many", b"auto", [3]])
def test_an_invalid_number_is_refused_before_anything_is_created(open_dense, client, value):
    with pytest.raises(redisacc.InvalidArgumentError, match=r"partitions must be an integer from 1 to 1000, \"auto\""):
        open_dense("float32", SHAPE, "w", partitions=value)
    assert list(client.scan_iter()) == []


def test_an_existing_accumulator_keeps_its_partitions(open_dense, acc):
    kept = acc.info().partitions
    for same in (3, None, "auto"):
        assert open_dense("float32", SHAPE, "w", reduction_type="SUM", partitions=same).info().partitions == kept
    for other in (1, 2, 4):
        with pytest.raises(redisacc.InvalidArgumentError, match=f"its number of partitions is 3, not {other}"):
            open_dense("float32", SHAPE, "w", reduction_type="SUM", partitions=other)


@pytest.mark.parametrize("value", [None, 1, "auto"])
def test_one_partition_is_none_and_a_single_server_needs_none(open_dense, client, value):
    acc = open_dense("float32", SHAPE, partitions=value, limits=redisacc.Limits(in_place=0))
    assert acc.info().partitions == ()
    acc.apply_grad(gradient(1))
    assert parts_of(client) == []
    assert not client.hexists(acc.accumulator_ref, "partitions")


@pytest.mark.every_server
def test_every_partition_has_the_same_elements_of_all_gradients(acc, keys, client):
    for number in (1, 2):
        acc.apply_grad(gradient(number))
    found = {key: client.get(key) for key in parts_of(client)}
    assert len(found) == 6
    assert all(client.pttl(key) == -1 for key in found)
    for place, start, stop in ((0, 0, 12), (1, 12, 24), (2, 24, 30)):
        of_one = [data for key, data in found.items() if key.startswith(keys.partition(place) + ":")]
        assert sorted(of_one) == sorted(gradient(number)[start:stop].tobytes() for number in (1, 2))
    assert_same(acc.peek().gradient, gradient(3))
    with acc.take(2) as taken:
        assert_same(taken.gradient, gradient(3))
        assert len(parts_of(client)) == 6
    assert parts_of(client) == []
    assert acc.info().attempts == 0


def test_small_gradients_stay_with_the_record(open_dense, client, monkeypatch):
    monkeypatch.undo()
    acc = open_dense("float32", SHAPE, partitions=3)
    acc.apply_grad(gradient(1))
    assert parts_of(client) == []
    assert_same(acc.take_grad(1), gradient(1))


def test_a_gradient_of_too_many_parts_is_refused(acc, client, monkeypatch):
    monkeypatch.setattr(attempts, "MOST_PARTS", 2)
    with pytest.raises(redisacc.InvalidArgumentError, match="at most 2 parts, but this one of 120 bytes has 3"):
        acc.apply_grad(gradient(1))
    assert leftovers(client) == []


def test_a_stale_gradient_is_refused_before_its_parts_are_written(acc, client, monkeypatch):
    acc.set_global_step(5)
    monkeypatch.setattr("redisacc._protocol.applying.partition_writer.write_parts", None)
    assert acc.apply_grad(gradient(1), local_step=4).outcome == "stale"
    assert acc.info().attempts == 0


@pytest.mark.every_server
@pytest.mark.servers(*REAL)
def test_a_writer_waits_once_for_the_replicas_of_all_parts_on_a_node(open_dense, client, durations):
    durations(replication=0.01)
    acc = open_dense(
        "float32", SHAPE, "w", reduction_type="SUM", partitions=8, limits=redisacc.Limits(in_place=0), min_replicas=1
    )
    waits = []
    for _ in range(2):
        with pytest.raises(redisacc.NotReplicatedError) as failure:
            acc.apply_grad(gradient(1))
        assert failure.value.replicas == 0
        waits.append(client.info("commandstats")["cmdstat_wait"]["calls"])
    # Once for the parts, and once for the script that counts the gradient.
    assert waits[1] - waits[0] == 2
    acc.delete()


def test_an_attempt_that_was_swept_is_refused_and_its_writer_begins_a_new_one(acc, keys, client, between):
    removed = []

    def give_up(attempt):
        client.zadd(keys.attempts, {str(attempt): 1})
        assert redisacc.ConditionalAccumulator("float32", SHAPE, "w", reduction_type="SUM", redis=client).apply_grad(
            gradient(0), local_step=7
        )
        assert swept(client, keys) == 1
        removed.append(attempt)
        assert not [key for key in parts_of(client) if attempt.id in key]

    between(give_up)
    assert acc.apply_grad(gradient(1)).num_accumulated == 2
    assert len(removed) == 1
    assert_same(acc.take_grad(2), gradient(1))
    assert parts_of(client) == []


def test_an_attempt_is_refused_from_the_moment_in_which_a_sweeper_begins(acc, keys, client, between):
    """It dies before it has removed the first part."""

    def begin_to_sweep(attempt):
        client.zadd(keys.attempts, {str(attempt): 1})
        assert AttemptScripts(connect(client), keys).sweep(limit=1) == [attempt]
        assert len(parts_of(client)) == 3
        given_up.append(attempt.id)

    given_up = []
    between(begin_to_sweep)
    assert acc.apply_grad(gradient(1)).num_accumulated == 1
    assert not [key for key in parts_of(client) if given_up[0] in key]
    assert_same(acc.take_grad(1), gradient(1))
    assert (parts_of(client), acc.info().attempts) == ([], 0)


def test_a_number_that_the_leader_gives_twice_names_other_parts(acc, keys, client, between):
    """After a failover to a replica that lagged behind. Somebody may still be removing the parts of the first one."""

    def fail_over(attempt):
        client.zrem(keys.attempts, str(attempt))
        client.hincrby(keys.record, "places", -1)
        forgotten.append(attempt)

    forgotten = []
    between(fail_over)
    assert acc.apply_grad(gradient(1)).num_accumulated == 1
    remove_parts(connect(client), keys, forgotten)
    assert {key.split(":")[-2][-2:] for key in parts_of(client)} == {forgotten[0].id[-2:]}
    assert_same(acc.take_grad(1), gradient(1))


def test_a_gradient_that_is_refused_at_the_last_moment_leaves_nothing(acc, client, between):
    between(lambda _: acc.set_global_step(5))
    assert acc.apply_grad(gradient(1)).outcome == "stale"
    assert (parts_of(client), acc.info().attempts) == ([], 0)


def test_an_attempt_whose_lease_is_over_still_counts_if_nobody_has_swept_it(acc, keys, client, between):
    between(lambda attempt: client.zadd(keys.attempts, {str(attempt): 1}))
    assert acc.apply_grad(gradient(1))
    assert_same(acc.take_grad(1), gradient(1))


def test_the_next_taker_removes_what_a_dead_writer_has_left(acc, client, between, clock):
    between(die)
    with pytest.raises(WriterDiesError):
        acc.apply_grad(gradient(1))
    # The writer's request is open; another one of this thread would settle it.
    assert (len(parts_of(client)), acc.num_accumulated()) == (3, 0)
    other = redisacc.ConditionalAccumulator(
        "float32", SHAPE, "w", reduction_type="SUM", redis=client, limits=redisacc.Limits(in_place=0), worker="bob"
    )
    other.apply_grad(gradient(2))
    clock.advance(partition_writer.ATTEMPT_MS / 1000 + 1)
    assert_same(other.take_grad(1), gradient(2))
    assert parts_of(client) == []
    assert acc.settle().applied == 0


def test_a_late_copy_of_a_registration_revives_nothing(acc, keys, client, between):
    """It gets a place of its own, and the commit of the swept attempt stays refused."""
    registered = []
    register = PartitionScripts.register

    def watch(self, request, **options):
        registered.append((request, options))
        return register(self, request, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionScripts, "register", watch)
        between(die)
        with pytest.raises(WriterDiesError):
            acc.apply_grad(gradient(1))
    scripts = PartitionScripts(connect(client), keys, incarnation=acc.info().incarnation)
    (first,) = client.zrange(keys.attempts, 0, -1)
    place = first.split()[0].rpartition(b"-")[2].decode()
    client.zadd(keys.attempts, {first: 1})
    assert swept(client, keys) == 1
    (request, options), *_ = registered
    assert scripts.register(request, **options) == RegisteredGradient(str(int(place) + 1))
    what = {name: options[name] for name in ("gradient", "parts", "nbytes", "replaced")}
    assert scripts.commit(request, **what, place=place, header=b"x") == "expired"
    assert acc.num_accumulated() == 0
    acc.settle()


def test_a_late_copy_of_a_part_gives_it_no_expiry(acc, client, monkeypatch):
    sent = []
    scatter = Transport.scatter

    def watch(self, batches, **options):
        sent.extend(batches)
        return scatter(self, batches, **options)

    monkeypatch.setattr(Transport, "scatter", watch)
    acc.apply_grad(gradient(1))
    for set_part, *_ in sent:
        connect(client).call(*set_part)
    assert [client.pttl(key) for key in parts_of(client)] == [-1, -1, -1]
    assert_same(acc.take_grad(1), gradient(1))


@pytest.mark.forges
@pytest.mark.every_server
def test_a_lost_part_is_named_and_the_others_can_be_had(acc, client, caplog):
    for number in (1, 2, 4):
        acc.apply_grad(gradient(number))
    # The gradient with the second place.
    lost = next(key for key in parts_of(client) if key.rpartition(":")[0].endswith("-2"))
    client.delete(lost)
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


@pytest.mark.forges
def test_a_round_of_which_nothing_is_left_can_be_ended(acc, client):
    acc.apply_grad(gradient(1))
    for key in parts_of(client):
        client.delete(key)
    with pytest.raises(redisacc.DataLossError):
        acc.take_grad(1)
    with acc.recover(skip_lost=True) as taken:
        assert (taken.gradient, taken.num_accumulated) == (None, 0)
    assert acc.info().unacknowledged == []


def test_gradients_are_compacted_at_the_limit(open_dense, client):
    acc = open_dense(
        "float32", SHAPE, "w", reduction_type="SUM", partitions=3, limits=redisacc.Limits(in_place=0, buffer=2 * 4 * 30)
    )
    for number in (1, 2, 4, 8):
        assert acc.apply_grad(gradient(number))
    assert acc.info().buffered_bytes <= 2 * 4 * 30
    assert len(parts_of(client)) <= 6
    assert leftovers(client) == []
    assert_same(acc.take_grad(4), gradient(15))
    acc.delete()
    assert parts_of(client) == []


@pytest.mark.forges
def test_a_lost_part_prevents_compacting_and_is_named(open_dense, client):
    acc = open_dense(
        "float32", SHAPE, "w", reduction_type="SUM", partitions=3, limits=redisacc.Limits(in_place=0, buffer=2 * 4 * 30)
    )
    for number in (1, 2):
        acc.apply_grad(gradient(number))
    lost = next(key for key in parts_of(client) if key.rpartition(":")[0].endswith("-1"))
    client.delete(lost)
    with pytest.raises(redisacc.AccumulatorFullError, match=f"compacting needs {lost}, which is lost"):
        acc.apply_grad(gradient(4))
    with pytest.raises(redisacc.DataLossError) as caught:
        acc.take_grad(2)
    assert caught.value.part == lost
    with acc.recover(skip_lost=True) as taken:
        assert_same(taken.gradient, gradient(2))


def test_gradients_have_weights(open_dense):
    options = {
        "staleness": redisacc.Staleness(1, weight=[1, 0.5]),
        "partitions": 3,
        "limits": redisacc.Limits(in_place=0, buffer=2 * 4 * 30),
    }
    acc = open_dense("float32", SHAPE, "w", **options)
    acc.set_global_step(1)
    for number, weight, step in ((1, 4.0, 1), (2, 1.0, 0), (8, 0.25, 1), (4, 2.0, 0)):
        assert acc.apply_grad(gradient(number), step, weight=weight)
    assert acc.info().buffered < 4
    assert (acc.info().total_weight, acc.peek().total_weight) == (5.75, 5.75)
    np.testing.assert_array_equal(acc.take_grad(4), gradient(11) / np.float32(5.75))
    acc.delete()


@pytest.mark.forges
def test_a_round_without_its_lost_gradients_weighs_less(acc, client):
    for number, weight in ((1, 4.0), (2, 0.5)):
        acc.apply_grad(gradient(number), weight=weight)
    client.delete(next(key for key in parts_of(client) if key.rpartition(":")[0].endswith("-1")))
    with pytest.raises(redisacc.DataLossError):
        acc.take_grad(2)
    with acc.recover(skip_lost=True) as taken:
        assert (taken.num_accumulated, taken.total_weight) == (1, 0.5)
        assert_same(taken.gradient, gradient(1))


@pytest.mark.forges
@pytest.mark.parametrize(("weights", "left"), [((0.1, 0.2, 0.3), 0), ((1e9, 0.01, 0.01), 2)])
def test_the_weight_of_what_is_left_is_exact(acc, client, weights, left):
    for weight in weights:
        acc.apply_grad(gradient(1), weight=weight)
    for key in parts_of(client):
        if left == 0 or key.rpartition(":")[0].endswith("-1"):
            client.delete(key)
    with pytest.raises(redisacc.DataLossError):
        acc.take_grad(3)
    with acc.recover(skip_lost=True) as taken:
        assert (taken.num_accumulated, taken.total_weight) == (left, 0.01 * left)


def test_a_round_is_recovered_with_all_of_its_parts(acc, client):
    acc.apply_grad(gradient(3))
    with pytest.raises(RuntimeError), acc.take(1):
        raise RuntimeError
    assert len(parts_of(client)) == 3
    with acc.recover() as taken:
        assert_same(taken.gradient, gradient(3))
    assert parts_of(client) == []


@pytest.mark.every_server
def test_deleting_removes_all_parts(open_dense, client, between):
    acc = open_dense("float32", SHAPE, "w", partitions=3, limits=redisacc.Limits(in_place=0))
    acc.apply_grad(gradient(1))
    acc.take(1).__enter__()
    acc.apply_grad(gradient(1), local_step=1)
    between(die)
    with pytest.raises(WriterDiesError):
        acc.apply_grad(gradient(1), local_step=1)
    assert len(parts_of(client)) == 9
    acc.delete()
    assert list(client.scan_iter()) == []


def test_a_writer_whose_accumulator_is_deleted_leaves_nothing(open_dense, client, between):
    acc = open_dense("float32", SHAPE, "w", partitions=3, limits=redisacc.Limits(in_place=0))
    between(lambda _: acc.delete())
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        acc.apply_grad(gradient(1))
    assert list(client.scan_iter()) == []


@pytest.mark.servers(*REAL)
def test_gc_finds_attempts_that_are_over(acc, keys, client, between):
    between(die)
    with pytest.raises(WriterDiesError):
        acc.apply_grad(gradient(1))
    transport = connect(client)
    assert find_garbage(transport) == []
    (attempt,) = client.zrange(keys.attempts, 0, -1)
    client.zadd(keys.attempts, {attempt: 1})
    (leftover,) = find_garbage(transport)
    assert (leftover.name, leftover.why) == ("w", "attempts")
    assert remove_garbage(transport, leftover) == 1
    assert (parts_of(client), find_garbage(transport)) == ([], [])
    acc.settle()


@pytest.mark.servers(*REAL)
def test_gc_removes_parts_that_no_attempt_has_and_no_others(acc, open_dense, keys, client):
    # Its name is that of a partition.
    other = open_dense("float32", SHAPE, "w/0", limits=redisacc.Limits(in_place=0))
    other.apply_grad(gradient(1))
    acc.apply_grad(gradient(2))
    with pytest.raises(RuntimeError), acc.take(1):
        raise RuntimeError
    acc.apply_grad(gradient(4), local_step=1)
    transport = connect(client)
    assert find_garbage(transport) == []
    client.set(keys.part("1-1-1", 0), b"late")
    client.set(keys.part("1-1-2", 1), b"expires", px=60_000)
    (leftover,) = find_garbage(transport)
    assert (leftover.name, leftover.why, list(leftover.keys)) == ("w", "partition", [keys.part("1-1-1", 0)])
    assert remove_garbage(transport, leftover) == 1
    assert find_garbage(transport) == []
    with acc.recover() as taken:
        assert_same(taken.gradient, gradient(2))
    assert_same(acc.take_grad(1), gradient(4))
    assert_same(other.take_grad(1), gradient(1))
    other.delete()


def test_parts_of_a_private_accumulator_live_as_long_as_its_owner(open_dense, client):
    acc = open_dense("float32", SHAPE, partitions=3, limits=redisacc.Limits(in_place=0))
    acc.apply_grad(gradient(1))
    parts = parts_of(client)
    assert len(parts) == 3
    for key in parts:
        client.pexpire(key, 1000)
    name = acc.accumulator_ref.partition("{")[2].rstrip("}")
    private_leases.renew(connect(client), Keys(name, acc.info().partitions), private_leases.OWNER_LEASE_MS)
    assert all(50_000 < client.pttl(key) <= 60_000 for key in parts)
    acc.close()
    assert parts_of(client) == []


def test_a_foreign_list_of_partitions_is_refused(acc, open_dense, client):
    for text in (b"0", b"0,0", b"0,1,", b"01,2", b"0,1\x00", b"1" * 50_000, b"-1,2", b"0,100000"):
        client.hset("redisacc:{w}", "partitions", text)
        with pytest.raises(redisacc.CorruptDataError, match="partitions"):
            open_dense("float32", SHAPE, "w", reduction_type="SUM")
        with pytest.raises(redisacc.CorruptDataError, match="partitions holds"):
            acc.info()
    client.hset("redisacc:{w}", "partitions", "0,1,2")


def test_a_foreign_attempt_stands_in_nobodys_way(acc, keys, client):
    client.zadd(keys.attempts, {"x" * 100 + "!": 0, "y": 0})
    acc.apply_grad(gradient(1))
    assert_same(acc.take_grad(1), gradient(1))
    assert (parts_of(client), client.exists(keys.attempts)) == ([], 0)
    # A deletion removes it with the key.
    client.zadd(keys.attempts, {"y": 2e12})
    acc.delete()
    assert not client.exists(keys.attempts)
