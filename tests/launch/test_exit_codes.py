"""An error that would come again ends a run at once; one that may pass does not."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.selection import thorough

# What a process ends with whose error would come again.
FAILS_AGAIN = 78

# Fails in the way that its argument names.
PROGRAM = """
import sys
import numpy as np
import redisacc

how = sys.argv[1]
if how == "name":
    undefined

def update(taken, parameters, state):
    raise KeyError("momentum")

def log(step, metrics):
    raise TypeError("a log")

rest = {"update": update} if how == "update" else {"optimizer": redisacc.optim.SGD(0.1)}
if how == "log":
    rest["log"] = log
with redisacc.Training("failing", {"w": np.zeros(2)}, **rest) as training:
    for step, weights in training.steps(until=9):
        if how == "late" and step == 5:
            raise TypeError("late")
        if how == "late shape" and step == 5:
            how = "shape"
        training.apply({"v" if how == "key" else "w": np.ones(3 if how == "shape" else 2)})
"""


def run(how, url, *options):
    """Runs two workers of the program, and returns the exit code and the output."""
    command = [sys.executable, "-m", "redisacc", "run", "--redis", url, "--workers", "2", *options]
    command += ["--total-workers", "2", "--", sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("how", "message"),
    thorough(
        [
            ("key", "grad lacks 'w'"),
            ("shape", "must have the declared shape [2], not [3]"),
            ("name", "name 'undefined' is not defined"),
            ("update", "KeyError: 'momentum'"),
            ("log", "TypeError: a log"),
            ("late shape", "must have the declared shape [2], not [3]"),
        ],
        usual=[("key", "grad lacks 'w'"), ("log", "TypeError: a log")],
    ),
)
def test_an_error_of_the_program_ends_the_run_at_once(real_server, how, message):
    code, output = run(how, real_server.url)
    assert code == FAILS_AGAIN
    assert message in output
    assert "it would fail again" in output
    assert "it restarts" not in output
    # One for each worker, unless the run ends before the second one has written its own.
    assert output.count("Traceback (most recent call last)") <= 2
    assert "CancelledError" not in output


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_an_error_after_steps_ends_the_run_when_it_comes_again(real_server):
    code, output = run("late", real_server.url, "--restarts", "1")
    assert code == FAILS_AGAIN
    assert "ended with exit code 1; it restarts" in output


def test_only_a_launcher_s_process_changes_its_exit_code():
    program = "import redisacc; raise TypeError('x')"
    for environment, code in (({}, 1), ({"REDISACC_RUN_ID": "r"}, FAILS_AGAIN)):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr.count(b"Traceback")) == (code, 1)
