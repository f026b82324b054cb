"""The soak of `make soak`, for a few seconds."""

import sys

import pytest
from chaos.soak import soak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.thorough
@pytest.mark.servers("valkey")
def test_nothing_grows(real_client):
    _, found = soak(real_client, warm_up=25, rounds=iter(range(80)))
    assert found == []
