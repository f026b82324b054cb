"""`redisacc server` and the frame around the commands, as processes of their own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from owners import REAL, alive, gone, run
from support.rows import every_row
from support.selection import thorough

import redisacc
from redisacc import embedded
from redisacc.embedded.addresses import free_port
from redisacc.tools import cli

pytestmark = pytest.mark.servers(*REAL)


@contextlib.contextmanager
def serving(*options, executable, cwd):
    """Run `redisacc server`; the process and what it printed at its start."""
    with run("-m", "redisacc", "server", *options, cwd=cwd, warm=True, REDISACC_SERVER=executable) as owner:
        lines = [owner.line()]
        while not lines[-1].startswith("  log "):
            lines.append(owner.line())
            if not lines[-1] and owner.process.poll() is not None:
                raise AssertionError(f"it ended: {owner.result()}")
        yield owner, lines


def redisacc_command(*options, cwd, **env):
    with run("-m", "redisacc", *options, cwd=cwd, warm=True, **env) as owner:
        return owner.result()


@contextlib.contextmanager
def client(where):
    """A client of a server at a port or URL."""
    url = where if isinstance(where, str) else f"redis://127.0.0.1:{where}/0"
    with contextlib.closing(redis.Redis.from_url(url, decode_responses=True)) as connection:
        yield connection


@pytest.fixture
def port():
    return free_port()


def test_it_says_what_one_needs(executable, server_name, tmp_path, port):
    with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        assert re.match(r"Valkey [\d.]+ " if server_name == "valkey" else r"Redis [\d.]+ ", text)
        assert f"export REDISACC_URL=redis://127.0.0.1:{port}/0\n" in text
        assert "redisacc-data\n" in text
        assert max(map(len, lines)) <= 80
        assert "  crash    loses about a minute (snapshots); with --durable, two seconds\n" in text
        with client(port) as connection:
            assert connection.config_get("appendonly") == {"appendonly": "no"}
        owner.kill(signal.SIGINT)
        assert owner.result()[0] == 0


@pytest.mark.thorough
def test_it_says_when_snapshots_fail(any_executable, tmp_path, port):
    with serving("--port", str(port), executable=any_executable, cwd=tmp_path) as (owner, _):
        blocked = tmp_path / "redisacc-data" / "dump.rdb"
        (blocked / "full").mkdir(parents=True)
        with client(port) as connection:
            connection.bgsave()
            assert owner.error_line() == "The server cannot save its data, and a crash would lose them. See its log."
            (blocked / "full").rmdir()
            blocked.rmdir()
            connection.bgsave()
            assert owner.error_line() == "The server saves its data again."
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0


@pytest.mark.parametrize("how", thorough([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], usual=[signal.SIGTERM]))
def test_signals_stop_it_and_the_data_are_kept(executable, tmp_path, how, port):
    for count in (1, 2):
        with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, _):
            with client(port) as connection:
                pid = connection.info()["process_id"]
                assert connection.incr("starts") == count
            os.killpg(owner.pid, how)  # the whole group, as the terminal does
            status, out, err = owner.result()
            assert (status, err) == (0, "")
            assert "Stopped. The data are in redisacc-data." in out
            assert not alive(pid)
    assert (tmp_path / "redisacc-data").is_dir()


def test_killed_command_takes_the_server_with_it_and_an_ignored_hangup_stays_ignored(any_executable, tmp_path, port):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with serving("--port", str(port), executable=any_executable, cwd=tmp_path) as (owner, _):
            owner.kill(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                owner.process.wait(1)
            with client(port) as connection:
                pid = connection.info()["process_id"]
            owner.kill()
            assert gone(pid, 5)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_default_port_is_the_one_of_the_default_url(any_executable, tmp_path):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("something listens on port 6379")
    with serving(executable=any_executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        assert "redis://127.0.0.1:6379/0   (the default)\n" in text
        assert "REDISACC_URL" not in text
        assert max(map(len, lines)) <= 80
        with client(6379) as connection:
            assert connection.ping()
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0


def test_socket_and_directory(any_executable, tmp_path):
    # Relative, so that the path in pytest's long folder isn't too long for a socket.
    with serving("--socket", "../s", "--dir", "my data", executable=any_executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        assert "my data\n" in text
        url = re.search(r"export REDISACC_URL=(\S+)", text)
        assert url is not None
        with client(url[1]) as connection:
            assert connection.info()["tcp_port"] == 0
        assert (tmp_path / "my data" / "server.log").exists()
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0
    assert not (tmp_path.parent / "s").exists()


def test_what_is_in_use(any_executable, tmp_path, port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = taken.getsockname()[1]
        found = redisacc_command("server", "--port", str(other), cwd=tmp_path, REDISACC_SERVER=any_executable)
    assert found == (1, "", f"Error: port {other} is already in use on this machine: choose another one\n")
    with embedded.Server(tmp_path / "redisacc-data", executable=any_executable) as first:
        command = ("server", "--port", str(port))
        status, out, err = redisacc_command(*command, cwd=tmp_path, REDISACC_SERVER=any_executable)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert f"in use by {first.url}" in err


def test_server_that_ends_by_itself(executable, tmp_path, port):
    with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, _):
        with client(port) as connection:
            os.kill(connection.info()["process_id"], signal.SIGKILL)
        status, _, err = owner.result()
        assert status == 1
        assert err == (
            "Error: the server was killed by SIGKILL, by somebody or by the kernel for lack of memory, which `dmesg` "
            "reports. It has logged nothing since it was ready\n"
        )


@every_row(
    "options, status, message, server",
    [
        (["--port", "1", "--socket", "s"], 2, "give --port or --socket, not both", ""),
        (["--cluster", "3", "--socket", "s"], 2, "give --cluster or --socket, not both", ""),
        *((["--port", port], 2, "--port", "") for port in ("0", "65536", "http")),
        *((options, 2, "", "") for options in (["surplus"], ["--replicas", "1"], ["--cluster", "0"])),
        (["--port", "6380"], 1, "Error: ", "/no/such/server"),
        (["--socket", "x" * 200], 1, "Error: ", ""),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, options, status, message, server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDISACC_SERVER", server)
    found = CliRunner().invoke(cli.main, ["server", *options])
    assert (found.exit_code, found.stdout) == (status, "")
    assert message in found.stderr
    assert status == 2 or found.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.log"))


# The frame


def test_the_version_is_the_same_however_it_is_called(tmp_path):
    said = f"redisacc, version {redisacc.__version__}\n"
    assert redisacc_command("--version", cwd=tmp_path) == (0, said, "")
    path = Path(sys.executable).parent / "redisacc"
    if path.exists():
        assert subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout == said
    status, _, err = redisacc_command("sevrer", cwd=tmp_path)
    assert status == 2
    assert "sevrer" in err
