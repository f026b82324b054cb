"""`redisacc run --hosts`: hosts that come, die, return and are too many. Each has a loopback address of its own."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from several_hosts import PORT, SECRET, all_trained, kill, number_of, says, training
from support.rows import every_row

from redisacc.tools.cli import main
from redisacc.tools.cli.run import run as run_command
from redisacc.tools.launch.hosts.agreement import Agreement, Terms

pytestmark = [
    pytest.mark.slow,
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]


@pytest.mark.parametrize(
    "victim", ["a", pytest.param("b", marks=pytest.mark.thorough)], ids=["meeting_host", "another"]
)
def test_a_host_that_dies_takes_its_place_again(host, victim):
    script = training(until=60)
    runs = {name: host(name, 2, script=script) for name in "ab"}
    for run in runs.values():
        run.seen("step 20")
    (url,) = re.findall("with the password in REDISACC_PASSWORD: redisacc ls --redis '(.*)'", runs["a"].err)
    listed = CliRunner().invoke(main, ["ls", "--redis", url], env={"REDISACC_PASSWORD": SECRET})
    assert "hosts" in listed.output
    number = number_of(runs[victim])
    kill(runs[victim])
    runs[victim] = host(victim, 2, script=script)
    all_trained(runs, 60)
    assert number_of(runs[victim]) == number
    for run in runs.values():
        assert f"redisacc | host {victim} has returned\n" in run.err
    (other,) = {"a", "b"} - {victim}
    # They start together, so either may come first.
    came = re.findall(rf"redisacc \| host ([ab]) has joined at {host.meet} \((\d) of 2\)\n", runs[other].err)
    assert {name for name, _ in came[:2]} == {"a", "b"}
    assert [number for _, number in came[:2]] == ["1", "2"]
    ready = "all 2 hosts have joined, and the cluster of 2 nodes is ready: workers 0 to 1"
    assert f"redisacc | {ready}\n" in runs[other].err


# Who may come. These hosts have no nodes, because there is a server.

WAIT = "import os, signal; print('ready', os.environ['REDISACC_RESTARTED']); signal.pause()"


@pytest.fixture
def waiting(host, real_server):
    """Starts a host whose processes do nothing."""
    return lambda name, hosts, *options, **more: host(
        name, hosts, "--redis", real_server.url, *options, script=WAIT, **more
    )


def test_a_host_too_many_and_another_training_are_refused(waiting, host):
    runs = [waiting(name, 2) for name in "ab"]
    for run in runs:
        run.seen("ready")
    refused = {
        "host c is one too many for the 2 hosts": waiting("c", 2),
        f"host a takes part in the run at {host.meet} already, and its command runs. If this is another host, "
        "give it its own --host-name; another run needs another port in --meet": waiting("a", 2),
        "it was started with `--hosts 2 --workers 1 --replicas 0 --redis URL -- ": waiting("c", 3),
        "Give the same command on every host, and another port in --meet for another run": host("c", 2, script=WAIT),
        "has another password: give the same one on every host": waiting("c", 2, REDISACC_PASSWORD="wrong"),
        "has a password: give the same one on every host": waiting("c", 2, REDISACC_PASSWORD=""),
    }
    for text, run in refused.items():
        assert run.code() == 1
        assert text in run.err
        assert "Traceback" not in run.err
    for run in runs:
        assert run.process.poll() is None
        assert "missing" not in run.err


def test_hosts_return_in_any_order_when_the_meeting_host_is_gone(waiting):
    """Those that are back first find an empty meeting point, and wait until the one that lives has told it all."""
    runs = {name: waiting(name, 3) for name in "abc"}
    for run in runs.values():
        run.seen("ready 0")
    numbers = {name: number_of(run) for name, run in runs.items()}
    runs["b"].signal(signal.SIGSTOP)
    for name in "ca":
        kill(runs[name])
        runs[name] = waiting(name, 3)
    for name in "ca":
        says(runs[name], "waiting for 1 of 3 hosts; a, c have joined")
    runs["b"].signal(signal.SIGCONT)
    for name in "ca":
        # Its processes are not the first in their places.
        runs[name].seen("ready 1")
        says(runs["b"], f"host {name} has returned")
    assert {name: number_of(run) for name, run in runs.items()} == numbers


def test_the_meeting_host_dies_while_hosts_gather(waiting):
    runs = {name: waiting(name, 3) for name in "ab"}
    for run in runs.values():
        says(run, "waiting for 1 of 3 hosts; a, b have joined")
    kill(runs["a"])
    says(runs["b"], "does not answer")
    for name in "ac":
        runs[name] = waiting(name, 3)
    for run in runs.values():
        run.seen("ready")


def test_a_host_that_is_started_a_second_time_while_the_meeting_host_is_gone(waiting):
    """Both find an empty meeting point; the one whose processes work stays."""
    runs = {name: waiting(name, 3) for name in "abc"}
    for run in runs.values():
        run.seen("ready")
    runs["b"].signal(signal.SIGSTOP)
    for name in "ac":
        kill(runs.pop(name))
    again = waiting("b", 3)
    runs["a"] = waiting("a", 3)
    says(again, "waiting for 1 of 3 hosts; a, b have joined")
    runs["b"].signal(signal.SIGCONT)
    assert again.code() == 1
    assert "another command runs as host b: each host needs its own --host-name" in again.err
    runs["a"].seen("ready")
    assert runs["b"].process.poll() is None


DIES = """
import os, pathlib, time
print("ready")
while not pathlib.Path("die").exists():
    time.sleep(0.05)
os.environ["REDISACC_WORKER_NUMBER"] == "0" and exit(1)
print("lives")
while True:
    time.sleep(0.05)
"""


def test_no_process_is_given_up_while_another_host_is_gone(host, real_server, tmp_path):
    """It may have died of that."""
    options = ("--redis", real_server.url, "--restarts", 0)
    runs = {name: host(name, 2, *options, script=DIES) for name in "ab"}
    for run in runs.values():
        run.seen("ready")
    kill(runs["b"])
    says(runs["a"], "host b is missing")
    (tmp_path / "die").touch()
    says(runs["a"], "worker 0 ended with exit code 1; it restarts", 2)
    (tmp_path / "die").unlink()
    runs["b"] = host("b", 2, *options, script=DIES)
    says(runs["a"], "host b has returned")
    (tmp_path / "die").touch()
    assert runs["a"].code() == 1
    assert "a process on host a was given up (exit code 1)" in runs["a"].err
    assert runs["b"].code() == 1


def test_a_host_joins_with_more_workers_and_leaves(waiting):
    runs = [waiting(name, 2) for name in "ab"]
    for run in runs:
        run.seen("ready")
    guest = waiting("c", 2, "--join")
    assert guest.seen("ready 1")
    assert "runs worker 2 on this host" in guest.err
    says(runs[1], "host c joins with worker 2")
    guest.signal(signal.SIGINT)
    assert guest.code() == 130
    says(runs[1], "host c is missing\n")
    assert runs[0].process.poll() is None


def test_a_process_that_is_given_up_ends_the_run_on_all_hosts(host, real_server):
    script = "import os, signal, sys; os.environ['REDISACC_WORKER_NUMBER'] == '1' or signal.pause(); sys.exit(3)"
    runs = {name: host(name, 2, "--redis", real_server.url, "--restarts", 0, script=script) for name in "ab"}
    assert sorted(run.code() for run in runs.values()) == [1, 3]
    for run in runs.values():
        assert re.search(r"a process on host [ab] was given up \(exit code 3\): the run ends on all hosts", run.err)


def test_a_host_that_never_comes_is_waited_for_with_words(host):
    runs = [host(name, 3, script=WAIT) for name in "ab"]
    for run in runs:
        says(run, "waiting for 1 of 3 hosts; a, b have joined at")
        assert f"check that the same command runs and can reach port {PORT} on" in run.err
        assert f"and {PORT + 1} and {PORT + 10001} on all of them" in run.err
    for run in runs:
        run.signal(signal.SIGINT)
        assert run.code() == 130


def test_what_answers_is_no_meeting_point(waiting, host, real_server):
    run = waiting("b", 2, meet=f"127.0.0.1:{real_server.port}", REDISACC_PASSWORD="")
    says(run, f"waiting for the host that has the meeting point at 127.0.0.1:{real_server.port}")
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_an_earlier_meeting_point_may_still_be_ending(waiting, host):
    with socket.socket() as earlier:
        earlier.bind((host.address("a"), PORT))
        earlier.listen()
        run = waiting("a", 1)
        earlier.accept()[0].close()
    run.seen("ready")
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_no_node_has_a_port_next_to_the_meeting_point(waiting, host):
    """A node could not have it: it is too high. But these hosts start none."""
    run = waiting("a", 1, meet=f"{host.address('a')}:60000")
    run.seen("ready")
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_nobody_listens_where_hosts_meet(waiting):
    run = waiting("b", 2)
    says(run, "It is on the host that has this address: does the command run there")
    run.signal(signal.SIGINT)
    assert run.code() == 130


def test_a_port_that_is_in_use(host):
    with socket.socket() as taken:
        taken.bind((host.address("a"), PORT + 1))
        taken.listen()
        runs = [host("a", 1, script=WAIT)]
        assert runs[0].code() == 1
    where = f"port {PORT + 1} of {host.address('a')}"
    told = "is in use, by another run or another program: choose another --node-port, or another port in --meet"
    assert f"{where} {told}" in runs[0].err


def test_an_address_that_is_not_this_hosts(host):
    run = host("a", 1, "--address", "192.0.2.1", script=WAIT)
    assert run.code() == 1
    assert "192.0.2.1 is no address of this host: give its own as --address" in run.err


def test_a_training_that_has_just_ended(waiting, real_server):
    terms = Terms(2, 1, 0, chief=False, nodes=False, program=f"{Path(sys.executable).name} script.py")
    ended = Agreement("0" * 32, 1, "finished", terms.text, ())
    with redis.Redis(port=real_server.port) as client:
        client.hset("redisacc:meeting", mapping=ended.fields)
    run = waiting("b", 2, meet=f"127.0.0.1:{real_server.port}", REDISACC_PASSWORD="")
    assert run.code() == 1
    assert "has just ended: wait a few seconds" in run.err
    with redis.Redis(port=real_server.port) as client:
        client.delete("redisacc:meeting")


def test_a_name_that_is_the_loopback_interface_here(monkeypatch):
    """As Debian writes the name of a machine into /etc/hosts."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 6400))])
    told = (
        "host1 is 127.0.1.1 on this machine, which other machines cannot reach: give --meet with the address that the"
    )
    code, said = refused("--hosts", 1, "--meet", "host1:6400", REDISACC_PASSWORD="secret")
    assert (code, told in said) == (1, True)


@pytest.mark.thorough
def test_the_directory_of_another_training(tmp_path, host):
    script = training(until=60)
    other = host("b", 1, "--server-dir", tmp_path / "data", script=script, meet=f"{host.address('b')}:{PORT}")
    assert other.code(100) == 0, other.err
    runs = {name: host(name, 2, script=training(until=2000)) for name in "ab"}
    for run in runs.values():
        run.seen("step 20")
    kill(runs["b"])
    returned = host("b", 2, "--server-dir", tmp_path / "data", script=script)
    assert returned.code() == 1
    assert re.search("holds a node of another run, .*: choose another directory, or remove", returned.err)
    runs["a"].signal(signal.SIGINT)
    assert runs["a"].code() == 130


WRONG = [
    (("--hosts", 2), "--hosts and --meet go together"),
    (("--meet", "a:1"), "--hosts and --meet go together"),
    (("--join",), "--join needs --hosts"),
    (("--replicas", 1), "--replicas needs --hosts"),
    (("--hosts", 2, "--meet", "a"), "--meet must be HOST:PORT"),
    (
        ("--hosts", 2, "--meet", "a:6400"),
        "servers that other hosts reach need a password: set REDISACC_PASSWORD to the same one on every host, or give "
        "a file that holds it as --password-file",
    ),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--address", "10.0.0.1"), "need a password"),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--address", "x"), "--address must be an IP address, not 'x'"),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--replicas", 1), "--replicas needs at least 3 hosts, not 2"),
    (("--hosts", 2, "--meet", "127.0.0.1:60000"), "a node cannot have the port 60001"),
    (
        ("--hosts", 2, "--meet", "127.0.0.1:6400", "--node-port", 6400),
        "the meeting point has port 6400, so no node can have it: see --node-port",
    ),
    (
        ("--hosts", 2, "--meet", "127.0.0.1:1", "--host-name", "a b"),
        "give it one of 1 to 64 letters, digits, dots, hyphens and underscores as --host-name",
    ),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--tls-cert", "x"), "--tls-key and --tls-ca is missing"),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--password-file", "absent"), "cannot read the password"),
    (
        ("--hosts", 2, "--meet", "127.0.0.1:1", "--server"),
        "each host starts a node: leave out --server, and see --node-port",
    ),
    (("--hosts", 2, "--meet", "127.0.0.1:1", "--first-worker", 1), "leave out --first-worker and --total-workers"),
]


@every_row("options, message", WRONG)
def test_options_that_cannot_be_right(options, message, monkeypatch):
    monkeypatch.delenv("REDISACC_PASSWORD", raising=False)
    code, said = refused(*options)
    assert code in (1, 2)
    assert message in said


def refused(*options, **env):
    """Returns the exit code of a command, and what it says."""
    done = CliRunner().invoke(run_command, ["--workers", "1", *map(str, options), "--", "true"], env=env)
    return done.exit_code, " ".join(done.output.split())
