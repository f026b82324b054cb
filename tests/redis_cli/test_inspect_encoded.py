"""index.lua and `redisacc show` read encoded gradients, and print what peek() returns."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from redis.exceptions import ResponseError

import redisacc
from redisacc._format import buffered as buffered_format
from redisacc._redis import script_loader
from redisacc.cli import main

pytestmark = pytest.mark.servers("valkey", "redis62")

SCRIPT = (script_loader.folder() / "inspect" / "index.lua").read_text()
WIRES = ("int8", "bfloat16", "float32", "int8")


def shown(client, acc, *args):
    lines = [line.decode() for line in client.eval(SCRIPT, 1, acc.accumulator_ref, *args)]
    return dict(line.partition(" ")[::2] for line in lines)


def same(said, expected):
    return np.array_equal(np.array(said["sum"].split(), np.float32), np.asarray(expected).reshape(-1))


@pytest.fixture
def rows_of(real_server, monkeypatch):
    """The rows that `redisacc show` prints."""
    monkeypatch.setenv("REDISACC_URL", real_server.url)

    def rows(*words):
        result = CliRunner().invoke(main, ["show", "w", *map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["rows"]

    return rows


@pytest.fixture(params=["inline", "parts", "many parts"])
def stored(request, monkeypatch):
    monkeypatch.setattr(buffered_format, "INLINE_BYTES", 2**20 if request.param == "inline" else 0)
    if request.param == "many parts":
        monkeypatch.setattr(buffered_format, "PART_SIZES", (520,))


@pytest.mark.usefixtures("stored")
def test_dense(client, open_dense):
    acc = open_dense("float32", [700], "w", reduction_type="SUM", in_place_limit=0)
    rng = np.random.default_rng(1)
    for wire in WIRES:
        acc.apply_grad(rng.normal(size=700), wire=wire)
    look = acc.peek().gradient
    for start in (0, 255, 256, 511, 699):
        assert same(shown(client, acc, start), look[start])
    assert same(shown(client, acc, "", 700), look)
    acc.delete()


@pytest.mark.usefixtures("stored")
def test_sparse(client, open_sparse, rows_of):
    acc = open_sparse("float32", [90, 5, 20], "w", reduction_type="SUM", in_place_limit=0)
    rng = np.random.default_rng(2)
    for wire in WIRES:
        acc.apply_grad(np.sort(rng.choice(90, 40, replace=False)), rng.normal(size=(40, 5, 20)), wire=wire)
    look = acc.peek().gradient
    wanted = look.indices[[0, 3, 17, len(look.indices) - 1]].tolist()
    rows = rows_of(*[word for index in wanted for word in ("--index", index)])
    for index, row in zip(wanted, rows, strict=True):
        expected = look.values[look.indices.tolist().index(index)]
        assert same(shown(client, acc, index, 100), expected)
        assert same(shown(client, acc, f"{index},4", 20), expected[4])
        assert (row["index"], np.array_equal(np.array(row["sum"], np.float32).reshape(5, 20), expected)) == (
            index,
            True,
        )
    acc.delete()


@pytest.mark.usefixtures("stored")
def test_trees(client, open_tree, rows_of):
    spec = {"a": ("float32", (300,)), "b": ("float32", (9, 40)), "s": redisacc.Sparse("float32", (30, 50))}
    acc = open_tree(spec, "w", reduction_type="SUM", missing="skip", in_place_limit=0)
    rng = np.random.default_rng(3)
    for wire in WIRES:
        rows = [1, 7, 8, 20, 21, 29], rng.normal(size=(6, 50))
        acc.apply_grad({"a": rng.normal(size=300), "b": rng.normal(size=(9, 40)), "s": rows}, wire=wire)
    look = acc.peek().gradient
    assert same(shown(client, acc, "b", 8, 40), look["b"][8])
    assert same(shown(client, acc, "a", "", 300), look["a"])
    assert same(shown(client, acc, "s", 21, 50), look["s"].values[4])
    found = rows_of("--leaf", "b", "--top", 9)
    assert np.array_equal(
        np.array([row["sum"] for row in sorted(found, key=lambda row: row["index"])], np.float32), look["b"]
    )
    acc.delete()


@pytest.mark.forges
def test_scales_that_redisacc_did_not_write(client, open_dense):
    acc = open_dense("float32", [700], "w", in_place_limit=0, wire="int8")
    acc.apply_grad(np.ones(700))
    ((identity, data),) = client.hgetall("redisacc:{w}:inline").items()
    for scale in (-1.0, np.nan, np.inf):
        client.hset("redisacc:{w}:inline", identity, data[:260] + np.float32(scale).tobytes() + data[264:])
        assert shown(client, acc, 255)["sum"] == "1"
        with pytest.raises(ResponseError, match=r"has a block whose scale is .*, so redisacc did not write it"):
            shown(client, acc, 256)
