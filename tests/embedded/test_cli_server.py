"""`redisacc server` and the frame around the commands, as processes of their own."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import redis
from owners import REAL, Owner, alive, gone, run, written
from support.selection import thorough

import redisacc
from redisacc import cli, embedded
from redisacc.cli.server import how_to_inspect
from redisacc.embedded.addresses import free_port

pytestmark = pytest.mark.servers(*REAL)


@contextlib.contextmanager
def serving(*options: str, executable: str, cwd: Path) -> Iterator[tuple[Owner, list[str]]]:
    """Run `redisacc server`; the process and what it printed at its start."""
    with run("-m", "redisacc", "server", *options, cwd=cwd, warm=True, REDISACC_SERVER=executable) as owner:
        lines = [owner.line()]
        while not lines[-1].startswith("  log "):
            lines.append(owner.line())
            if not lines[-1] and owner.process.poll() is not None:
                raise AssertionError(f"it ended: {owner.result()}")
        yield owner, lines


def redisacc_command(*options: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    with run("-m", "redisacc", *options, cwd=cwd, warm=True, **env) as owner:
        return owner.result()


def client(url: str) -> contextlib.closing[redis.Redis]:
    return contextlib.closing(redis.Redis.from_url(url, decode_responses=True))


def test_it_says_what_one_needs(executable: str, server_name: str, tmp_path: Path) -> None:
    port = free_port()
    with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        url = f"redis://127.0.0.1:{port}/0"
        assert re.match(r"Valkey [\d.]+ " if server_name == "valkey" else r"Redis [\d.]+ ", text)
        assert f"export REDISACC_URL={url}\n" in text
        assert f"  inspect  {how_to_inspect(f'-p {port}')}\n" in text
        assert "redisacc-data\n" in text
        assert max(map(len, lines)) <= 80
        assert "  crash    loses about a minute (snapshots); with --durable, two seconds\n" in text
        with client(url) as connection:
            assert connection.config_get("appendonly") == {"appendonly": "no"}
        owner.kill(signal.SIGINT)
        assert owner.result()[0] == 0


@pytest.mark.thorough
def test_durable(any_executable: str, tmp_path: Path) -> None:
    port = free_port()
    options = ["--port", str(port), "--durable"]
    for count in (1, 2):
        with serving(*options, executable=any_executable, cwd=tmp_path) as (owner, lines):
            assert "  crash    loses at most about two seconds (append-only file)" in lines
            with client(f"redis://127.0.0.1:{port}/0") as connection:
                assert connection.config_get("appendonly") == {"appendonly": "yes"}
                assert connection.incr("starts") == count
                assert written(f"redis://127.0.0.1:{port}/0")
                os.kill(connection.info()["process_id"], signal.SIGKILL)
            assert owner.result()[0] == 1


@pytest.mark.thorough
def test_it_says_when_snapshots_fail(any_executable: str, tmp_path: Path) -> None:
    port = free_port()
    with serving("--port", str(port), executable=any_executable, cwd=tmp_path) as (owner, _):
        blocked = tmp_path / "redisacc-data" / "dump.rdb"
        (blocked / "full").mkdir(parents=True)
        with client(f"redis://127.0.0.1:{port}/0") as connection:
            connection.bgsave()
            assert owner.error_line() == "The server cannot save its data, and a crash would lose them. See its log."
            (blocked / "full").rmdir()
            blocked.rmdir()
            connection.bgsave()
            assert owner.error_line() == "The server saves its data again."
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0


@pytest.mark.parametrize("how", thorough([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], usual=[signal.SIGTERM]))
def test_signals_stop_it_and_the_data_are_kept(executable: str, tmp_path: Path, how: signal.Signals) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    for count in (1, 2):
        with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, _):
            with client(url) as connection:
                pid = connection.info()["process_id"]
                assert connection.incr("starts") == count
            os.killpg(owner.pid, how)  # the whole group, as the terminal does
            status, out, err = owner.result()
            assert (status, err) == (0, "")
            assert "Stopped. The data are in redisacc-data." in out
            assert not alive(pid)
    assert (tmp_path / "redisacc-data").is_dir()


def test_killed_command_takes_the_server_with_it(any_executable: str, tmp_path: Path) -> None:
    port = free_port()
    with serving("--port", str(port), executable=any_executable, cwd=tmp_path) as (owner, _):
        with client(f"redis://127.0.0.1:{port}/0") as connection:
            pid = connection.info()["process_id"]
        owner.kill()
        assert gone(pid, 5)


def test_ignored_hangup_stays_ignored(any_executable: str, tmp_path: Path) -> None:
    port = free_port()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with serving("--port", str(port), executable=any_executable, cwd=tmp_path) as (owner, _):
            owner.kill(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                owner.process.wait(1)
            owner.kill(signal.SIGTERM)
            assert owner.result()[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_default_port_is_the_one_of_the_default_url(any_executable: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("something listens on port 6379")
    with serving(executable=any_executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        assert "redis://127.0.0.1:6379/0   (the default)\n" in text
        assert "REDISACC_URL" not in text
        assert max(map(len, lines)) <= 80
        with client("redis://localhost:6379/0") as connection:
            assert connection.ping()
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        (["redis-cli", "valkey-cli"], "redis-cli -p 7000 SMEMBERS redisacc:names"),
        (["valkey-cli"], "valkey-cli -p 7000 SMEMBERS redisacc:names"),
        ([], "redisacc ls"),
    ],
)
def test_a_client_is_mentioned_only_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: list[str], command: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name in installed else None)
    assert how_to_inspect("-p 7000") == command


def test_socket_and_directory(any_executable: str, tmp_path: Path) -> None:
    # Relative, so that the path in pytest's long folder isn't too long for a socket.
    with serving("--socket", "../s", "--dir", "my data", executable=any_executable, cwd=tmp_path) as (owner, lines):
        text = "\n".join(lines)
        assert f"  inspect  {how_to_inspect('-s ../s')}\n" in text
        assert "my data\n" in text
        url = re.search(r"export REDISACC_URL=(\S+)", text)
        assert url is not None
        with client(url[1]) as connection:
            assert connection.info()["tcp_port"] == 0
        assert (tmp_path / "my data" / "server.log").exists()
        owner.kill(signal.SIGTERM)
        assert owner.result()[0] == 0
    assert not (tmp_path.parent / "s").exists()


def test_port_in_use(executable: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = redisacc_command("server", "--port", str(port), cwd=tmp_path, REDISACC_SERVER=executable)
    assert status == 1
    assert out == ""
    assert err == f"Error: port {port} is already in use on this machine: choose another one\n"


def test_directory_in_use(any_executable: str, tmp_path: Path) -> None:
    with embedded.Server(tmp_path / "redisacc-data", executable=any_executable) as first:
        port = str(free_port())
        status, out, err = redisacc_command("server", "--port", port, cwd=tmp_path, REDISACC_SERVER=any_executable)
        assert (status, out) == (1, "")
        assert f"in use by {first.url}" in err
        assert err.count("\n") == 1


def test_server_that_ends_by_itself(executable: str, tmp_path: Path) -> None:
    port = free_port()
    with serving("--port", str(port), executable=executable, cwd=tmp_path) as (owner, _):
        with client(f"redis://127.0.0.1:{port}/0") as connection:
            os.kill(connection.info()["process_id"], signal.SIGKILL)
        status, _, err = owner.result()
        assert status == 1
        assert err == (
            "Error: the server was killed by SIGKILL, by somebody or by the kernel for lack of memory, which `dmesg` "
            "reports. It has logged nothing since it was ready\n"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    thorough(
        [
            (["--port", "1", "--socket", "s"], "give --port or --socket, not both"),
            (["--cluster", "3", "--socket", "s"], "give --cluster or --socket, not both"),
            (["--port", "0"], "--port"),
            (["--port", "65536"], "--port"),
            (["--port", "http"], "--port"),
            (["surplus"], "surplus"),
        ],
        usual=[
            (["--port", "1", "--socket", "s"], "give --port or --socket, not both"),
            (["--cluster", "3", "--socket", "s"], "give --cluster or --socket, not both"),
        ],
    ),
)
def test_wrong_usage(tmp_path: Path, options: list[str], message: str) -> None:
    status, out, err = redisacc_command("server", *options, cwd=tmp_path)
    assert (status, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_bad_server_and_bad_socket_are_one_line(tmp_path: Path) -> None:
    for options, environment in [
        (["--port", str(free_port())], {"REDISACC_SERVER": "/no/such/server"}),
        (["--socket", "x" * 200], {}),
    ]:
        status, out, err = redisacc_command("server", *options, cwd=tmp_path, **environment)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("Error: ")


# The frame


def test_version_and_help(tmp_path: Path) -> None:
    assert redisacc_command("--version", cwd=tmp_path) == (0, f"redisacc, version {redisacc.__version__}\n", "")
    status, out, err = redisacc_command("--help", cwd=tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: redisacc [OPTIONS] COMMAND")
    assert re.search(r"^  run +\S", out, re.MULTILINE)
    assert re.search(r"^  server +\S", out, re.MULTILINE)
    assert max(map(len, out.split("\n"))) <= 80


def test_help_of_the_server(tmp_path: Path) -> None:
    status, out, _ = redisacc_command("server", "--help", cwd=tmp_path)
    assert status == 0
    assert out.startswith("Usage: redisacc server [OPTIONS]")
    for word in ("--dir", "--durable", "--port", "--socket", "6379", "redisacc-data"):
        assert word in out


def test_help_imports_no_command(tmp_path: Path) -> None:
    script = (
        "import atexit, sys, redisacc.cli\n"
        "atexit.register(lambda: print(sorted(m for m in sys.modules if m.startswith('redisacc.cli'))))\n"
        "redisacc.cli.main(['--help'])\n"
    )
    with run("-c", script, cwd=tmp_path) as owner:
        status, out, _ = owner.result()
    assert status == 0
    assert out.endswith("['redisacc.cli']\n")


def test_unknown_command(tmp_path: Path) -> None:
    status, _, err = redisacc_command("sevrer", cwd=tmp_path)
    assert status == 2
    assert "sevrer" in err


def test_every_command_can_be_loaded() -> None:
    for name, (module, _) in cli.COMMANDS.items():
        command = getattr(importlib.import_module(f"redisacc.cli.{module}"), name)
        assert isinstance(command, click.Command)
        assert command.name == name


def test_the_installed_command_is_the_same(tmp_path: Path) -> None:
    path = Path(sys.executable).parent / "redisacc"
    if not path.exists():
        pytest.skip("redisacc isn't installed with its scripts")
    out = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    assert out == f"redisacc, version {redisacc.__version__}\n"
