"""`redisacc run --hosts` with what takes longer: replicas, TLS, directories, nodes that die, clocks that are wrong."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import trustme
from several_hosts import PORT, SECRET, all_trained, kill, number_of, says, servers_of
from several_hosts import training as training_of_size
from support.until import until

import redisacc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]


# Every node has a part of the weights.
training = functools.partial(training_of_size, size=100_000)


def started(host, names, *options, until=80, **more):
    """Starts these hosts, and waits until each has trained for some steps."""
    runs = {name: host(name, len(names), *options, script=training(until), **more) for name in names}
    for run in runs.values():
        run.seen("step 20")
    return runs


def node(host, name):
    """Returns a client of a host's node."""
    return redis.Redis(host=host.address(name), port=PORT + 1, password=SECRET)


@pytest.mark.parametrize("victim", ["a", "c"], ids=["meeting_host", "another"])
def test_replicas_take_over_from_a_host_that_is_gone(host, victim):
    """The training does not wait for the host's data, and its nodes are a part of the cluster again."""
    runs = started(host, "abc", "--replicas", 1, until=300)
    number = number_of(runs[victim])
    kill(runs[victim])
    others = [run for name, run in runs.items() if name != victim]
    runs[victim] = host(victim, 3, "--replicas", 1, script=training(300))
    for run in others:
        says(run, f"host {victim} has returned")
    assert number_of(runs[victim]) == number
    all_trained(runs, 300)
    ready = "all 3 hosts have joined, and the cluster of 6 nodes is ready: workers 0 to 2"
    for run in others:
        assert ready in run.err
        assert "has lost this run" not in run.err


def test_a_node_that_dies_is_started_again(host):
    runs = started(host, "ab", until=150)
    (node,) = servers_of(runs["b"])
    os.kill(node, signal.SIGKILL)
    says(runs["b"], "the node has restarted as process")
    all_trained(runs, 150)
    for run in runs.values():
        assert not re.search(r"host \w is missing", run.err)


def test_nodes_that_are_killed_while_they_start_again(host, broken):
    runs = started(host, "abc", "--replicas", 1, until=300)
    broken.touch()
    for node in servers_of(runs["b"]):
        os.kill(node, signal.SIGKILL)
    for name in ("node", "replica"):
        says(runs["b"], f"the {name} could not be restarted: ", 2)
    broken.unlink()
    for name in ("node", "replica"):
        says(runs["b"], f"the {name} has restarted as process")
    all_trained(runs, 300)


def test_a_host_returns_with_another_address(host):
    """As a pod of Kubernetes does."""
    runs = started(host, "ab", until=150)
    kill(runs["b"])
    runs["b"] = host("b", 2, "--address", host.address("x"), script=training(150))
    says(runs["a"], "host b has returned")
    all_trained(runs, 150)


def test_processes_of_a_host_that_returns_start_when_all_nodes_accept_it(host):
    """The other nodes have agreed meanwhile that its node has failed, so they refuse requests for a while."""
    runs = started(host, "abc", until=150)
    kill(runs["c"])
    says(runs["a"], "host c is missing")
    for name in "ab":
        with node(host, name) as client:
            until(lambda client=client: "cluster_state:fail" in str(client.execute_command("CLUSTER", "INFO")))
    runs["c"] = host("c", 3, script=training(150))
    all_trained(runs, 150)
    assert "Traceback" not in runs["c"].err


def test_a_meeting_point_that_dies_is_started_again(host):
    runs = started(host, "ab", until=150)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in servers_of(runs["a"])}
    (meeting,) = [pid for pid, command in commands.items() if f":{PORT}" in command and "cluster" not in command]
    os.kill(meeting, signal.SIGKILL)
    says(runs["a"], "the meeting point has restarted as process")
    all_trained(runs, 150)
    for run in runs.values():
        assert not re.search(r"host \w is missing", run.err)


def test_all_hosts_die_and_directories_bring_the_training_back(host, tmp_path):
    for number in range(2):
        runs = {name: host(name, 2, "--server-dir", tmp_path / name, script=training(150)) for name in "ab"}
        if number == 0:
            for run in runs.values():
                run.seen("step 20")
            with redisacc.Parameters(
                "hosts", redis=f"redis+cluster://:{quote(SECRET)}@{host.address('a')}:{PORT + 1}"
            ) as found:
                until(lambda found=found: found.step() > 20)
            for name in "ab":
                with node(host, name) as client:
                    until(lambda client=client: not client.info("persistence")["aof_buffer_length"])
            for run in runs.values():
                kill(run)
    all_trained(runs, 150)
    # They have not begun from the first step.
    assert "step 20" not in runs["a"].out + runs["b"].out


def test_another_host_takes_the_place_of_one_that_is_gone(host):
    runs = started(host, "ab", until=200)
    number = number_of(runs["b"])
    kill(runs.pop("b"))
    says(runs["a"], "host b is missing; the same command on it takes its place again, and on another host with --join")
    runs["c"] = host("c", 2, "--join", script=training(200))
    all_trained(runs, 200)
    assert number_of(runs["c"]) == number
    assert "host c takes the place of host b" in runs["a"].err


def test_tls_between_hosts(host, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in "ab":
        issued = authority.issue_cert(f"{name}.example.org")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}-key.pem")

    def options(name):
        files = {"cert": f"{name}.pem", "key": f"{name}-key.pem", "ca": "ca.pem"}
        return [part for kind, file in files.items() for part in (f"--tls-{kind}", tmp_path / file)]

    (tmp_path / "password").write_text("another\n")
    file = ("--password-file", tmp_path / "password")
    runs = {name: host(name, 2, *options(name), *file, script=training(40)) for name in "ab"}
    without = host("b", 2, *file, script=training(40))
    says(without, "waiting for the meeting point at")
    without.signal(signal.SIGINT)
    assert without.code() == 130
    all_trained(runs, 40)


WRONG_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, found);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) found->tv_sec += SECONDS;
    return status;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("wrong", [60, -60])
def test_the_clock_of_a_host_is_wrong_by_a_minute(host, tmp_path, wrong):
    library = tmp_path / "clock.so"
    (tmp_path / "clock.c").write_text(WRONG_CLOCK)
    command = ["cc", "-shared", "-fPIC", f"-DSECONDS=({wrong})", "-o", library, tmp_path / "clock.c", "-ldl"]
    subprocess.run(command, check=True)
    runs = {name: host(name, 2, script=training(150), LD_PRELOAD=str(library) if name == "b" else "") for name in "ab"}
    for run in runs.values():
        run.seen("step 20")
    # It also counts while a host returns.
    kill(runs["b"])
    runs["b"] = host("b", 2, script=training(150), LD_PRELOAD=str(library))
    says(runs["a"], "host b has returned")
    all_trained(runs, 150)
    assert runs["a"].err.count("host b is missing") == 1


def test_two_trainings_on_the_same_hosts(host):
    """They meet at different ports, and their nodes have the ports after those."""
    other = f"{host.address('a')}:{PORT + 10}"
    runs = {name: host(name, 2, script=training(40)) for name in "ab"}
    more = {name: host(name, 2, meet=other, script=training(40)) for name in "ab"}
    all_trained(runs, 40)
    all_trained(more, 40)
    assert f"has joined at {other} (2 of 2)" in more["a"].err
