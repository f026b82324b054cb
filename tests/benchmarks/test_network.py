"""The benchmark between hosts refuses, builds, measures and cleans up. No time is judged."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.selection import thorough
from support.until import until

from benchmarks import models
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run, default_server
from benchmarks.network import arrangements, cli, hosts
from benchmarks.network.crews import Network, host_names
from benchmarks.network.hosts import Hosts, HostsError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def own_namespaces(pid):
    return [name for name in namespaces() if name.startswith(f"{hosts.PREFIX}-{pid}-")]


@pytest.fixture(scope="module")
def can_build():
    """Skips a test where hosts cannot be built: without root, without iproute2, or in most containers."""
    if reasons := hosts.obstacles():
        pytest.skip(" ".join(reasons))
    try:
        with Hosts(["try"], 1):
            pass
    except HostsError as error:
        pytest.skip(f"the system refuses network namespaces: {error}")


@pytest.fixture
def leftovers(can_build):
    """Keeps other tests from removing what earlier runs have left behind, for a test that does it or leaves some."""
    with (Path(tempfile.gettempdir()) / "redisacc-test-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def network(can_build, tmp_path):
    """Returns a function that makes a network of two workers for workloads."""
    run = Run(quick=True, tiny=True, tensorflow=None, torch=None, server=default_server(), directory=tmp_path)
    with Hosts(host_names(2), 1) as built, contextlib.ExitStack() as stack:

        def make(workloads, kind="rounds", **settings):
            return Network(run, built, 2, kind, {**run.arrays(workloads, [2]), **settings}, stack)

        yield make


def test_invalid_options_are_refused_by_name(capsys):
    options = {"--rate": ("0", "nan", "fast"), "--workers": ("1", "3", "many"), "--only": ("dense-5MB",)}
    for option, values in {**options, "--peer": ("nobody",)}.items():
        for value in values:
            with pytest.raises(SystemExit, match="2"):
                cli.main([option, value])
            message = capsys.readouterr().err
            assert option in message
            assert value in message


@pytest.mark.parametrize(
    ("platform", "user", "path", "said"),
    [
        ("linux", 1000, os.environ["PATH"], "needs root: run this with sudo"),
        ("linux", 0, "", "Not on the PATH: ip, tc. Install iproute2"),
        ("darwin", 0, "", "Network namespaces exist only on Linux, and this is darwin."),
    ],
)
def test_where_hosts_cannot_be_built_it_says_why(monkeypatch, capsys, platform, user, path, said):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(hosts, "_run", lambda *command: pytest.fail(f"ran {command}"))
    assert cli.main([]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


SENDER = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
server.accept()[0].sendall(bytes(10**6))
"""
RECEIVER = """
import socket, sys
print(len(socket.create_connection((sys.argv[1], 5000)).makefile("rb").read()))
"""


def test_hosts_reach_each_other_and_nothing_else(can_build):
    with Hosts(["one", "two"], 0.5) as built:
        (switch,) = [name for name in own_namespaces(os.getpid()) if name.endswith("-switch")]
        queues = json.loads(subprocess.check_output(["tc", "-n", switch, "-j", "qdisc"]))
        host = json.loads(subprocess.check_output([*built.command("one"), "tc", "-j", "qdisc"]))
        limited = [queue for queue in [*queues, *host] if queue["kind"] == "tbf"]
        assert len(limited) == 3
        for queue in limited:
            # Bytes in a second, and microseconds.
            assert queue["options"]["rate"] == 0.5e9 / 8
            assert round(queue["options"]["lat"], -2) == hosts.QUEUE_MS * 1000
        routes = json.loads(subprocess.check_output([*built.command("one"), "ip", "-j", "route"]))
        assert [route["dst"] for route in routes] == ["10.77.0.0/24"]
        with subprocess.Popen([*built.command("two"), sys.executable, "-c", SENDER], stdout=subprocess.PIPE) as sender:
            sender.stdout.readline()
            receiver = [*built.command("one"), sys.executable, "-c", RECEIVER, built.address("two")]
            assert int(subprocess.check_output(receiver)) == 10**6
        traffic = built.traffic()
        assert traffic["two"]["out"] > 10**6 < traffic["one"]["in"]
        assert traffic["one"]["out"] < 10**5
    assert not own_namespaces(os.getpid())


@pytest.mark.parametrize("number", thorough([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], usual=[signal.SIGKILL]))
def test_a_run_that_is_ended_leaves_no_hosts(number, leftovers, tmp_path):
    # At this rate a round takes two seconds, so the run ends in the middle of one.
    options = ["--quick", "--rate", "0.05", "--workers", "2", "--only", "dense-4MB", "--peer", "bare"]
    command = [sys.executable, "-m", "benchmarks.network", *options, "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:

        def servers():
            assert running.poll() is None
            found = []
            for name in own_namespaces(running.pid):
                if name.endswith("-server"):
                    for pid in subprocess.check_output(["ip", "netns", "pids", name], text=True).split():
                        with contextlib.suppress(OSError):
                            if "valkey" in Path(f"/proc/{pid}/comm").read_text():
                                found.append(int(pid))
            return found

        server = until(servers, 100)[-1]
        own = own_namespaces(running.pid)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
        assert set(own) <= set(hosts.remove_leftovers())
    else:
        assert running.returncode == 130
        assert "interrupted" in errors
    assert not set(own) & set(namespaces())
    # It may wait for its parent to collect it, but runs no more.
    with contextlib.suppress(OSError):
        assert Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("key", ["bare", "nodes", "one", "after", "streamed"])
def test_steps_between_hosts_are_checked(key, damaged, network, tmp_path):
    model = models.even(3, 300_000)
    models.write(tmp_path / "models", [model], 2)
    if damaged:
        np.savez(tmp_path / "models" / model.name / "mean-1.npz", **dict.fromkeys(model.weights(), np.zeros(1)))
    here = network([], "updates", arrays=str(tmp_path / "models"), model=model.name, backward=0.01)
    peer = {**arrangements.PEERS, **arrangements.OVERLAPPING}[key](here, key)
    for _ in range(2):
        # The weights of the step before are compared.
        peer.crew.round("", repeat=1)
    with pytest.raises(BenchmarkError, match="wrong values") if damaged else contextlib.nullcontext():
        peer.crew.round("", repeat=3)
