"""The embedded server: it ends with its owner, however that ends."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
from owners import OWNER, REAL, alive, ask, gone, program, run, timer_has_run
from support.until import until

from redisacc.embedded import Server

pytestmark = pytest.mark.servers(*REAL)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_owner_that_is_killed_takes_the_server_with_it(executable, tmp_path, how):
    with run("-c", OWNER, executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        assert alive(pid)
        assert directory.exists()
        owner.kill(how)
        assert gone(pid, 5)
        until(lambda: not directory.exists())


@pytest.mark.slow(keep="-0")
@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("raise", 1), ("_exit", 4), ("", 0)])
def test_owner_that_ends_takes_the_server_with_it(any_executable, tmp_path, how, status):
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        owner.say(how)
        assert owner.result()[0] == status
        assert gone(pid, 5)
        until(lambda: not directory.exists())


def test_owner_that_becomes_another_program_takes_the_server_with_it(any_executable, tmp_path):
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid = int(owner.line())
        owner.say("exec")
        assert gone(pid, 5)


def test_forked_child_does_not_keep_the_server_of_a_killed_owner(any_executable, tmp_path):
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        owner.say("fork")
        child = int(owner.line().split()[1])
        owner.kill()
        try:
            assert gone(pid, 5)
            until(lambda: not directory.exists())
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_server_without_its_guard_ends(any_executable):
    server = Server(executable=any_executable)
    server.start()
    pid, directory = server.pid, server.dir
    os.kill(server._child.process.guard.process.pid, signal.SIGKILL)
    until(lambda: not server.running)
    server.stop()
    assert gone(pid)
    assert not directory.exists()


def test_signals_do_not_end_the_guard(any_executable, tmp_path):
    script = OWNER.replace("print(server.dir)", "print(server._child.process.guard.process.pid)")
    with run("-c", script, any_executable, "", cwd=tmp_path) as owner:
        pid, guard = int(owner.line()), int(owner.line())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard, number)
        owner.kill()
        assert gone(pid)
        assert gone(guard)


def test_server_outlives_the_thread_that_started_it(any_executable):
    server = Server(executable=any_executable)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    # The kernel has sent what it sends when a thread ends.
    until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
    timer_has_run(server.url)
    assert server.running
    assert ask(server, "PING")
    server.stop()


def test_forgotten_server_ends(any_executable):
    server = Server(executable=any_executable)
    server.start()
    pid = server.pid
    del server
    gc.collect()
    assert gone(pid, 5)


@pytest.mark.slow
def test_ctrl_c_is_left_to_the_owner(any_executable, tmp_path):
    script = """
import sys
from redisacc.embedded import Server
with Server(executable=sys.argv[1]) as server:
    try:
        print(server.pid)
        print(server.url)
        sys.stdin.readline()
    except KeyboardInterrupt:
        print("interrupted")
    sys.stdin.readline()
    print(server.client().ping())
"""
    with run("-c", script, any_executable, cwd=tmp_path) as owner:
        pid, url = int(owner.line()), owner.line()
        os.killpg(owner.pid, signal.SIGINT)  # as the terminal does
        assert owner.line() == "interrupted"
        timer_has_run(url)
        assert alive(pid)
        owner.say()
        assert owner.line() == "True"
        assert owner.result()[0] == 0
        assert gone(pid, 5)


@pytest.mark.slow
def test_interrupted_start_leaves_nothing(tmp_path):
    mute = program(
        tmp_path / "mute",
        f"""
        #!/bin/sh
        [ "$1" = --version ] && {{ echo "Redis server v=7.0.0"; exit; }}
        echo $$ > {tmp_path}/pid.new
        mv {tmp_path}/pid.new {tmp_path}/pid
        exec sleep 1000
        """,
    )
    script = """
import sys, tempfile
from redisacc.embedded import Server
tempfile.tempdir = "scratch"
try:
    Server(executable=sys.argv[1]).start()
except KeyboardInterrupt:
    print("interrupted")
    sys.stdin.readline()
"""
    (tmp_path / "scratch").mkdir()
    with run("-c", script, str(mute), cwd=tmp_path) as owner:
        until((tmp_path / "pid").exists)
        owner.kill(signal.SIGINT)
        assert owner.line() == "interrupted"
        assert not alive(int((tmp_path / "pid").read_text()))
        assert list((tmp_path / "scratch").iterdir()) == []
        owner.say()
        assert owner.result()[0] == 0
