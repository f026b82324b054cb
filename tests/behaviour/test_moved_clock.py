"""A test moves the clock: waits end, and leases of the dead run out, those of the living do not. Users pay nothing."""

import signal
import subprocess
import sys
import time

import pytest
from support.moved_clock import MovedClock, runs
from support.warm_python import PIPE, WarmPython

from redisacc._clock import Clock
from redisacc._clock import clock as the_clock

HOUR = 3600.0


def test_the_clock_of_users_is_that_of_the_system():
    assert (the_clock.now, the_clock.time, the_clock.sleep) == (time.monotonic, time.time, time.sleep)
    assert vars(Clock)["__slots__"] == ("now", "sleep", "time")


def test_a_server_that_forgets_its_scripts_after_a_move_gets_those_that_are_ahead(clock, open_dense, client):
    acc = open_dense("float32", [1], "shared", worker="ann")
    acc.apply_grad([1.0])
    clock.advance(HOUR)
    client.script_flush()
    acc.apply_grad([1.0])
    assert abs((acc.info().known_workers[0].seen_at - acc.info().read_at).total_seconds()) < 60
    # And so do calls that were prepared before a move, and are repeated after it.
    assert acc.take_grad(2).tolist() == [1.0]


def test_a_transport_that_outlives_a_clock_follows_the_next_one(open_dense, client, tmp_path):
    """Handles of several tests may share a transport, and with it what renews leases."""
    open_dense("float32", [1], "shared")
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        moved = MovedClock(folder, moves=True)
        moved.clients.append(client)
        try:
            with open_dense("float32", [1]) as private:
                moved.advance(100.0)
                assert private.num_accumulated() == 0
        finally:
            moved.restore()


OWNER = """
import sys
import numpy as np
import redisacc
acc = redisacc.ConditionalAccumulator("float32", [2], redis=sys.argv[1])
acc.apply_grad(np.ones(2, np.float32))
print(acc.accumulator_ref, flush=True)
try:
    acc.take_grad(2, timeout=200)
except redisacc.TakeTimeoutError:
    print("timed out", flush=True)
sys.stdin.read()
"""
PYTHONS = {
    "forked": lambda arguments, env: WarmPython(arguments, stdin=PIPE, text=True, env=env, stderr=sys.stderr),
    "started": lambda arguments, env: subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ),
}


@pytest.mark.slow(keep="forked")
@pytest.mark.parametrize("way", PYTHONS)
@pytest.mark.servers("valkey", "cluster")
def test_other_processes_follow(clock, real_server, real_client, until, way):
    process = PYTHONS[way](["-c", OWNER, real_server.url], clock.env)
    try:
        record = process.stdout.readline().strip()
        until(lambda: real_client.zcard(f"{record}:queue"))
        # It lives, so it keeps its lease of a minute.
        clock.advance(120.0)
        assert real_client.exists(record)
        clock.advance(90.0)
        assert process.stdout.readline() == "timed out\n"
        # It renews nothing, and nobody waits for it.
        process.send_signal(signal.SIGSTOP)
        until(lambda: not runs(process.pid))
        clock.advance(30.0)
        assert real_client.exists(record)
        # It may have renewed it just before it was stopped.
        clock.advance(40.0)
        assert {key: real_client.pttl(key) for key in real_client.scan_iter()} == {}
    finally:
        process.kill()
        process.communicate()
