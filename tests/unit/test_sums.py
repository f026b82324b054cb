"""Adding up in numpy: the same, bit for bit, however the gradients are grouped."""

import numpy as np
import pytest
from support.rows import every_row

from redisacc._arrays import sums as _totals
from redisacc._arrays.dtypes import find_dtype
from redisacc._arrays.gradient import Section
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.sums import SparseSum
from redisacc._format import in_place
from redisacc.errors import CorruptDataError


def sequential(gradients, dtype):
    """Adds row by row, in order: the obvious way."""
    rows = {}
    counts = {}
    for gradient in gradients:
        for index, row in zip(gradient.indices.tolist(), gradient.values, strict=True):
            rows[index] = rows[index] + row.astype(dtype) if index in rows else row.astype(dtype)
            counts[index] = counts.get(index, 0) + 1
    indices = sorted(rows)
    return (
        np.array(indices, np.int64),
        np.array([rows[i] for i in indices], dtype).reshape(len(indices), *gradients[0].values.shape[1:]),
        np.array([counts[i] for i in indices], np.uint64),
    )


def random_gradients(rng, name, kind):
    dtype = find_dtype(name).storage
    gradients = []
    for k in range(40):
        number = int(rng.integers(0, 30))
        if kind == "identical":
            indices = np.arange(0, 60, 2)
        elif kind == "disjoint":
            indices = np.arange(number) * 40 + k
        else:
            indices = np.sort(rng.choice(100, number, replace=False))
        values = (rng.standard_normal((len(indices), 3)) * 10.0 ** rng.integers(-3, 3)).astype(dtype)
        values[rng.random(values.shape) < 0.2] = -0.0
        gradients.append(Section(values, indices.astype(np.int64)))
    return gradients


@pytest.mark.slow(keep="float32|bfloat16|int8")
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int8", "uint64", "complex64"])
@every_row("kind", ["identical", "disjoint", "random"])
@every_row("window", [0, 1000, 10**9])
@every_row("table", [0, 10**9])
def test_sparse_sums(name, kind, window, table, monkeypatch):
    monkeypatch.setattr(_totals, "WINDOW_BYTES", window)
    monkeypatch.setattr(_totals, "DENSE_UNION", table)
    dtype = find_dtype(name)
    rng = np.random.default_rng(7)
    gradients = random_gradients(rng, name, kind)
    total = SparseSum(dtype, (3,), bound=10_000, where="here")
    compacted = SparseSum(dtype, (3,), bound=10_000, where="here")
    for k, gradient in enumerate(gradients):
        before = gradient.values.copy()
        total.add(gradient)
        compacted.add(gradient)
        if k == 20:
            # As when a client compacts: the sum so far is one gradient.
            whole = compacted.sum()
            compacted = SparseSum(dtype, (3,), bound=10_000, where="here")
            compacted.add(whole)
        # The caller's memory stays as it is.
        assert before.tobytes() == gradient.values.tobytes()
    indices, values, counts = sequential(gradients, dtype.sum)
    for each in (total, compacted):
        whole = each.sum()
        np.testing.assert_array_equal(whole.indices, indices)
        assert whole.values.tobytes() == values.tobytes()
        np.testing.assert_array_equal(whole.counts, counts)


# What is said in total, the size and the length of a chunk; and of each chunk its number, the gradients in it, its
# elements, and the sum of their weights.
NO_SUMS = [
    (b"2 4", 8, 4, (0, 2, 4, 0), (2, 2, 4, 0)),
    (b"2 4", 8, 4, (1, 2, 4, 0), (2, 2, 4, 0)),
    (b"2 4", 8, 4, (0, 2, 4, 0), (1, 1, 4, 0)),
    (b"2 4", 8, 4, (0, 1, 4, 0), (1, 1, 4, 0)),
    (b"2 4", 7, 4, (0, 2, 4, 0), (1, 2, 4, 0)),
    (b"2 4", 7, 4, (0, 2, 4, 0), (1, 2, 2, 0)),
    (b"2 4 3", 8, 4, (0, 2, 4, 0), (1, 2, 4, 3)),
    (b"2 4 3", 8, 4, (0, 2, 4, 3), (1, 2, 4, 2.5)),
    (b"2 4", 8, 4, (0, 2, 4, 3), (1, 2, 4, 3)),
    (b"2 4", 10**15 + 1, 10**15, (0, 2, 4, 0), (1, 2, 4, 0)),
    (b"2 2", 0, 4, (0, 2, 4, 0)),
    (b"2 0", 4, 4),
]


@every_row("row", NO_SUMS)
def test_chunks_that_are_no_dense_sum(row):
    total, size, chunk, *chunks = row
    spec = AccumulatorSpec.of_array("dense", find_dtype("float32"), None, reduction_type="SUM", chunk=chunk)
    fields = {b"total": total}
    for place, number, elements, weight in chunks:
        head = number.to_bytes(7 if weight else 8, "little")
        weights = b"\x01" + np.float64(weight).tobytes() if weight else b""
        fields[b"%d" % place] = head + weights + np.ones(elements, "<f4").tobytes()
    with pytest.raises(CorruptDataError, match="sums"):
        in_place.unpack(fields, spec, (size,), "sums")


def test_gradients_without_rows_cost_the_other_one_no_copy():
    total = SparseSum(find_dtype("float32"), (1,), bound=None, where="here")
    values, indices = np.ones((3, 1), np.float32), np.arange(3)
    for section in (
        Section(np.empty((0, 1), np.float32), np.empty(0, np.int64)),
        Section(values, indices, ours=True),
    ):
        total.add(section)
    assert np.shares_memory(total.sum().values, values)
