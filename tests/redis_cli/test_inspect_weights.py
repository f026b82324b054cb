"""The scripts of lua/inspect and weights: they print what peek() returns."""

from __future__ import annotations

import numpy as np
import pytest
from support.selection import thorough
from test_inspect_scripts import index_of, numbers, run, same
from test_inspect_trees import STORED

import redisacc
from redisacc._format import buffered as buffered_format

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")

SPEC = {
    "a": ("float32", (3, 2)),
    "c": ("complex64", (2,)),
    "d": ("float64", (40,)),
    "embed": redisacc.Sparse("float32", (20, 2)),
    "half": redisacc.Sparse("bfloat16", (None,)),
}
WEIGHTS = [1.0, 0.3, 1.0, 17.0, 1e-3]


def random_tree(rng):
    """Leaves of random numbers, of which some are missing."""

    def rows(size, *row):
        indices = np.sort(rng.choice(12, rng.integers(0, size), replace=False))
        return indices, rng.normal(size=(len(indices), *row))

    tree = {
        "a": rng.normal(size=(3, 2)),
        "c": rng.normal(size=2) + 1j * rng.normal(size=2),
        "d": rng.normal(size=40),
        "embed": rows(9, 2),
        "half": rows(9),
    }
    return {path: None if rng.random() < 0.3 else leaf for path, leaf in tree.items()}


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("stored", thorough(STORED, usual=["in place", "compacted parts", "mixed"]))
@pytest.mark.parametrize("normalize", ["weights", "count"])
@pytest.mark.parametrize(("missing", "sparse_mean"), [("skip", "index"), ("zero", "round")])
def test_a_leaf_equals_peek(client, open_tree, monkeypatch, stored, normalize, missing, sparse_mean):
    limits, inline, compacted = STORED[stored]
    monkeypatch.setattr(buffered_format, "INLINE_BYTES", inline)
    options = {"missing": missing, "sparse_mean": sparse_mean, "normalize": normalize}
    options["buffer_limit"] = 3000 if compacted else 2**30
    accs = [open_tree(SPEC, "model", in_place_limit=limit, **options) for limit in limits]
    rng = np.random.default_rng([*stored.encode()])
    for number in range(12):
        accs[number % len(accs)].apply_grad(random_tree(rng), weight=WEIGHTS[number % len(WEIGHTS)])
    acc = accs[0]
    look = acc.peek().gradient
    for path in ("a", "c", "d"):
        said = index_of(client, acc, path, "", 1000)
        assert ("weight" in said) == (normalize == "weights")
        assert same(numbers(said["mean"], look[path].dtype.name), look[path].reshape(-1)), (path, said)
    for path in ("embed", "half"):
        held = look[path]
        assert len(held.indices) > 3
        for index, expected in list(zip(held.indices, held.values, strict=True))[::3]:
            said = index_of(client, acc, path, int(index))
            assert same(numbers(said["mean"], expected.dtype.name), expected.reshape(-1)), (path, index, said)
    acc.delete()


def test_the_summary_says_the_weights(client, open_dense, background, until):
    acc = open_dense("float32", [1], "w", max_staleness=1, staleness_weight=[1, 0.5], normalize="count", worker="ann")
    acc.set_global_step(1)
    acc.apply_grad([1.0], 1)
    acc.apply_grad([1.0], 0, weight=3)
    take = background(acc.take_grad, 2, min_weight=4.5, up_to=3, grace=0)
    until(lambda: acc.info().waiting)
    said = run(client, "summary", acc.accumulator_ref)
    assert said[0] == "redisacc:{w}: dense float32 [1] MEAN by the number of the gradients"
    assert said[1] == "step 1, 2 gradients in this round with a weight of 2.5 of shape [1]"
    assert "weights by staleness: 1,0.5" in said
    assert "  2 of 2 with a weight of 4.5: ann" in said
    acc.apply_grad([1.0], 1, weight=2)
    take.result()
    acc.apply_grad([1.0], 2, weight=7)
    with acc.take(1):
        assert any(line.startswith("  step 2 with 1 gradients of weight 7, granted") for line in run(
            client, "summary", acc.accumulator_ref
        ))  # fmt: skip
