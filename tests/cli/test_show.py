"""The command `show`: the record, workers and takers, and rows of the current round."""

import re

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.mark.usefixtures("nobody_is_late")
def test_show(cli, cli_json, open_sparse, background, until):
    ann, bob = (open_sparse("float32", [100, 2], "w", worker=name) for name in ("ann", "bob"))
    for acc in (ann, bob):
        acc.apply_grad([1], [[1, 2]])
    chief = open_sparse("float32", [100, 2], "w", worker="chief")
    left = chief.take(2)
    left.__enter__()
    big = open_sparse("float32", [100, 2], "w", worker="ann", limits=redisacc.Limits(in_place=0, inline=0))
    big.apply_grad([1, 7], [[1, 2], [3, 4]], local_step=1)
    take = background(chief.take_grad, 2, timeout=30)
    until(lambda: chief.info().waiting)
    said = cli("show", "w").stdout
    for pattern in (
        r"^w  sparse float32 \[100,2\] MEAN$",
        r"^  step +1$",
        r"^  this round +1 of 2 gradients, each \[2\]$",
        r"^  in total +3 applied, 0 stale, 0 repeated, 0 sent twice, 1 taken$",
        r"^  ann +1 +2 +0 +\d",
        r"^  bob +expected +1 +0 +\d",
        r"^  chief requires 2$",
        r"^  step 0, 2 gradients, .* ago by chief$",
        r"^    token \d{13}-[0-9a-f]{16}-\d+$",
        r"^  parts +1 +32 B$",
    ):
        assert re.search(pattern, said, re.MULTILINE), (pattern, said)
    assert max(map(len, said.splitlines())) <= 80
    facts = cli_json("show", "w")
    assert facts["expected"] == ["bob"]
    assert facts["unacknowledged"][0]["num_accumulated"] == 2
    assert facts["memory"]["parts"] == {"keys": 1, "bytes": 32}
    assert facts["shape"] == [100, 2]
    assert cli_json("show", chief.accumulator_ref)["name"] == "w"
    bob.apply_grad([1], [[1, 2]], local_step=1)
    take.result()
    with chief.recover():
        pass


def test_show_of_late_gradients(cli, cli_json, open_dense):
    acc = open_dense("float32", [1], "w", staleness=3)
    acc.set_global_step(5)
    assert re.search(r"^  late +in this round: none$", cli("show", "w").stdout, re.MULTILINE)
    for step in (5, 4, 2, 4):
        acc.apply_grad([1.0], step)
    said = cli("show", "w").stdout
    assert re.search(r"^  accepts +gradients up to 3 steps late$", said, re.MULTILINE)
    assert re.search(r"^  late +in this round: 1 by 0 steps, 2 by 1 step, 1 by 3 steps$", said, re.MULTILINE)
    facts = cli_json("show", "w")
    assert (facts["max_staleness"], facts["staleness"]) == (3, {"0": 1, "1": 2, "3": 1})


def test_rows_of_dense_ones(cli, cli_json, open_dense):
    acc = open_dense("float64", [3, 2], "w")
    assert cli_json("show", "w", "--index", 0)["rows"] == []
    acc.apply_grad([[1, 2], [30, 40], [np.nan, 1]])
    acc.apply_grad([[3, 2], [30, 40], [5, np.inf]])
    rows = cli_json("show", "w", "--index", 0, "--index", 1)["rows"]
    assert rows[0] == {"index": 0, "count": 2, "norm": pytest.approx(8**0.5), "sum": [4, 4], "mean": [2, 2]}
    assert cli_json("show", "w", "--index", 2)["rows"][0]["mean"] == ["nan", "inf"]
    said = cli("show", "w", "--index", 1, "--index", 9).stdout
    assert "row 1  in 2 gradients  norm 50\n  sum   60.0 80.0\n  mean  30.0 40.0\n" in said
    assert "row 9  in no gradient of this round" in said


def test_show_of_weights(cli, cli_json, open_dense, open_sparse, background, until):
    acc = open_dense(
        "float32", [1], "w", staleness=redisacc.Staleness(1, weight="inverse_sqrt"), mean=redisacc.Mean(by="count")
    )
    rows = open_sparse("float32", [9, 1], "rows", mean=redisacc.Mean(rows="round"))
    assert "divides by the gradients of the round, not by those that held an index" in cli("show", "rows").stdout
    rows.delete()
    acc.apply_grad([1.0])
    assert "in this round" not in re.sub(r"late .*", "", cli("show", "w").stdout)
    acc.apply_grad([1.0], weight=1.5)
    take = background(acc.take_grad, 1, min_weight=4, most=3, grace=2000, timeout=60)
    until(lambda: acc.info().waiting)
    said = cli("show", "w").stdout
    assert re.search(r"^  weight +2.5 in this round$", said, re.MULTILINE)
    assert re.search(r"^  weights +by staleness: inverse_sqrt$", said, re.MULTILINE)
    assert re.search(r"^  mean +divides by the number of gradients, whatever their weights$", said, re.MULTILINE)
    assert re.search(r" requires 1 with a weight of 4.0, or up to 3 within 2000 s$", said, re.MULTILINE)
    facts = cli_json("show", "w")
    assert (facts["total_weight"], facts["staleness_weight"], facts["normalize"]) == (2.5, "inverse_sqrt", "count")
    assert [facts["waiting"][0][name] for name in ("min_weight", "most", "grace")] == [4, 3, 2000]
    acc.apply_grad([1.0], weight=1.5)
    take.result()
    rows = open_sparse("float32", [9, 1], "s")
    rows.apply_grad([1, 2], [[1.0], [2.0]])
    rows.apply_grad([2], [[5.0]], weight=0.5)
    assert "row 2  in gradients with a weight of 1.5  norm 3\n" in cli("show", "s", "--index", 2).stdout
    assert cli_json("show", "s", "--index", 2)["rows"][0]["count"] == 1.5
