"""Parameters that are published as bfloat16: readers get them rounded, and nothing else changes."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import redisacc
from redisacc.cli import main

RECORD = "redisacc:{weights}:parameters"


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


@pytest.mark.every_server("redis62")
@pytest.mark.parametrize("rows", [3, 2000, 200_000])
def test_readers_get_rounded_values(open_parameters, client, rows):
    chief, reader = open_parameters(encoding="bfloat16"), open_parameters()
    tree = random_tree(1, rows)
    chief.publish(tree, 1, state=[tree["table"]])
    for handle in (reader, chief, open_parameters(encoding="float32")):
        step, found = handle.latest()
        assert step == 1
        assert_rounded(found, tree)
    # The state is as it was.
    np.testing.assert_array_equal(chief.latest_state()[1][0], tree["table"])
    assert client.hget(RECORD, "encoding") == b"bfloat16"
    size = sum(client.strlen(key) for key in client.scan_iter(f"{RECORD}:object:*-full:*"))
    assert size < 2.1 * 8 * rows + 200
    earlier = reader.latest()[1]
    tree["table"] = tree["table"] + 1
    chief.publish(tree, 2)
    assert_rounded(reader.wait(after=1)[1], tree)
    np.testing.assert_array_equal(earlier["table"], rounded(random_tree(1, rows)["table"]))


@pytest.mark.every_server("redis62")
@pytest.mark.fixed("partitions")
def test_changed_rows_are_rounded_too(open_parameters, client):
    chief, reader, late = open_parameters(encoding="bfloat16"), open_parameters(), open_parameters()
    tree = random_tree(2)
    chief.publish(tree, 0)
    rng = np.random.default_rng(3)
    held = []
    for step in range(1, 9):
        rows = rng.choice(2000, 20, replace=False)
        tree["table"][rows] *= np.float32(1.0001)
        tree["table"][rows[0]] = np.float32(step) / 3
        chief.publish(tree, step, changed={"table": rows, "wide": []})
        found = reader.latest()[1]
        assert_rounded(found, tree)
        held.append((found["table"], rounded(tree["table"])))
    # 20 rows of 8 elements: 8 bytes for an index, and 2 for each element.
    rows_blobs = list(client.scan_iter(f"{RECORD}:object:*-rows:*"))
    assert [client.strlen(key) for key in rows_blobs] == [20 * (8 + 16)] * len(rows_blobs)
    assert rows_blobs
    assert_rounded(late.latest()[1], tree)
    for found, expected in held:
        np.testing.assert_array_equal(found, expected)


def test_the_same_again_and_something_else(open_parameters):
    """What is the same after rounding is the same."""
    chief = open_parameters(encoding="bfloat16")
    tree = random_tree(4)
    chief.publish(tree, 1, state=[1])
    for encoding in ("bfloat16", None):
        other = open_parameters(encoding=encoding)
        other.publish(tree, 1, state=[1])
        other.publish({**tree, "bias": tree["bias"] * np.float32(1 + 1e-7)}, 1, state=[1])
        for changed in ({"bias": tree["bias"] * np.float32(1.1)}, {"wide": tree["wide"] + 1e-12}):
            with pytest.raises(redisacc.ConflictError, match=f"differs in the tree at '{next(iter(changed))}'"):
                other.publish({**tree, **changed}, 1, state=[1])
    assert chief.step() == 1


def test_a_record_without_the_field_is_float32(open_parameters, client):
    """As versions of redisacc wrote it that knew no encodings."""
    tree = random_tree(6)
    open_parameters().publish(tree, 1)
    client.hdel(RECORD, "encoding")
    np.testing.assert_array_equal(open_parameters().latest()[1]["table"], tree["table"])


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


def test_encodings_that_do_not_exist(open_parameters):
    for encoding in ("int8", "float16", "", 16, np.float32):
        with pytest.raises(
            redisacc.InvalidArgumentError, match="encoding of parameters must be one of float32, bfloat16, or None"
        ):
            open_parameters(encoding=encoding)


def test_info_show_and_pickle(real_server, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    with redisacc.Parameters("weights", encoding="bfloat16") as chief:
        chief.publish(random_tree(7), 1)
        said = CliRunner().invoke(main, ["show", "weights"]).stdout
        assert ", stored as bfloat16 where they are float32)" in said
        with pickle.loads(pickle.dumps(chief)) as copy:
            copy.publish(random_tree(8), 2)
        assert_rounded(chief.latest()[1], random_tree(8))
        assert CliRunner().invoke(main, ["rm", "weights", "--yes"]).exit_code == 0
