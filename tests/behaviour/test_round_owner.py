"""A round that is gone before its taker has acknowledged it: the taker gets no gradient, and learns who has it."""

import contextlib
import datetime
import functools
import logging
import re
import time

import numpy as np
import pytest
from support.model import assert_same
from support.selection import IN_PARTS

import redisacc

pytestmark = pytest.mark.usual(storage="in_place")


def f32(*values):
    return np.array(values, np.float32)


@pytest.fixture
def chief(proxy, open_dense_stored):
    acc = open_dense_stored("float32", [3], "lost", worker="chief", redis=proxy.where)
    # A server that does not know a script yet gets it twice, with all commands that follow it.
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    acc.apply_grad(f32(1, 2, 3))
    yield acc
    with contextlib.suppress(redisacc.NotFoundError):
        acc.delete()


@pytest.fixture
def heir(open_dense_stored, chief):
    return open_dense_stored("float32", [3], "lost", worker="heir")


@pytest.fixture
def before_acknowledging(proxy):
    """Does something when the next round has been read, and is about to be acknowledged."""
    return functools.partial(proxy.before, "acknowledge")


@pytest.fixture
def before_reading(proxy):
    """Does something when the next round has been granted, and its taker has not heard of it yet."""
    # The last of the commands that follow the script.
    return functools.partial(proxy.after, "EXISTS")


def recovers(acc):
    with acc.recover() as found:
        assert_same(found.gradient, f32(1, 2, 3))


def recovers_in_the_block(chief, heir, error=None):
    """Takes a round, has it recovered in the block, and ends the block, or raises in it."""
    with chief.take(1) as taken:
        recovers(heir)
        assert_same(taken.gradient, f32(1, 2, 3))
        if error is not None:
            raise error


def lost(error, owner):
    """Checks everything that the error says. Returns the token of the new owner."""
    said = re.fullmatch(
        rf".*: the round of step 0 does not belong to this take any more: recover\(\) gave it to '{owner}' "
        # That of a recovery.
        r"at (.* UTC), under the token '([0-9a-f]{32})'\. Do not use its gradient, because the new owner does",
        str(error),
    )
    assert said is not None, error
    at = datetime.datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=datetime.UTC)
    assert abs(at.timestamp() - time.time()) < 3600
    return said[2]


@pytest.mark.every_server
def test_a_gradient_that_was_recovered_is_not_returned(chief, heir, before_acknowledging):
    before_acknowledging(lambda: recovers(heir))
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as caught:
        chief.take_grad(1)
    lost(caught.value, "heir")
    # Its new owner has acknowledged it, and everything else goes on.
    assert chief.info().unacknowledged == []
    chief.apply_grad(f32(4, 5, 6), 1)
    assert_same(chief.take_grad(1), f32(4, 5, 6))


@pytest.mark.every_server
def test_a_block_whose_round_was_recovered_ends_with_the_error(chief, heir):
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as caught:
        recovers_in_the_block(chief, heir)
    lost(caught.value, "heir")


def test_the_error_of_the_block_itself_comes_first(chief, heir):
    with pytest.raises(ZeroDivisionError):
        recovers_in_the_block(chief, heir, ZeroDivisionError())


def test_a_chain_of_recoveries_names_the_last_owner(chief, heir, open_dense_stored):
    last = open_dense_stored("float32", [3], "lost", worker="last of all")
    with contextlib.ExitStack() as blocks:
        blocks.enter_context(chief.take(1))
        taking = blocks.pop_all()
        blocks.enter_context(heir.recover())
        recovering = blocks.pop_all()
    recovers(last)
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as second:
        recovering.close()
    token = lost(second.value, "last of all")
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as first:
        taking.close()
    assert lost(first.value, "last of all") == token


def test_only_the_latest_recoveries_are_remembered(chief, heir, client):
    """Otherwise, a chief that fails in a loop would fill the server."""
    taking = contextlib.ExitStack()
    taking.enter_context(chief.take(1))
    for _ in range(101):
        with contextlib.suppress(ZeroDivisionError), heir.recover():
            raise ZeroDivisionError
    assert client.llen("redisacc:{lost}:recovered") == 100
    # The recovery from the chief is the one that was forgotten.
    with pytest.raises(redisacc.DataLossError, match="no longer lists the round of step 0"):
        taking.close()
    recovers(heir)


@pytest.mark.parametrize("again", [False, True])
def test_a_round_of_a_deleted_accumulator_is_not_returned(chief, heir, before_acknowledging, client, again):
    def delete():
        heir.delete()
        if again:
            with redisacc.ConditionalAccumulator("float32", [3], "lost", redis=client) as other:
                other.apply_grad(f32(7, 7, 7))

    before_acknowledging(delete)
    with pytest.raises(redisacc.NotFoundError, match="was deleted after its round of step 0"):
        chief.take_grad(1)
    if again:
        redisacc.ConditionalAccumulator("float32", [3], "lost", redis=client).delete()


@pytest.mark.parametrize("acknowledges", [False, True])
def test_a_round_that_is_recovered_while_it_is_read(chief, client, before_reading, acknowledges):
    # Its block begins inside of the take and ends outside, so it must not depend on an event loop.
    heir = redisacc.ConditionalAccumulator("float32", [3], "lost", redis=client, worker="heir")
    blocks = contextlib.ExitStack()

    def recover():
        blocks.enter_context(heir.recover())
        if acknowledges:
            blocks.close()

    before_reading(recover)
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as caught:
        chief.take_grad(1)
    lost(caught.value, "heir")
    assert len(chief.info().unacknowledged) == (not acknowledges)
    blocks.close()
    heir.close()


@pytest.mark.forges
@pytest.mark.usual(storage=("in_place", "buffered_parts"))
def test_keys_of_a_round_that_are_evicted_while_it_is_read(chief, before_reading, client, storage):
    def evict():
        for key in client.scan_iter("*:taken:*"):
            client.delete(key)
        for key in client.scan_iter("*:part*:*"):
            client.delete(key)

    before_reading(evict)
    if storage in IN_PARTS:
        error = redisacc.DataLossError if storage == "partitions" else redisacc.CorruptDataError
        with pytest.raises(error, match=r"evicted.*stays listed in info\(\)\.unacknowledged"):
            chief.take_grad(1)
        assert len(chief.info().unacknowledged) == 1
    else:
        # The reply that granted the round held its data, too.
        assert_same(chief.take_grad(1), f32(1, 2, 3))


@pytest.mark.forges
@pytest.mark.usual(storage="buffered_parts")
def test_a_round_that_nobody_knows_any_more(chief, before_reading, client):
    """As after a restart from older data."""

    def forget():
        for key in client.scan_iter("*:part:*"):
            client.delete(key)
        client.delete("redisacc:{lost}:taken")

    before_reading(forget)
    with pytest.raises(redisacc.DataLossError, match="no longer lists the round of step 0"):
        chief.take_grad(1)


def test_a_deletion_between_two_reads_is_no_corruption(proxy, chief, heir):
    """The number of takes is read after the round was granted, by a command of its own."""
    proxy.before("HGET", heir.delete)
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        chief.take_grad(1)


def test_a_lost_copy_is_no_reason_to_keep_a_round_that_was_recovered(proxy, chief, heir, before_acknowledging):
    def recover():
        recovers(heir)
        proxy.cut_all()

    before_acknowledging(recover)
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient") as caught:
        chief.take_grad(1)
    lost(caught.value, "heir")


def test_a_deletion_after_a_lost_copy_is_said_in_the_log(proxy, chief, heir, before_acknowledging, caplog):
    def delete():
        heir.delete()
        proxy.cut_all()

    before_acknowledging(delete)
    with caplog.at_level(logging.WARNING, "redisacc"):
        assert_same(chief.take_grad(1), f32(1, 2, 3))
    (said,) = [record for record in caplog.records if "deleted before it was known whether round" in record.message]
    assert said.accumulator == "lost"
    assert said.token in said.message


@pytest.mark.forges
def test_garbage_among_the_recoveries(chief, heir, client):
    for step, entry in enumerate((b"", b"a b", b"a b x w", b"a b 99999999999999999999 w", b"\xff b 1 w")):
        taking = contextlib.ExitStack()
        taking.enter_context(chief.take(1))
        recovers(heir)
        client.lpush("redisacc:{lost}:recovered", entry)
        with pytest.raises(redisacc.CorruptDataError, match="the list holds"):
            taking.close()
        client.delete("redisacc:{lost}:recovered")
        chief.apply_grad(f32(1, 2, 3), step + 1)
    client.set("redisacc:{lost}:recovered", b"x")
    # It is refused before anything has changed.
    with pytest.raises(redisacc.CorruptDataError, match="another type"):
        recovers_in_the_block(chief, heir)
    (held,) = chief.info().unacknowledged
    assert held.taker == "chief"
