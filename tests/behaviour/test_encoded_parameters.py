"""Parameters that are published as bfloat16: readers get them rounded, and nothing else changes."""

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import redisacc
from redisacc.tools.cli import main


def rounded(values):
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)


def random_tree(seed, rows=2000):
    rng = np.random.default_rng(seed)
    return {
        "table": rng.standard_normal((rows, 8)).astype(np.float32),
        "bias": rng.standard_normal(3).astype(np.float32),
        "wide": rng.standard_normal(7),
        "on": np.array([True, False, True]),
        "count": np.int64(3),
    }


def assert_rounded(found, tree):
    for name in tree:
        expected = rounded(tree[name]) if np.asarray(tree[name]).dtype == np.float32 else tree[name]
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype == np.asarray(tree[name]).dtype
        assert not found[name].flags.writeable


@pytest.mark.fixed("partitions")
def test_only_rows_that_changed_are_uploaded(open_parameters, client):
    chief = open_parameters(encoding="bfloat16")
    table = np.ones((2000, 8), np.float32)
    for step in range(3):
        table[step] = step / 3
        chief.publish(table, step, changed={".": [step]} if step else None)
    # A row of 8 elements: 8 bytes for its index, and 2 for each element.
    blobs = list(client.scan_iter("redisacc:{weights}:parameters:object:*-rows:*"))
    assert [client.strlen(key) for key in blobs] == [8 + 16] * 2
    np.testing.assert_array_equal(open_parameters().latest()[1], rounded(table))


def test_what_is_not_finite_survives(open_parameters):
    chief = open_parameters(encoding="bfloat16")
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, np.finfo(np.float32).max], np.float32)
    chief.publish(values, 1)
    found = open_parameters().latest()[1]
    np.testing.assert_array_equal(found, rounded(values))
    assert np.signbit(found[3])
    # Beyond the largest bfloat16, the nearest is infinity.
    assert found[5] == np.inf
    chief.publish(values, 1)


def test_info_and_show(real_server, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    with redisacc.Parameters("weights", encoding="bfloat16") as chief:
        chief.publish(random_tree(7), 1)
        said = CliRunner().invoke(main, ["show", "weights"]).stdout
        assert ", stored as bfloat16 where they are float32)" in said
        assert CliRunner().invoke(main, ["rm", "weights", "--yes"]).exit_code == 0
