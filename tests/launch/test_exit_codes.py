"""An error that would come again ends a run at once; one that may pass does not."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.selection import thorough

import redisacc
from redisacc._handles import exit_code
from redisacc._handles.environment import RESTARTED

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


@pytest.fixture(autouse=True)
def _is_at_the_beginning(monkeypatch):
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: False)
    monkeypatch.delenv(RESTARTED, raising=False)


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
    assert code == exit_code.FAILS_AGAIN
    assert message in output
    assert "it would fail again" in output
    assert "it starts again" not in output
    # One for each worker, unless the run ends before the second one has written its own.
    assert output.count("Traceback (most recent call last)") <= 2
    assert "CancelledError" not in output


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_an_error_after_steps_ends_the_run_when_it_comes_again(real_server):
    code, output = run("late", real_server.url, "--restarts", "1")
    assert code == exit_code.FAILS_AGAIN
    assert "ended with exit code 1; it starts again" in output


@pytest.mark.parametrize(
    "error",
    [
        redisacc.InvalidArgumentError("x"),
        NameError("x"),
        ImportError("x"),
        NotImplementedError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_programs_come_again(error, monkeypatch):
    assert exit_code.comes_again(error)
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)
    assert exit_code.comes_again(error)


@pytest.mark.parametrize("error", [TypeError("x"), AttributeError("x"), AssertionError("x")])
def test_errors_that_data_may_cause_come_again_before_the_second_step(error, monkeypatch):
    assert exit_code.comes_again(error)
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)
    assert not exit_code.comes_again(error)


def test_an_error_in_the_first_call_of_a_function_comes_again_in_any_step(monkeypatch):
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)

    def fail(error):
        if error is not None:
            raise error

    for fails_first in (True, False):
        noting = exit_code.noting_its_first_call(fail)
        if not fails_first:
            noting(None)
        error = TypeError("x")
        with pytest.raises(TypeError):
            noting(error)
        assert exit_code.comes_again(error) is fails_first


@pytest.mark.parametrize(
    "error",
    [
        redisacc.ServerUnavailableError("x"),
        redisacc.ConflictError("x"),
        redisacc.NotFoundError("x"),
        redisacc.RedisAccError("x"),
        ConnectionResetError("x"),
        FileNotFoundError("x"),
        MemoryError("x"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_may_pass(error):
    assert not exit_code.comes_again(error)


@pytest.mark.parametrize(("restarted", "comes_again"), [("0", True), ("1", False), (None, False)])
def test_errors_of_data_may_pass_unless_they_end_the_first_process(restarted, comes_again, monkeypatch):
    if restarted is not None:
        monkeypatch.setenv(RESTARTED, restarted)
    for error in (RuntimeError("CUDA out of memory"), KeyError("x"), ValueError("x"), ZeroDivisionError("x")):
        assert exit_code.comes_again(error) is comes_again
    assert not exit_code.comes_again(redisacc.RedisAccError("x"))


def test_only_a_launcher_s_process_changes_its_exit_code():
    program = "import redisacc; raise TypeError('x')"
    for environment, code in (({}, 1), ({"REDISACC_RUN_ID": "r"}, exit_code.FAILS_AGAIN)):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr.count(b"Traceback")) == (code, 1)
