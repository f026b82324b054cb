"""How a run is stopped: Ctrl-C, signals, and being killed. No process is ever left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.selection import thorough
from support.terminal import written_to_terminal
from support.until import until

pytestmark = [
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

# Each process has a child that would outlive it.
SLEEPS = """
import os, signal, subprocess, sys
subprocess.Popen(["sleep", "1000"])
print("ready", os.getpid())
signal.pause()
"""
DEAF = SLEEPS.replace("print", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint", 1)


@pytest.mark.parametrize("number", thorough([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], usual=[signal.SIGINT]))
def test_signal_stops_everything(start, number):
    run = start("--chief", "--workers", 2, script=SLEEPS)
    run.seen("ready", 3)
    run.signal(number)
    assert run.code() == 128 + number
    said = "redisacc | stopping; Ctrl-C again kills what still runs\n"
    assert run.err == (said if number == signal.SIGINT else "")


def test_signals_for_programs_are_passed_on(start):
    """The child of each process, which does not expect SIGUSR1, lives on."""
    script = """
import signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, _: print("got", signal.Signals(number).name, child.poll()))
print("listens")
signal.pause(), signal.pause(), signal.pause()
"""
    run = start("--workers", 2, script=script)
    run.seen("listens", 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        run.signal(number)
        run.seen(f"got {number.name}" + " None" * (number != signal.SIGHUP), 2)
    assert run.code() == 128 + signal.SIGHUP
    assert run.err == ""


@pytest.mark.thorough
def test_second_ctrl_c_kills(start):
    run = start("--chief", "--workers", 2, "--grace", 1000, script=DEAF)
    run.seen("ready", 3)
    run.signal(signal.SIGINT)
    until(lambda: "stopping" in run.err)
    # Not impatience: a terminal that closes may send it more than once.
    run.signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(3)
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_ctrl_c_while_a_process_waits_for_its_restart(start):
    run = start("--chief", "--workers", 1, "--restarts", 100, script="print('ready'); raise SystemExit(1)")
    until(lambda: "in 2 s" in run.err)
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_ignored_hangup_stays_ignored(start):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        run = start("--chief", "--workers", 1, script=SLEEPS)
    finally:
        signal.signal(signal.SIGHUP, before)
    run.seen("ready", 2)
    run.signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.5)
    run.signal(signal.SIGTERM)
    assert run.code() == 143


@pytest.mark.slow
def test_ctrl_c_on_a_terminal(tmp_path, real_server, monkeypatch):
    # On a terminal, Ctrl-C goes to its whole foreground process group; the processes are in none of it.
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "def stop(number, frame):\n"
        "    print('\\x1b[32mgot', signal.Signals(number).name, '\\x1b[2J')\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print(os.environ['REDISACC_ROLE'], 'ready'); signal.pause()\n"
    )
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = ["-m", "redisacc", "run", "--chief", "--workers", "1", "--", sys.executable, str(script)]
    ready = "(?s)ready.*ready"
    lines = written_to_terminal(words, lines=24, until=ready).decode().split("\r\n")
    chief, worker, own = "\x1b[1;35mchief    |\x1b[0m", "\x1b[36mworker 0 |\x1b[0m", "\x1b[1mredisacc |\x1b[0m"
    got = "\x1b[32mgot SIGTERM \\x1b[2J\x1b[0m"
    assert set(lines) == {
        f"{chief} chief ready",
        f"{worker} worker ready",
        # What the terminal shows for Ctrl-C.
        f"^C{own} stopping; Ctrl-C again kills what still runs",
        f"{chief} {got}",
        f"{worker} {got}",
        "",
    }
    assert len(lines) == 6
    monkeypatch.setenv("NO_COLOR", "1")
    assert b"\x1b" not in written_to_terminal(words, lines=24, until=ready)


# The runner is killed


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--server"], ["--server-dir", "data"]], ids=["temporary", "kept"])
def test_killed_runner_leaves_no_process(start, options):
    run = start("--chief", "--workers", 2, *options, script=SLEEPS)
    run.seen("ready", 3)
    assert len(run.left()) == 3 + 3 + 1 + 2  # processes, their children, the guard, the server and its guard
    run.signal(signal.SIGKILL)
    until(lambda: not run.left())


@pytest.mark.thorough
def test_runner_that_is_killed_while_it_starts_leaves_no_process(start):
    for moment in range(8):
        run = start("--chief", "--workers", 20, script="import signal; signal.pause()")
        until(lambda run=run, moment=moment: len(run.left()) > 2 * moment)
        run.signal(signal.SIGKILL)
        until(lambda run=run: not run.left())


@pytest.mark.slow
def test_killed_guard_is_replaced(start):
    run = start("--chief", "--workers", 1, script=SLEEPS)
    pids = run.seen(r"ready \d+", 2)
    children = {int(pid.split()[1]) for pid in pids}

    def guards():
        found = []
        for pid in run.left():
            # One that was killed may be waited for at any moment.
            with contextlib.suppress(OSError):
                found += [pid] * (b"guard" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return found

    (first,) = guards()
    assert first not in children
    os.kill(first, signal.SIGKILL)
    until(lambda: guards() not in ([], [first]))
    run.signal(signal.SIGKILL)
    until(lambda: not run.left())


# The reader of the output


def test_run_ends_when_nobody_reads_its_output(start):
    script = "import time\nwhile True: print('x' * 1000); time.sleep(0.001)"
    run = start("--chief", "--workers", 2, script=script, read=False)
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.code() == 128 + signal.SIGPIPE


def waits_for_reader(pid):
    """Whether a process sleeps, and the pipe takes no more that it writes its output to."""
    end = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        full = not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)
    return full and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_run_can_be_stopped_while_its_reader_is_stuck(start):
    script = """
import os
with open(os.environ["REDISACC_ROLE"], "wb") as file:
    while True:
        print("x" * 1000)
        file.write(b".")
        file.flush()
"""
    run = start("--chief", "--workers", 1, "--grace", "0.5", script=script, read=False)

    def stuck():
        """Whether both processes and the run itself have to wait until somebody reads what they write."""
        writing = [pid for pid in run.left() if b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return len(writing) == 2 and all(waits_for_reader(pid) for pid in (*writing, run.process.pid))

    until(lambda: len(list(start.folder.iterdir())) == 3)
    until(stuck)
    run.signal(signal.SIGTERM)
    assert run.code() == 143
