"""A proxy before the server, and less patience."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from faults.proxy import Proxy, proxy_before

from redisacc._link import Link


@pytest.fixture
def proxy(real_server) -> Iterator[Proxy]:
    """A proxy before the server of this test."""
    address = urlsplit(real_server.url)
    with proxy_before((address.hostname, address.port)) as proxy:
        yield proxy


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls give up on a silent server soon."""
    for method in (Link.call, Link.pipeline, Link.run, Link.run_and_read, Link.fetch):
        monkeypatch.setitem(method.__kwdefaults__, "patience", 0.5)
