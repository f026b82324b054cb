"""The chaos of `make chaos`, for a few seconds."""

from __future__ import annotations

import pytest
from chaos.run import SMALL_CREW, Chaos


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_and_nothing_counted_twice(seed, pytestconfig):
    with Chaos(seed=seed, crew=SMALL_CREW) as chaos:
        chaos.rage(12 if pytestconfig.getoption("--all") else 6)
        tale = chaos.end()
    assert tale.problems == []
    # Their number depends on the machine.
    assert chaos.done["gradients"] > 0
    assert chaos.done["rounds"] > 0
