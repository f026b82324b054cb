"""The command `set-step`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_set_step(cli, cli_json, accumulator):
    assert cli_json("set", "w", f"step={2**53 + 1}") == {"before": 0, "global_step": 2**53 + 1}
    found = cli("set", "w", "step=5")
    assert (found.exit_code, accumulator.global_step()) == (2, 2**53 + 1)
    found = cli("set", "w", "step=-5", "--yes")
    assert found.exit_code == 0
    assert "the global step was lowered to -5" in found.stderr
    assert accumulator.global_step() == -5
    assert cli("set", "w", f"step={2**63}").exit_code == 2


def test_it_asks_before_it_passes_over_a_round(cli, cli_json, accumulator):
    accumulator.apply_grad([1, 2, 3])
    found = cli("set", "w", "step=7")
    assert (found.exit_code, accumulator.global_step()) == (2, 0)
    assert "this needs a confirmation" in found.stderr
    assert cli("set", "w", "step=0").exit_code == 0
    assert cli_json("set", "w", "step=7", "--yes") == {"before": 0, "global_step": 7}
    assert accumulator.num_accumulated() == 1
