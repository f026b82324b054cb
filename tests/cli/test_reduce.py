"""The command `reduce`, and `server --reduce`, as processes of their own."""

import contextlib
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import redisacc
from redisacc.embedded.addresses import free_port

pytestmark = pytest.mark.servers("valkey")

# A gradient has 1 MB.
ELEMENTS = 250_000


@contextlib.contextmanager
def running(*words, cwd=None):
    """Runs a command; it is gone when the block ends."""
    command = [sys.executable, "-u", "-m", "redisacc", *words]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process, pattern):
    """Reads lines of the output until one matches. Returns all of them."""
    lines = []
    while not (lines and re.search(pattern, lines[-1])):
        line = process.stdout.readline()
        assert line, (lines, process.stderr.read())
        lines.append(line)
    return "".join(lines)


@pytest.fixture
def train(background, until, durations):
    """Takes rounds of two gradients of 1 MB until the whole sum of one of them was there in time."""
    # A reducer that has just begun, or on a busy machine, may store only some parts of a sum. The take then adds up
    # the rest itself, and the next one relies on the reducer again.
    durations(sum_patience=2.0, without_reducer=0.01, longest_without_reducer=0.01)

    def one_round(acc):
        step = acc.global_step()
        take = background(acc.take_grad, 2, timeout=60)
        until(lambda: acc.info().waiting)
        for value in (1.0, 2.0):
            acc.apply_grad(np.full(ELEMENTS, value, np.float32), local_step=step)
        np.testing.assert_array_equal(take.result(60), np.full(ELEMENTS, 3.0, np.float32))
        reducer = acc.info().reducer
        return reducer is not None and reducer.stored

    return lambda acc: until(lambda: one_round(acc), 60)


def test_an_interrupt_while_it_connects_is_no_failure_either(offline_cli):
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running("reduce", "--redis", f"redis://127.0.0.1:{silent.getsockname()[1]}") as process,
    ):
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[0].endswith("stopped\n")
        assert process.returncode == 0
    assert "0 ended by Ctrl-C or SIGTERM" in " ".join(offline_cli("reduce", "--help").stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_reduce_adds_up_until_a_signal_ends_it(cli_json, real_server, client, open_dense, train, until, end):
    acc = open_dense("float32", [ELEMENTS], "model-1", reduction_type="SUM")
    with running("reduce", "--redis", real_server.url, "model-*") as process:
        assert lines_until(process, "reducing") == "reducing model-*; Ctrl-C stops it\n"
        until(client.pubsub_numpat)
        train(acc)
        assert until(lambda: acc.info().reducer).who.endswith(f":{process.pid}")
        # Its lease, and the parts of the sums that it keeps.
        assert cli_json("show", "model-1")["memory"]["reducer"]["keys"] == 1
        until(lambda: list(client.scan_iter("redisacc:{model-1}:sum:*")))
        process.send_signal(end)
        said, problems = process.communicate(timeout=60)
    # As of `server`: to be asked to end is no failure.
    assert (process.returncode, said) == (0, "stopped\n"), problems
    # It gave its lease back, and removed what it had stored.
    assert list(client.scan_iter("redisacc:{model-1}:reducer")) == []
    assert list(client.scan_iter("redisacc:{model-1}:sum:*")) == []


def test_reduce_refuses_a_node_of_a_single_server(cli):
    said = cli("reduce", "--node", "127.0.0.1:1")
    assert said.exit_code == 2
    assert "node='127.0.0.1:1' names a node of a Redis Cluster, but" in said.stderr
    assert "is a single server: leave it out" in said.stderr
    assert said.stdout == ""


@pytest.mark.parametrize("words", [["--max-accumulators", "0"], ["--max-accumulators", "many"], ["a", "b"], [""]])
def test_wrong_usage_of_reduce(offline_cli, words):
    said = offline_cli("reduce", *words)
    assert (said.exit_code, said.stdout) == (2, "")


@pytest.mark.thorough
@pytest.mark.parametrize(("masters", "where"), [(0, "the server"), (3, "the nodes")])
def test_a_server_and_a_reducer_together(tmp_path, train, until, masters, where):
    words = ["--cluster", str(masters)] if masters else ["--port", str(free_port())]
    with running("server", *words, "--reduce", cwd=tmp_path) as process:
        said = lines_until(process, "^  reducer ")
        assert said.endswith(f"\n  reducer  adds up large gradients next to {where}\n")
        (url,) = re.findall(r"^  URL +(\S+)", said, re.MULTILINE)
        options = {"reduction_type": "SUM", "redis": url, **({"partitions": masters} if masters else {})}
        with redisacc.ConditionalAccumulator("float32", [ELEMENTS], "w", **options) as acc:
            train(acc)
            assert until(lambda: acc.info().reducer).who.endswith(f":{process.pid}")
        process.send_signal(signal.SIGTERM)
        said, problems = process.communicate(timeout=60)
    assert process.returncode == 0, problems
    assert "Stopped. The data are in redisacc-data." in said
