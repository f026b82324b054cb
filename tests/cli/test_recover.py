"""The command `recover`."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.servers("valkey", "cluster")


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
