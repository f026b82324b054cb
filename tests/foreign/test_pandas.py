"""Columns of pandas as gradients: a missing value is an error, and NaN is a number."""

import numpy as np
import pandas
import pytest

import redisacc

COLUMNS = {
    "Int64": pandas.array([1, None, 1], dtype="Int64"),
    "Float32": pandas.Series([1, None, 1], dtype="Float32"),
    "table": pandas.DataFrame({"a": pandas.Series([1, None, 1], dtype="Int64")}),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_missing_values(open_dense, open_sparse, column):
    with pytest.raises(redisacc.InvalidArgumentError, match=r"missing values .*: fill them first"):
        open_dense(np.float32, None, "dense").apply_grad(column)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"grad_indices.*missing values"):
        open_sparse(np.float32, None, "sparse").apply_grad(column, np.ones((3, 2)))


def test_columns_without_missing_values(open_dense):
    acc = open_dense(np.float32, [3], "dense")
    assert acc.apply_grad(pandas.Series([1.0, np.nan, 2.0], dtype="float32"))
    assert acc.apply_grad(pandas.Series([1, 2, 3], dtype="Int64").astype("Float32"))
    assert np.array_equal(acc.take_grad(2), np.array([1, np.nan, 2.5], np.float32), equal_nan=True)
