"""Rows of sums that have grown or shrunk: whoever reads one gets the right result or an error, never a wrong mean."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import redis
from support.selection import thorough

import redisacc
from redisacc._admin.rows import CurrentRows

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.forges]

SUMS = "redisacc:{w}:sums"
INDEX = (Path(__file__).parents[2] / "lua" / "inspect" / "index.lua").read_text()
# What grows into a row: zeros, what looks like a weight or a count, and what looks like the form with a weight.
FILLERS = [bytes(8), struct.pack("<d", 2.0), struct.pack("<2f", 1.5, 2.0), b"\x01" + bytes(7), b"\x01" * 8]
# Where bytes come or go: in the count, at the form, behind it, behind the weight, and at the end.
PLACES = [0, 1, 6, 7, 8, 16, None]
USUAL_BYTES = [1, 4, 8, 16, 32]

# Kind, what the accumulator is created with, and the gradients with their weights.
ONE, TWO, THREE = [2.0, -3.0, 0.5, 4.0], [1.0, 2.0, 3.0, 4.0], [-1.0, 0.0, 2.5, 8.0]
SPARSE = ([1, 5], [ONE, TWO]), ([5, 7], [THREE, ONE])
KINDS = {
    "dense": ("dense", {"dtype": "float32", "shape": [4]}, [(ONE,), (TWO,)]),
    "sparse": ("sparse", {"dtype": "float32", "shape": [9, 4]}, SPARSE),
    "sparse of doubles": ("sparse", {"dtype": "float64", "shape": [9, 4]}, SPARSE),
    "sparse of integers": ("sparse", {"dtype": "int32", "shape": [9, 1]}, [([1, 5], [[2], [3]]), ([5], [[4]])]),
}
CASES = [
    *((kind, (1, 1), "weights") for kind in KINDS),
    # The row of index 1 was written before a weight differed from 1.
    *((kind, (1, 2.5), "weights") for kind in KINDS if kind != "sparse of integers"),
    *((kind, (0.5, 2.5), normalize) for kind in ("dense", "sparse") for normalize in ("weights", "count")),
]
USUAL = [
    ("dense", (1, 1), "weights"),
    ("sparse", (1, 1), "weights"),
    ("sparse", (1, 2.5), "weights"),
    ("sparse", (0.5, 2.5), "count"),
]


def damaged(row, change):
    """The row with `change` bytes more, or less, at each place."""
    for place in PLACES:
        at = len(row) if place is None else place
        if change < 0 and place is None:
            yield row[:change]
        elif change < 0:
            yield row[:at] + row[at - change :]
        else:
            for filler in FILLERS:
                yield row[:at] + (filler * 4)[:change] + row[at:]


def same(left, right):
    """Whether two results, of arrays or texts, have the same bits."""
    if isinstance(left, str):
        return left == right
    return all(map(np.array_equal, left, right))


def peeked(acc):
    found = acc.peek().gradient
    return (found.indices, found.values) if isinstance(found, redisacc.IndexedSlices) else (found,)


def row_of(acc, index):
    found = CurrentRows(acc._transport, acc._keys).some([int(index)])
    return (found.indices, found.counts, found.sums, found.results)


def index_of(client, index):
    return b"\n".join(client.eval(INDEX, 1, "redisacc:{w}", index)).decode()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "weights", "normalize"), thorough(CASES, usual=USUAL))
def test_a_row_that_has_another_length(open_accumulator, real_client, everything, kind, weights, normalize):
    opened, schema, gradients = KINDS[kind]
    acc = open_accumulator(
        opened,
        *schema.values(),
        "w",
        redis=real_client,
        limits=redisacc.Limits(in_place=10**9),
        mean=redisacc.Mean(by=normalize),
    )
    for gradient, weight in zip(gradients, weights, strict=True):
        acc.apply_grad(*gradient, weight=weight)
    rows = real_client.hgetall(SUMS)
    rows.pop(b"total")
    wrong, tried = [], 0
    for field, row in rows.items():
        index = field.decode()
        readers = {"peek": lambda: peeked(acc)}
        if set(weights) == {1} and schema["dtype"] != "int32":
            # It leaves the others to `redisacc show`.
            readers["index.lua"] = lambda index=index: index_of(real_client, index)
        if opened == "sparse":
            readers["rows"] = lambda index=index: row_of(acc, index)
        right = {name: read() for name, read in readers.items()}
        again = gradients[0] if opened == "dense" else ([int(index)], [gradients[0][1][0]])
        for change in range(-32, 33) if everything else [s * n for n in USUAL_BYTES for s in (-1, 1)]:
            for other in set(damaged(row, change)) - {row}:
                real_client.hset(SUMS, field, other)
                tried += 1
                for name, read in readers.items():
                    try:
                        if not same(read(), right[name]):
                            wrong.append((name, index, change, other))
                    except (redisacc.CorruptDataError, redis.ResponseError):
                        pass
                # Adding to it must change nothing, unless the row is well-formed.
                try:
                    acc.apply_grad(*again)
                except redisacc.CorruptDataError:
                    assert real_client.hget(SUMS, field) == other
                else:
                    wrong.append(("apply", index, change, other))
                    break
                real_client.hset(SUMS, field, row)
    assert wrong == []
    assert tried > 100
    # What was tried has changed nothing.
    assert same(peeked(acc), right["peek"])


def test_a_take_of_a_row_that_has_grown_by_a_weight(open_sparse, real_client):
    """Its length was that of a row with a weight, and the mean was wrong."""
    acc = open_sparse("float32", [9, 2], "w", limits=redisacc.Limits(in_place=10**9))
    for _ in range(2):
        acc.apply_grad([1, 3], [[2.0, 2.0], [4.0, 4.0]])
    row = real_client.hget(SUMS, "3")
    real_client.hset(SUMS, "3", row + struct.pack("<2f", 1.0, 1.0))
    with pytest.raises(redisacc.CorruptDataError, match="a row has 24 bytes, which is not the length of its form"):
        acc.take_grad(1)
    (held,) = acc.info().unacknowledged
    real_client.hset(f"redisacc:{{w}}:taken:{held.token}:sums", "3", row)
    with acc.recover() as found:
        assert found.gradient.values.tolist() == [[2.0, 2.0], [4.0, 4.0]]
