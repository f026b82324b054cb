"""A proxy before the server, and handles with less patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
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


def make_impatient(link: Link, seconds: float = 2.0) -> None:
    """Calls give up on a silent server soon."""

    def less_patient(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, patience: float = seconds, **options: Any) -> Any:
            return method(*args, patience=min(patience, seconds), **options)

        return call

    for name in ("call", "pipeline", "run", "run_and_read", "repeat", "fetch"):
        setattr(link, name, less_patient(getattr(link, name)))
