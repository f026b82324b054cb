"""Runs the PyTorch example, and kills a worker twice in the middle of the training."""

import re
import sys

import pytest
from running import Programs, kill_one_of, output_of, until_step

from redisacc.embedded import Server


@pytest.mark.timeout(600)
def test_torch_embeddings():
    with Server() as server, Programs(server.url) as programs:
        run = programs.run(2, "torch_embeddings.py")
        if sys.platform == "linux":
            until_step(5, "torch-embeddings", server.url, run)
            kill_one_of(run, "worker")
            until_step(60, "torch-embeddings", server.url, run)
            kill_one_of(run, "worker")
        printed = output_of(run, 250)
        if sys.platform == "linux":
            assert printed.count("was killed by SIGKILL; it starts again") == 2
        # The program itself compares the parameters with those of a training in one process.
        assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.9
