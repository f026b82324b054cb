"""Leaves these tests out where torch is missing; `make examples` installs it."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "REDISACC_WORKERS", "REDISACC_WORKER_NUMBER", "REDISACC_ROLE"):
        monkeypatch.delenv(name, raising=False)
