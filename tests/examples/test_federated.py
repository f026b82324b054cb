"""Runs the federated example, and kills the server's process and a client in the middle of the training."""

import re
import sys

import pytest
from running import Programs, kill_one_of, output_of, until_step

from redisacc.embedded import Server


@pytest.mark.timeout(600)
def test_federated():
    with Server() as server, Programs(server.url) as programs:
        run = programs.run(8, "federated.py", "--chief")
        if sys.platform == "linux":
            until_step(5, "federated", server.url, run)
            kill_one_of(run, "worker")
            until_step(20, "federated", server.url, run)
            kill_one_of(run, "chief")
        printed = output_of(run, 250)
        if sys.platform == "linux":
            assert printed.count("was killed by SIGKILL; it starts again") == 2
        assert float(re.search(r"round 60: test accuracy ([\d.]+)", printed)[1]) > 0.9
        assert "; of worker" in printed
