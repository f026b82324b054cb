"""A training continues with another optimizer, between updates() and rounds(), and to a higher step."""

from itertools import product

import numpy as np
import pytest
from support.selection import thorough
from test_updates import SIZES, model_of, updated

import redisacc
from redisacc.optim import SGD, Adam, AdamW

__all__ = ["updated"]

pytestmark = pytest.mark.servers("valkey")

ENCODINGS = (None, "bfloat16")
STORED = thorough(
    list(product(["inline", "several parts"], [None, 3], ENCODINGS)),
    usual=[("inline", None, None), ("several parts", None, "bfloat16"), ("several parts", 3, None)],
)


def lead(one, optimizer, until, **options):
    """Lets another chief lead up to a step. Returns the training in memory that it continues with."""
    one.chief.close()
    one.local.optimizer = optimizer
    one.open(optimizer, **options)
    one.work()
    one.lead(until)
    one.join()


@pytest.mark.slow(keep="inline")
@pytest.mark.parametrize(("size", "partitions", "encoding"), STORED)
def test_an_optimizer_with_the_same_slots_continues_with_the_state(updated, size, partitions, encoding):
    one = updated(Adam(0.01), model_of(SIZES[size]), partitions=partitions, encoding=encoding)
    one.run(2)
    for until, optimizer in ((4, AdamW(lambda step: 0.1 / (step + 1))), (5, Adam(0.01)), (6, Adam(0.01))):
        lead(one, optimizer, until)
        one.check(until)


@pytest.mark.slow(keep="inline")
@pytest.mark.parametrize(("size", "partitions", "encoding"), STORED)
def test_an_optimizer_with_other_slots_keeps_the_weights(updated, size, partitions, encoding):
    one = updated(Adam(0.01), model_of(SIZES[size]), partitions=partitions, encoding=encoding)
    one.run(2)
    for until, optimizer in ((4, SGD(0.1, momentum=0.9)), (6, AdamW(0.01, ema=0.5))):
        one.local.state = {
            slot: {path: optimizer.initial(slot, values) for path, values in one.local.parameters.items()}
            for slot in optimizer.slots
        }
        one.local.updates = 0
        lead(one, optimizer, until)
        one.check(until)


@pytest.mark.slow(keep="inline")
@pytest.mark.parametrize(
    ("size", "partitions", "encodings"),
    thorough(
        list(product(["inline", "several parts"], [None, 3], product(ENCODINGS, ENCODINGS))),
        usual=[
            ("inline", None, (None, "bfloat16")),
            ("several parts", None, ("bfloat16", None)),
            ("several parts", 3, (None, None)),
            ("several parts", 3, ("bfloat16", "bfloat16")),
        ],
    ),
)
def test_from_updates_to_rounds_and_back(updated, size, partitions, encodings):
    """The weights are kept exactly."""
    first, second = encodings
    optimizer = AdamW(0.01)
    one = updated(optimizer, model_of(SIZES[size]), partitions=partitions, encoding=first)
    one.run(2)
    one.chief.close()
    chief = one.training.chief(one.parameters, **{**one.options, "encoding": second})
    assert chief.step == 2
    found = {path: values.tobytes() for path, values in chief.parameters.items()}
    assert found == {path: values.tobytes() for path, values in one.local.parameters.items()}
    one.local._encoding = second
    one.work()
    for taken in chief.rounds(until=4):
        chief.publish({path: values - taken.gradient[path] for path, values in chief.parameters.items()})
    one.join()
    exact = {path: np.array(values) for path, values in chief.parameters.items()}
    chief.close()
    one.local.parameters = exact
    one.local.state = {
        slot: {path: optimizer.initial(slot, values) for path, values in exact.items()} for slot in optimizer.slots
    }
    one.local.step, one.local.updates = 4, 0
    one.options["encoding"] = second
    one.open(optimizer)
    one.work()
    one.lead(6)
    one.join()
    one.check(6)


def test_a_training_that_is_deleted_under_its_chief(updated, until):
    one = updated(Adam(0.01), model_of(SIZES["several parts"]))
    deleted = []

    def delete(number, step):
        if step == 1 and not deleted:
            deleted.append(number)
            redisacc.Parameters("train", redis=one.training.client).delete()
            one.training.gradients(one.parameters, reduction_type="MEAN").delete()

    one.work(delete)
    with pytest.raises(redisacc.NotFoundError):
        one.lead(5)
    for worker in one.crew:
        with pytest.raises(redisacc.NotFoundError):
            worker.result(30)
    assert [key for key in one.training.client.scan_iter("*train*") if one.training.client.pttl(key) == -1] == []
