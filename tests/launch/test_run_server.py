"""`redisacc run --server`: training on one machine with a server of its own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import redis
from support.until import until

pytestmark = [
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

TRAIN = """
import os
import numpy as np
import redisacc

worker = os.environ.get("REDISACC_WORKER_NUMBER", "chief")
acc = redisacc.ConditionalAccumulator(np.int64, [2], "train", worker=worker, once_per_worker=True)
first = acc.global_step()
if os.environ["REDISACC_ROLE"] == "chief":
    for step in range(first, first + 3):
        print("step", step, "mean", acc.take_grad(int(os.environ["REDISACC_WORKERS"])).tolist())
else:
    for step in range(first, first + 3):
        acc.wait_for_step(step, timeout=30)
        acc.apply_grad([step, int(os.environ["REDISACC_WORKER_NUMBER"])], local_step=step)
"""


@pytest.fixture
def start(start):
    """None of these runs must meet the server of the environment."""
    return lambda *options, **more: start(*options, REDISACC_URL="redis://127.0.0.1:1", **more)


def test_training(start):
    run = start("--chief", "--workers", 3, "--server", script=TRAIN)
    assert run.code() == 0, run.err
    assert run.out.splitlines() == [f"chief    | step {step} mean [{step}, 1]" for step in range(3)]
    started = r"redisacc \| process \d+ started (Valkey|Redis) \S+ as process \d+; "
    assert re.fullmatch(started + r"it is ready at redis://127\.0\.0\.1:\d+/0\n", run.err)


@pytest.mark.thorough
def test_training_continues_in_the_same_directory(start, tmp_path):
    for first, durable in ((0, ["--no-durable"]), (3, []), (6, ["--no-durable"])):
        run = start("--chief", "--workers", 2, "--server-dir", "data", *durable, script=TRAIN)
        assert run.code() == 0, run.err
        steps = [line.split()[3] for line in run.out.splitlines()]
        assert steps == [str(step) for step in range(first, first + 3)]
        assert (tmp_path / "data" / "dump.rdb").exists() == bool(durable)


def test_a_directory_has_to_be_named(start, tmp_path):
    empty = "Invalid value for '--server-dir': the path is empty; for the current directory, give a dot"
    for options, message in (
        (["--server", "--durable"], "--durable needs --server-dir"),
        (["--server-dir", ""], empty),
    ):
        run = start("--chief", "--workers", 1, *options, script=TRAIN)
        assert run.code() == 2
        assert message in run.err
    assert not list(tmp_path.glob("server.*"))


def test_port(start, unused_port):
    run = start(
        "--chief", "--workers", 0, "--server-port", unused_port, script="print('ready'); import signal; signal.pause()"
    )
    run.seen("ready")
    with redis.Redis(port=unused_port) as client:
        assert client.ping()
    again = start("--chief", "--workers", 0, "--server-port", unused_port, script="print('ready')")
    assert again.code() == 1
    assert again.err == f"redisacc: port {unused_port} is already in use on this machine: choose another one\n"
    run.signal(signal.SIGINT)
    assert run.code() == 130


@pytest.fixture
def unused_port():
    from support.daemons import free_port

    return free_port()


def test_server_that_ends_ends_the_run(start, unused_port):
    run = start(
        "--chief", "--workers", 1, "--server-port", unused_port, script="print('ready'); import signal; signal.pause()"
    )
    run.seen("ready", 2)
    with redis.Redis(port=unused_port) as client:
        client.shutdown(nosave=True)
    assert run.code() == 1
    assert "redisacc | the server ended with exit code 0; the end of its log: " in run.err
    assert "User requested shutdown" in run.err
    # Advice that the server logs while it starts is not the cause.
    assert "overcommit" not in run.err


KILLED = (
    "redisacc | the server was killed by SIGKILL, by somebody or by the kernel for lack of memory, which `dmesg` "
    "reports"
)


@pytest.mark.slow
def test_a_server_that_is_killed_too_often_ends_the_run(start, unused_port):
    script = "print('ready'); import signal; signal.pause()"
    run = start("--chief", "--workers", 1, "--server-port", unused_port, "--restarts", 0, script=script)
    run.seen("ready", 2)
    with redis.Redis(port=unused_port) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    assert run.code() == 1
    assert f"{KILLED}. It has logged nothing since it was ready\n" in run.err


TRAINING = """
import time
import numpy as np
import redisacc

with redisacc.Training("kept", {"w": np.zeros(2)}, optimizer=redisacc.optim.SGD(0.1), workers=1, number=0) as training:
    for step, weights in training.steps(until=60):
        time.sleep(0.03)
        training.apply({"w": weights["w"] + step})
        if step == 20:
            print("step 20")
    print(training.latest()[1]["w"].tolist())
"""


@pytest.mark.slow(keep="directory")
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--server-dir", "data"),
        pytest.param(("--server-dir", "data", "--no-durable"), marks=pytest.mark.thorough),
    ],
    ids=["memory", "directory", "no_durable"],
)
def test_a_killed_server_starts_again_and_a_training_continues(start, unused_port, options):
    run = start("--workers", 1, "--server-port", unused_port, *options, script=TRAINING)
    run.seen("step 20")
    with redis.Redis(port=unused_port) as client:
        # With a directory, every change is written to it unless somebody does not want that.
        assert client.config_get("appendonly") == {"appendonly": "yes" if options == ("--server-dir", "data") else "no"}
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    assert run.code() == 0, run.err
    weights = np.zeros(2)
    for step in range(60):
        weights -= 0.1 * (weights + step)
    assert run.out.splitlines()[-1] == f"worker 0 | {weights.tolist()}"
    lost = "" if options else ". Its data was in memory only; runs continue with what processes have"
    # It logs something in between if it saves a snapshot. There is a pause if it has lived for a short time.
    again = rf"It restarts(?: in 0.5 s)?{re.escape(lost)}"
    assert re.search(rf"^{re.escape(KILLED)}.*\. {again}$", run.err, re.MULTILINE)
    assert re.search(r"^redisacc \| the server has restarted as process \d+$", run.err, re.MULTILINE)


def kill_server(port):
    with redis.Redis(port=port) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)


FAILED = r"the server could not be restarted: Valkey \S+ was killed by SIGKILL before it was ready; its log is empty"


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_starts_again_is_tried_again(start, unused_port, broken):
    run = start("--workers", 1, "--server-port", unused_port, script=TRAINING)
    run.seen("step 20")
    broken.touch()
    kill_server(unused_port)
    until(lambda: len(re.findall(FAILED, run.err)) >= 2 or run.process.poll() is not None)
    broken.unlink()
    assert run.code() == 0, run.err
    assert re.search(r"^redisacc \| the server has restarted as process \d+$", run.err, re.MULTILINE)


@pytest.mark.slow
def test_a_server_that_can_never_start_again_ends_the_run(start, unused_port, broken):
    script = "print('ready'); import signal; signal.pause()"
    run = start("--workers", 1, "--server-port", unused_port, "--restarts", 2, script=script)
    run.seen("ready")
    broken.touch()
    kill_server(unused_port)
    assert run.code() == 1
    first, last = re.findall(f"{FAILED}(.*)", run.err)
    assert first.startswith(". It restarts in ")
    assert last == ""


@pytest.mark.thorough
def test_server_outlives_ctrl_c_until_the_workers_have_ended(start):
    script = """
import os, redis, signal
def stop(*_):
    print("stopped", client.ping())
    raise SystemExit
client = redis.Redis.from_url(os.environ["REDISACC_URL"])
signal.signal(signal.SIGTERM, stop)
print("ready")
signal.pause()
"""
    run = start("--chief", "--workers", 1, "--server", script=script)
    run.seen("ready", 2)
    run.signal(signal.SIGINT)
    assert run.code() == 130
    assert run.out.count("stopped True") == 2
