"""Shorter timeouts for tests that stop servers."""

from __future__ import annotations

import pytest

from redisacc._protocol import scripts as _scripts


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that cannot reach the server raises after a second."""
    monkeypatch.setattr(_scripts, "OPENING_TIMEOUT", 0.5)
    monkeypatch.setattr("redisacc._protocol.take_wait.POLL_TIMEOUT", 0.5)
    monkeypatch.setattr("redisacc._redis.transport.TIMEOUT", 1.0)
    for name in ("run", "run_and_read", "call", "pipeline", "fetch"):
        function = getattr(_scripts.Transport, name)
        monkeypatch.setitem(function.__kwdefaults__, "timeout", 1.0)
