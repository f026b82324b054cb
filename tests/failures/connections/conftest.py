"""A proxy between the tests and their server, or each node of their cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.proxy import ClusterProxy, Proxy, proxy_before_server
from support.servers import CLUSTER, ServerUnderTest


@pytest.fixture
def proxy(real_server: ServerUnderTest, real_client: Any) -> Iterator[Proxy]:
    """A proxy before the server of this test."""
    if real_server.name != CLUSTER:
        with proxy_before_server(real_server.url) as proxy:
            yield proxy
        return
    with contextlib.closing(ClusterProxy([node.port for node in real_client.get_primaries()])) as proxy:
        yield proxy
