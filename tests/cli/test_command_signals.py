"""Ctrl-C and SIGTERM at any moment of any command: the documented exit code, no traceback, and no process is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from support.daemons import free_port
from support.selection import thorough
from support.warm_python import WarmPython

import redisacc
from redisacc.tools.cli import COMMANDS
from redisacc.tools.cli.shared import failures

pytestmark = [
    pytest.mark.servers("valkey"),
    pytest.mark.forges,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

# What the command's own code can do something about begins here. Before, Python itself starts.
BEGINS = "import os, _redisacc_command; os.write(1, b'.'); _redisacc_command.main()"
ENDLESS = {"reduce", "run", "serve", "server", "take", "watch"}


def arguments(command):
    return {
        "acl": ["worker", "*"],
        "apply": ["a", "gradient.npy"],
        "completion": ["bash"],
        "demo": ["--steps", "3", "--workers", "1"],
        "finish": ["a"],
        "rm": ["b", "--yes"],
        "run": ["--workers", "1", "--server", "--", "sleep", "1000"],
        "serve": ["--port", str(free_port())],
        "server": ["--dir", "data", "--port", str(free_port())],
        "set": ["a", "least=9"],
        "show": ["a"],
        "take": ["a", "1000", "-o", "round.npy"],
        "watch": ["a"],
    }.get(command, [])


def documented(command, number, code):
    """Whether a command may end in this way after the signal, which may have come after its end."""
    if code in (-number, 128 + number):
        return True
    if command in ENDLESS:
        return command in ("reduce", "server") and code == 0
    return code == 0 or (command == "doctor" and code == 1)


def left(mark, temporary):
    """The processes that a command has left. A server hides its environment, but not its directory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = mark.encode() in (folder / "environ").read_bytes()
            if marked or (folder / "cwd").readlink().is_relative_to(temporary):
                found.append((folder / "cmdline").read_text())
    return found


def cases(command, everything):
    """Yields moments of a command, from 0 to 1, with a signal for each, and whether the command starts warm.

    A cold start shows the signals that come while modules are imported. A warm one is cheap, and all of its moments are
    those of the command itself. With everything, both signals come at every moment, each cold at every other one.
    """
    count = 25 if everything else 3
    for step in range(count):
        for number in (signal.SIGINT, signal.SIGTERM):
            in_turn = (step % 2 == 0) == (number == signal.SIGINT)
            warm = not everything or not in_turn
            if (everything or in_turn) and not (warm and command == "demo"):
                yield (step + 0.5) / count, number, warm


# With everything, it takes half a minute for each command.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", thorough(sorted(COMMANDS), usual=["ls", "run", "server", "take", "watch"]))
def test_a_signal_at_any_moment(command, real_server, tmp_path, until, everything):
    np.save(tmp_path / "gradient.npy", np.ones(2, np.float32))
    began = 0.0
    mark = uuid.uuid4().hex

    def start(warm):
        nonlocal began
        words = ["-c", BEGINS, command, *arguments(command)]
        environment = {**os.environ, "REDISACC_URL": real_server.url, "TMPDIR": str(tmp_path), "MARK": mark}
        options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = (
            WarmPython(words, **options)
            if warm
            else subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL, **options)
        )
        assert process.stdout.read(1) == b"."
        began = time.monotonic()
        return process

    def prepare():
        for name in ("a", "b"):
            with redisacc.ConditionalAccumulator("float32", [2], name, redis=real_server.url, worker="w") as opened:
                opened.apply_grad(np.ones(2, np.float32), 2**62)
        with redisacc.Parameters("a", redis=real_server.url) as parameters:
            parameters.publish(np.ones(2), 0)

    prepare()
    durations = {True: 0.5, False: 1.5}
    if command not in ENDLESS:
        for warm in {warm for _, _, warm in cases(command, everything)}:
            prepare()
            with start(warm) as process:
                _, error = process.communicate(timeout=100)
                assert documented(command, signal.SIGINT, process.returncode), error
            durations[warm] = time.monotonic() - began
    for moment, number, warm in cases(command, everything):
        if command not in ENDLESS:
            prepare()
        with start(warm) as process:
            # Not a guess: whatever moment of the command this is, it has to be right.
            time.sleep(durations[warm] * moment)
            process.send_signal(number)
            # An exit that waits for a timeout of ours says so on standard error.
            _, error = process.communicate(timeout=60)
            where = (moment, number, warm, process.returncode, error)
            assert documented(command, number, process.returncode), where
            assert b"Traceback" not in error, where
            assert b"Aborted" not in error, where
            assert b"does not end" not in error, where
        until(lambda: not left(mark, tmp_path))
    assert not list(tmp_path.glob("redisacc-*"))


DESTRUCTOR = """
import signal, sys, time
from redisacc.tools.cli.shared.failures import report_failures

signal.signal(signal.SIGINT, signal.SIG_DFL)

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

@report_failures
def command():
    Interrupted()
    time.sleep(float(sys.argv[1]))

command()
"""


@pytest.mark.parametrize("seconds", [100, 0], ids=["in the middle", "at the end"])
def test_ctrl_c_in_a_destructor_is_not_lost(tmp_path, seconds):
    with WarmPython(["-c", DESTRUCTOR, str(seconds)], cwd=tmp_path) as process:
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (failures.INTERRUPTED, b"")
