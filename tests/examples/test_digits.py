"""Runs the scikit-learn example, and kills the chief and a worker in the middle of the training."""

import re
import sys

import pytest
from running import Programs, kill_one_of, output_of, until_step

from redisacc.embedded import Server


@pytest.mark.timeout(600)
def test_digits(tmp_path):
    picture = tmp_path / "digits.png"
    with Server() as server, Programs(server.url) as programs:
        run = programs.run(2, "digits.py", "--chief", arguments=["--plot", str(picture)])
        if sys.platform == "linux":
            until_step(5, "digits", server.url, run)
            kill_one_of(run, "worker")
            until_step(60, "digits", server.url, run)
            kill_one_of(run, "chief")
        printed = output_of(run, 250)
        if sys.platform == "linux":
            assert printed.count("was killed by SIGKILL; it starts again") == 2
        # The program itself compares the weights with those of a training in one process.
        assert float(re.search(r"test accuracy ([\d.]+)", printed)[1]) > 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")
