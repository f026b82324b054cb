"""The command `set-step`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers("valkey")


def test_set_step(cli, cli_json, accumulator):
    assert cli_json("set-step", "w", 2**53 + 1) == {"before": 0, "global_step": 2**53 + 1}
    found = cli("set-step", "w", 5)
    assert (found.exit_code, accumulator.global_step()) == (2, 2**53 + 1)
    found = cli("set-step", "w", -5, "--yes")
    assert found.exit_code == 0
    assert "the global step was lowered to -5" in found.stderr
    assert accumulator.global_step() == -5
    assert cli("set-step", "w", 2**63).exit_code == 2
