"""Leaves these tests out where torch is missing; `make examples` installs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.training_options import grouped

# For the reader of pages.
sys.path.append(str(Path(__file__).parents[1] / "docs"))

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, durations: Callable[..., None]) -> None:
    for name in ("RANK", "WORLD_SIZE", "REDISACC_WORKERS", "REDISACC_WORKER_NUMBER", "REDISACC_ROLE"):
        monkeypatch.delenv(name, raising=False)
    # Closing waits for the thread that leads.
    durations(look_every=0.05, poll_every=0.1)


@pytest.fixture
def wrap(real_client: redis.Redis) -> Iterator[Callable[..., Any]]:
    """Wraps an optimizer of a model's parameters, AdamW if none is given. All are closed when the test ends."""
    import torch

    import redisacc.torch

    opened = []

    def wrapped(model: torch.nn.Module, inner: Any = None, name: str = "torch", **options: Any) -> Any:
        inner = torch.optim.AdamW(model.parameters(), lr=0.02) if inner is None else inner
        given = grouped({"workers": 1, "redis": real_client, **options})
        opened.append(redisacc.torch.Optimizer(inner, name, model, **given))
        return opened[-1]

    yield wrapped
    for one in opened:
        one.close()
