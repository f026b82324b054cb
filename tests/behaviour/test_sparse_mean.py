"""What a sparse mean divides by: the gradients that held an index, or all gradients of the round."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import redisacc
from redisacc.cli import main

ROWS = [([1, 3], [[1.0], [3.0]]), ([3, 3], [[4.0], [1.0]]), ([], np.zeros((0, 1))), ([7], [[-8.0]])]


@pytest.mark.parametrize(("sparse_mean", "divisors"), [("index", (1, 2, 1)), ("round", (4, 4, 4))])
def test_the_divisor(open_sparse_stored, sparse_mean, divisors):
    for dtype in ("float32", "float16", "int32", "int64", "complex64"):
        acc = open_sparse_stored(dtype, [9, 1], mean=redisacc.Mean(rows=sparse_mean))
        for indices, values in ROWS:
            acc.apply_grad(np.array(indices, int), np.asarray(values).astype(acc.dtype))
        sums = np.array([1, 8, -8])
        expected = np.trunc(sums / divisors) if dtype.startswith("int") else sums / np.array(divisors)
        for gradient in (acc.peek().gradient, acc.take_indexed_slices_grad(4)):
            assert gradient.indices.tolist() == [1, 3, 7]
            assert gradient.values.ravel().tolist() == expected.astype(acc.dtype).tolist()


@pytest.mark.servers("fakeredis", "valkey")
def test_it_is_a_part_of_the_schema(open_sparse):
    acc = open_sparse("float32", [9, 1], "mean", mean=redisacc.Mean(rows="round"))
    assert acc.info().sparse_mean == "round"
    with pytest.raises(redisacc.InvalidArgumentError, match=r"its mean\.rows is round, not index"):
        open_sparse("float32", [9, 1], "mean")
    with pytest.raises(redisacc.InvalidArgumentError, match=r"mean\.rows must be 'index' or 'round', not 'rows'"):
        open_sparse("float32", [9, 1], mean=redisacc.Mean(rows="rows"))
    acc.delete()


@pytest.mark.servers("valkey")
def test_commands_know_it(open_sparse, real_server):
    acc = open_sparse("float32", [9, 1], "mean", mean=redisacc.Mean(rows="round"))
    acc.apply_grad([1], [[6.0]])
    acc.apply_grad([2], [[5.0]])
    shown = CliRunner().invoke(main, ["show", "mean", "--index", "1", "--redis", real_server.url, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["rows"][0]["mean"] == [3.0]
    assert (
        "divides by the gradients of the round"
        in CliRunner().invoke(main, ["show", "mean", "--redis", real_server.url]).output
    )
    taken = CliRunner().invoke(main, ["take", "mean", "1", "--discard", "--yes", "--redis", real_server.url])
    assert taken.exit_code == 0, taken.output
    acc.delete()
