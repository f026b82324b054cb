"""The command `take`."""

import io
import os

import numpy as np
import pytest

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_take_into_npy(cli, cli_json, accumulator, tmp_path):
    accumulator.apply_grad([1, 2, 3])
    accumulator.apply_grad([3, 2, 1])
    said = cli_json("take", "w", 2, "-o", tmp_path / "g.npy")
    assert said == {
        "global_step": 0,
        "num_accumulated": 2,
        "total_weight": 2.0,
        "workers": {"ann": 2},
        "file": str(tmp_path / "g.npy"),
    }
    assert np.load(tmp_path / "g.npy").tolist() == [2, 2, 2]
    assert os.listdir(tmp_path) == ["g.npy"]
    accumulator.apply_grad([1, 2, 3], 1)
    found = cli("take", "w", 1, "-o", tmp_path / "g.npz")
    assert found.stdout == f"took the round of step 1 into {tmp_path}/g.npz: 1 gradient, from ann (1)\n"
    with np.load(tmp_path / "g.npz") as saved:
        assert saved["gradient"].tolist() == [1, 2, 3]
    assert accumulator.info().unacknowledged == []


def test_take_to_stdout(cli, accumulator):
    accumulator.apply_grad([1, 2, 3])
    found = cli("take", "w", 1, "-o", "-")
    assert np.load(io.BytesIO(found.stdout_bytes)).tolist() == [1, 2, 3]
    assert "took the round of step 0: 1 gradient" in found.stderr


def test_take_and_apply_sparse(cli, cli_json, open_sparse, tmp_path):
    acc = open_sparse("float32", [None, 2], "s", worker="ann")
    acc.apply_grad([4, 1], [[1, 2], [3, 4]])
    cli_json("take", "s", 1, "-o", tmp_path / "g.npz")
    with np.load(tmp_path / "g.npz") as file:
        saved = dict(file)
    assert {name: array.tolist() for name, array in saved.items()} == {
        "indices": [1, 4], "values": [[3, 4], [1, 2]], "shape": [-1, 2],
    }  # fmt: skip
    said = cli_json("apply", "s", tmp_path / "g.npz", "--worker", "bob")
    assert said == {"outcome": "applied", "local_step": 1, "global_step": 1, "num_accumulated": 1}
    assert acc.info().workers == {"bob": 1}
    assert acc.peek().gradient.indices.tolist() == [1, 4]


def test_take_times_out(cli, accumulator, tmp_path):
    accumulator.apply_grad([1, 2, 3])
    found = cli("take", "w", 2, "-o", tmp_path / "g.npy", "--timeout", "0.1")
    assert found.exit_code == 4
    assert "1 of 2 gradients had arrived at step 0; in the round: ann (1)" in found.stderr
    assert os.listdir(tmp_path) == []
    assert accumulator.num_accumulated() == 1


def test_a_take_that_cannot_write_takes_nothing_or_leaves_the_round(
    cli, accumulator, open_sparse, tmp_path, monkeypatch
):
    accumulator.apply_grad([1, 2, 3])
    sparse = open_sparse("float32", [3], "s")
    sparse.apply_grad([1], [1.0])
    for words in (
        ("w", 1), ("w", 1, "-o", tmp_path / "g.txt"), ("w", 1, "-o", tmp_path / "no" / "g.npy"),
        ("w", 1, "-o", tmp_path / "g.npy", "--discard"), ("s", 1, "-o", tmp_path / "g.npy"), ("w", 0, "--discard"),
    ):  # fmt: skip
        found = cli("take", *words)
        assert found.exit_code == 2
        both_or_neither = ("-o" in words) == ("--discard" in words)
        assert ("give either --output FILE or --discard" in found.stderr) == both_or_neither
    assert accumulator.num_accumulated() == sparse.num_accumulated() == 1

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        found = cli("take", "w", 1, "-o", tmp_path / "g.npy")
    said = f"redisacc: [Errno 28] No space left on device: '{tmp_path / 'g.npy'}'\n"
    assert (found.exit_code, found.stderr) == (1, said)
    assert os.listdir(tmp_path) == []
    (left,) = accumulator.info().unacknowledged
    assert left.token in cli("take", "w", "--recover").stdout
    assert cli("take", "w", "--recover", "-o", tmp_path / "g.npy", "--yes").exit_code == 0
    assert np.load(tmp_path / "g.npy").tolist() == [1, 2, 3]
    assert accumulator.info().unacknowledged == []


def test_a_discard_must_be_confirmed(cli, accumulator):
    accumulator.apply_grad([1, 2, 3])
    found = cli("take", "w", 1, "--discard")
    assert (found.exit_code, accumulator.num_accumulated()) == (2, 1)
    assert "--yes" in found.stderr
    found = cli("take", "w", 1, "--discard", "--yes")
    assert (found.exit_code, found.stdout) == (0, "discarded the round of step 0: 1 gradient, from ann (1)\n")
    assert accumulator.num_accumulated() == 0


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("output", ["g.npy", "-"])
def test_a_round_that_was_recovered_meanwhile_fails_and_names_the_file(
    cli, accumulator, proxy, tmp_path, monkeypatch, output
):
    accumulator.apply_grad([1, 2, 3])
    monkeypatch.chdir(tmp_path)

    def recover():
        with accumulator.recover() as found:
            assert found.num_accumulated == 1

    proxy.before("acknowledge", recover)
    found = cli("take", "w", 1, "-o", output, "--redis", proxy.where)
    assert found.exit_code == 1
    said = " ".join(found.stderr.split())
    assert "recover() gave it to 'ann'" in said
    assert ("Standard output" if output == "-" else "g.npy") + " has received it all the same" in said
    assert (tmp_path / "g.npy").exists() == (output != "-")


def test_recover(cli, cli_json, accumulator, tmp_path):
    assert cli("take", "w", "--recover").stderr == "every round that was taken has been acknowledged\n"
    for step in range(2):
        accumulator.apply_grad([step, 2, 3], step)
        accumulator.take(1).__enter__()
    listed = cli_json("take", "w", "--recover")
    assert [taken["global_step"] for taken in listed] == [0, 1]
    assert cli("take", "w", "--recover", "-o", tmp_path / "g.npy").exit_code == 2
    assert cli("take", "w", "--recover", "-o", tmp_path / "g.npy", "--token", "none", "--yes").exit_code == 1
    said = cli_json("take", "w", "--recover", "-o", tmp_path / "g.npy", "--token", listed[1]["token"], "--yes")
    assert said["global_step"] == 1
    assert np.load(tmp_path / "g.npy").tolist() == [1, 2, 3]
    found = cli("take", "w", "--recover", "--discard", "--yes")
    assert "discarded the round of step 0: 1 gradient, from ann (1)" in found.stdout
    assert cli("take", "w", "--recover", "--discard", "--yes").exit_code == 1
