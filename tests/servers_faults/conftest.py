"""Patience for tests that take servers away."""

from __future__ import annotations

import pytest

from redisacc import _scripts


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can't reach the server says so after a second."""
    monkeypatch.setattr(_scripts, "OPENING_PATIENCE", 0.5)
    monkeypatch.setattr("redisacc._taking.LOOK_PATIENCE", 0.5)
    monkeypatch.setattr("redisacc._link.PATIENCE", 1.0)
    for name in ("run", "run_and_read", "call", "pipeline", "fetch"):
        function = getattr(_scripts.Link, name)
        monkeypatch.setitem(function.__kwdefaults__, "patience", 1.0)
