"""Runs the PyTorch example, and kills a worker in the middle of the training."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
import redis
from running import Programs, children_of, output_of, until

from redisacc.embedded import Server


@pytest.mark.timeout(300)
def test_torch_embeddings() -> None:
    with Server() as server, Programs(server.url) as programs, redis.Redis.from_url(server.url) as client:
        chief = programs.start("torch_embeddings.py", "--workers", "2", "--steps", "300")
        if sys.platform == "linux":
            until(lambda: int(client.hget("redisacc:{torch-embeddings/rest}", "global_step") or 0) >= 5, chief)
            os.kill(max(children_of(chief.pid)), signal.SIGKILL)
        printed = output_of(chief, 250)
        if sys.platform == "linux":
            assert "of 2 gradients had arrived" in printed
        assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.9  # type: ignore[index]
        assert client.keys() == []
