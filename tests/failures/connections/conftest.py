"""A proxy between the tests and their server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.proxy import Proxy, proxy_before_server


@pytest.fixture
def proxy(real_server) -> Iterator[Proxy]:
    """A proxy before the server of this test."""
    with proxy_before_server(real_server.url) as proxy:
        yield proxy
