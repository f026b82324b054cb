"""Sums of a training follow the numbers of its workers, unless it has begun otherwise."""

import pytest

import redisacc

RECORD = "redisacc:{train}"


def order_of(training):
    return (training.client.hget(RECORD, "order") or b"arrival").decode()


def test_a_new_training_follows_the_numbers(training):
    training.chief()
    assert order_of(training) == "worker"


@pytest.mark.parametrize("order", ["arrival", "worker"])
def test_an_existing_training_keeps_its_order(training, order):
    first = training.chief(order=order)
    assert order_of(training) == order
    first.close()
    second = training.chief()
    assert order_of(training) == order
    training.work()
    training.lead(second, until=2)
    second.close()
    with pytest.raises(redisacc.InvalidArgumentError, match=f"its order is {order}"):
        training.chief(order="worker" if order == "arrival" else "arrival")
    training.chief(order=order)


def test_a_training_of_an_earlier_version_continues(training):
    """Its record lacks the field."""
    first = training.chief(order="arrival")
    assert training.client.hget(RECORD, "order") is None
    first.close()
    second = training.chief()
    training.work()
    training.lead(second, until=1)
    assert order_of(training) == "arrival"


def test_a_training_that_is_being_deleted_is_no_existing_one(training):
    training.chief(order="arrival").close()
    incarnation = training.client.hget(RECORD, "incarnation")
    # As if somebody had died while deleting it.
    training.client.hset(RECORD, "incarnation", b"deleted:" + incarnation)
    training.chief()
    assert order_of(training) == "worker"


def test_another_order_is_refused(training):
    with pytest.raises(redisacc.InvalidArgumentError, match="order must be 'arrival' or 'worker', not 'number'"):
        training.chief(order="number")
    assert not training.client.exists(RECORD)
