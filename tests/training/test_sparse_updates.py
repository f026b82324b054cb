"""Tables, whose gradients are rows, are updated row by row, with the bits of a plain local loop."""

import functools
from collections import Counter
from itertools import product

import numpy as np
import pytest
from support.leaks import leftovers
from support.local_updates import LocalTraining, differences, gradient_of, state_of
from support.selection import thorough
from test_updates import SPARSE, updated, with_tables

import redisacc
from redisacc.optim import SGD, Adam, AdamW

__all__ = ["updated"]

pytestmark = pytest.mark.servers("valkey")


def blobs(client, field="full"):
    """Returns the blobs of a field of the record: the id of each, its step, and what else there is."""
    return [text.split(":") for text in client.hget("redisacc:{train}:parameters", field).decode().split()]


@pytest.mark.slow(keep="bfloat16")
@pytest.mark.parametrize(
    ("encoding", "partitions"),
    thorough(list(product([None, "bfloat16"], [None, 3])), usual=[(None, None), ("bfloat16", 3)]),
)
def test_versions_bring_rows_for_many_steps(updated, until, partitions, encoding):
    """Full blobs stay until the rows since then are half as large. Chiefs that change and late readers read both."""
    one = updated(
        AdamW(0.01, ema=0.9), with_tables(400, rows=1000), sparse=SPARSE, partitions=partitions, encoding=encoding
    )
    client = one.training.client
    late = redisacc.Parameters("train", redis=client)
    full, longest, readers = Counter(), 0, []
    for last in (3, 4, 9, 14):
        one.work()
        for step in one.chief.updates(until=last):
            ((blob, begun, *_),) = blobs(client)[1:]
            full[blob] += 1
            longest = max(longest, len(blobs(client, "rows")))
            if int(begun) == step:
                # State of rows is only kept since then.
                assert not any("kept_rows" in blob for blob, *_ in blobs(client, "slots"))
            if step % 6 == 1:
                readers.append(late.latest())
        one.join()
        one.check(last)
        assert leftovers(client) == []
        one.chief.close()
        one.open(one.local.optimizer)
    # The first, and some later ones that took its place.
    assert 2 <= len(full) <= 5
    assert longest >= 4
    assert [step for step, _ in readers] == [1, 7, 13]
    expected = late.latest()[1]
    fresh = redisacc.Parameters("train", redis=client).latest()[1]
    assert {path: leaf.tobytes() for path, leaf in fresh.items()} == {p: leaf.tobytes() for p, leaf in expected.items()}


@pytest.mark.slow(keep="sgd")
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize(
    "model",
    [
        {"a": np.ones((50, 2), np.float32), "b": np.ones((9, 3))},
        {"a": np.zeros((0, 2)), "b": np.zeros((3, 0), np.float32), "c": np.ones(2)},
    ],
    ids=["tables only", "empty tables"],
)
@pytest.mark.parametrize("optimizer", [SGD(0.1), AdamW(0.01, ema=0.99, clip_norm=1.0)], ids=["sgd", "adamw ema"])
def test_trees_without_dense_leaves(updated, optimizer, model, partitions):
    updated(optimizer, model, sparse=("a", "b"), partitions=partitions, weights=(1.0,)).run(4)


def test_rows_of_a_table_that_was_brought_whole_since(training):
    """Rows blobs have rows of several tables. Those of before are not written over it."""
    begin = {"often": np.ones((50, 2), np.float32), "rarely": np.ones((900, 4), np.float32), "w": np.ones(2)}
    rows = {"often": [[1, 2], range(50), [3]], "rarely": [[5], [6], [7]]}

    def compute(number, step, parameters):
        found = {"w": parameters["w"] * 0.5}
        for path, every in rows.items():
            at = np.array(every[step % 3], np.int64)
            found[path] = redisacc.IndexedSlices((parameters[path][at] + step + 0.1).astype(np.float32), at)
        return found

    optimizer = Adam(0.1)
    options = {"optimizer": optimizer, "sparse": ["often", "rarely"], "reduction_type": "MEAN"}
    worker = training.work(gradient=compute)
    for until in (2, 3):
        # A new chief reads the tables.
        with training.chief(begin, **options) as chief:
            for step in chief.updates():
                if step == until:
                    break
            local = LocalTraining(optimizer, begin, gradient=compute).train(until)
            assert differences(local, chief.latest()[1], state_of(chief)) == []
            assert [leaves for _, _, _, leaves, *_ in blobs(training.client)] == ["2", "0-1", "0"]
            if until == 3:
                chief.finish()
    worker.result(20)


@pytest.mark.slow(keep="3]")
@pytest.mark.parametrize("partitions", [None, 3])
def test_leaves_that_become_sparse_and_dense_again(updated, partitions):
    """After the gradients were deleted, a chief may begin with others. Weights and state stay."""
    one = updated(AdamW(0.01, ema=0.9), with_tables(400), sparse=SPARSE, partitions=partitions)
    one.run(2)
    how = {"reduction_type": "MEAN", "partitions": partitions}
    before = SPARSE
    for last, sparse in ((4, ()), (6, SPARSE[:1]), (8, SPARSE)):
        one.training.gradients(one.parameters, sparse=before, **how).delete()
        one.chief.close()
        one.gradient = one.local._gradient = functools.partial(gradient_of, sparse=sparse)
        one.open(one.local.optimizer, sparse=sparse)
        one.training.gradients(one.parameters, sparse=sparse, **how).set_global_step(one.chief.step)
        one.run(last)
        assert len(blobs(one.training.client)) == 1 + bool(sparse)
        before = sparse
    assert leftovers(one.training.client) == []


def test_a_part_of_a_table_that_a_node_has_lost(updated):
    """A chief that has the tables brings them whole with the next version; one that has not says what is lost."""
    one = updated(Adam(0.01), with_tables(400, rows=1000), sparse=SPARSE, partitions=3)
    client = one.training.client

    def full():
        blob, step, *_ = blobs(client)[1]
        return blob, int(step)

    def lose(blob):
        assert client.delete(*client.keys(f"redisacc:{{train/*:{blob}:0"))

    def seen(step):
        blob, begun = full()
        # Workers have read the full blobs of step 3 by step 4.
        if step in (2, 4):
            lose(blob.replace("-full", "-kept_full") if step == 2 else blob)
        assert begun == (0 if step < 3 else 3 if step < 5 else 5)

    one.run(6, seen)
    lose(full()[0])
    one.chief.close()
    with pytest.raises(redisacc.DataLossError, match="the server has lost step 6, and this process lacks the tables"):
        one.open(one.local.optimizer)
    one.training.client.flushall()
