"""The command `apply`."""

import io
import os
import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_apply(cli, cli_json, accumulator, tmp_path):
    np.save(tmp_path / "g.npy", np.array([1.0, 2, 3], np.float32))
    accumulator.set_global_step(7)
    assert cli("apply", "w", tmp_path / "g.npy").stdout == "applied: step 7, 1 gradient in the round\n"
    found = cli("apply", "w", tmp_path / "g.npy", "--local-step", 6)
    assert found.exit_code == 5
    assert found.stderr == "redisacc: the gradient was dropped: it is for step 6, and the step is 7\n"
    assert cli("apply", "w", "-", input=(tmp_path / "g.npy").read_bytes()).exit_code == 0
    np.savez(tmp_path / "g.npz", gradient=np.ones(3, np.float32))
    assert cli_json("apply", "w", tmp_path / "g.npz")["num_accumulated"] == 3


def test_apply_refuses_other_files(cli, accumulator, tmp_path):
    def file(data):
        (tmp_path / "x").write_bytes(data)
        return tmp_path / "x"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()]), allow_pickle=True)
    two = io.BytesIO()
    np.savez(two, gradient=np.ones(3), other=np.ones(3))
    sparse = io.BytesIO()
    np.savez(sparse, indices=[1], values=[1.0])
    half = two.getvalue()[:-50]
    for data in (b"", b"text", pickle.dumps(Evil()), buffer.getvalue(), two.getvalue(), sparse.getvalue(), half):
        assert cli("apply", "w", file(data)).exit_code == 2
    np.save(tmp_path / "wrong.npy", np.ones(4))
    assert cli("apply", "w", tmp_path / "wrong.npy").exit_code == 2
    assert cli("apply", "w", tmp_path / "nowhere").exit_code == 2
    assert not (tmp_path / "executed").exists()
    assert accumulator.num_accumulated() == 0


def test_apply_and_take_with_weights(cli, cli_json, accumulator, tmp_path):
    np.save(tmp_path / "g.npy", np.array([1.0, 2, 3], np.float32))
    assert cli("apply", "w", tmp_path / "g.npy", "--weight", 2.5).exit_code == 0
    for weight in ("0", "-1", "nan", "inf", "1e60"):
        found = cli("apply", "w", tmp_path / "g.npy", "--weight", weight)
        assert found.exit_code == 2
        assert "weight must be a number in" in found.stderr
    said = cli_json("take", "w", 1, "-o", tmp_path / "mean.npy")
    assert (said["num_accumulated"], said["total_weight"]) == (1, 2.5)
    assert np.load(tmp_path / "mean.npy").tolist() == [1, 2, 3]
