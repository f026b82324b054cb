"""Runs the example of a chief and workers on two machines, and kills each of them once."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import pytest
import redis
from running import EXAMPLES, Programs, output_of, until
from support.selection import thorough

import redisacc
from redisacc.embedded import Server

NAME = "two-machines"


class Died(Exception):
    pass


@pytest.fixture
def chief_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "two_machines"))
    return importlib.import_module("chief")


@pytest.mark.parametrize("published", thorough([False, True], usual=[True]))
def test_training_survives_kills_and_equals_training_alone(chief_module: Any, published: bool) -> None:
    with Server() as server, Programs(server.url) as programs, redis.Redis.from_url(server.url) as client:
        chief = programs.start("two_machines/chief.py", "--workers", "2")
        first = programs.start("two_machines/worker.py", "--index", "0")
        acc = redisacc.ConditionalAccumulator(
            np.float64, [chief_module.FEATURES], NAME, once_per_worker=True, redis=client
        )
        until(lambda: "worker-0" in acc.info().workers, first)
        chief.kill()
        first.kill()
        # The worker contributes again to the step in which it died, and is refused.
        again = programs.start("two_machines/worker.py", "--index", "0")
        second = programs.start("two_machines/worker.py", "--index", "1")
        until(lambda: "worker-1" in acc.info().workers, second)
        until(lambda: acc.info().repeated, again)
        # This is a chief that dies while it has the round, before or after it publishes the weights.
        with contextlib.suppress(Died), acc.take(2, timeout=60) as taken:
            assert taken.workers == {"worker-0": 1, "worker-1": 1}
            if published:
                chief_module.Model(client, NAME).update(taken)
            raise Died
        printed = output_of(programs.start("two_machines/chief.py", "--workers", "2"))
        assert "from training alone: " in printed
        assert "worker-0: done" in output_of(again)
        assert "worker-1: done" in output_of(second)
        acc.close()
        assert client.keys() == [f"{NAME}:weights".encode()]
        assert client.ttl(f"{NAME}:weights") > 0
