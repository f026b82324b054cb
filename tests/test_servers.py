"""The servers that this run is meant for are there. In CI the run does not even start without them."""

import pytest
from support.selection import MISSING, chosen


def test_servers_of_this_machine(pytestconfig):
    missing = pytestconfig.stash[MISSING]
    if missing:
        pytest.skip("; ".join(f"no server {name}: {why}" for name, why in missing.items()))
    assert chosen(pytestconfig)
