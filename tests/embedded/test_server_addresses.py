"""The embedded server: its ports and sockets, which may be in use."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest
from owners import REAL, ask, program
from support.rows import every_row
from support.until import until

from redisacc.embedded import Server
from redisacc.embedded.addresses import free_port
from redisacc.errors import InvalidArgumentError, ServerError

pytestmark = pytest.mark.servers(*REAL)


# Ports


def test_port_in_use_by_another_server(executable, any_executable):
    # The other one answers PING too: it must not be taken for ours.
    port = free_port()
    with Server(port=port, executable=any_executable) as first:
        assert first.port == port
        second = Server(port=port, executable=executable)
        with pytest.raises(ServerError, match=f"port {port} is already in use") as caught:
            second.start()
        assert "\n" not in str(caught.value)
        assert not second.running
        assert first.running


def test_port_in_use_on_ipv6_only(executable):
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is already in use"):
            Server(port=port, executable=executable).start()


def test_free_port_is_free_on_ipv6_too(monkeypatch):
    real = socket.socket
    refused = []

    class Taken(real):
        def bind(self, address):
            if self.family == socket.AF_INET6 and len(refused) < 3:
                refused.append(address[1])
                raise OSError(errno.EADDRINUSE, "taken")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Taken)
    port = free_port()
    assert len(refused) == 3
    assert port != refused[-1]


# A server before which another process takes the port, as often as there are lines in a file.
ROBBED = """
    #!/bin/sh
    [ "$1" = --version ] && exec {executable} --version
    if [ -s {left} ]; then
        sed -i 1d {left}
        port=$(echo "$*" | sed -E 's/.*--port ([0-9]+).*/\\1/')
        {python} -c "
    import socket, time
    with socket.create_server(('127.0.0.1', $port)):
        open('{taken}', 'w').close()
        time.sleep(2)" &
        while [ ! -e {taken} ]; do sleep 0.01; done
        rm {taken}
    fi
    exec {executable} "$@"
"""


@pytest.mark.parametrize("times", [2, pytest.param(99, marks=pytest.mark.thorough)])
def test_port_that_is_taken_between_look_and_bind(executable, tmp_path, times):
    left = tmp_path / "left"
    left.write_text("once\n" * times)
    text = ROBBED.format(executable=executable, left=left, taken=tmp_path / "taken", python=sys.executable)
    robbed = Server(executable=program(tmp_path / "robbed", text))
    if times == 99:
        with pytest.raises(ServerError, match="already in use"):
            robbed.start()
        return
    with robbed as server:
        assert left.read_text() == ""
        assert ask(server, "PING")


@every_row("port", [0, -1, 65536, 1.5, "6379", True])
def test_bad_port(port):
    with pytest.raises(InvalidArgumentError, match="port"):
        Server(port=port)


# Sockets


@pytest.fixture
def folder():
    """A folder with a short path: a socket's may have 107 bytes, and pytest's own come close."""
    path = Path(os.path.realpath("/tmp"), f"ra-{os.getpid()}-{time.monotonic_ns()}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def test_socket(executable, folder):
    path = folder / "a %41?#b.sock"
    with Server(socket=path, executable=executable) as server:
        assert server.port is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert server.url.startswith("unix:///")
        assert ask(server, "PING")
        with contextlib.closing(server.client()) as client:
            info = client.info()
        assert info["tcp_port"] == 0
        assert info["process_id"] == server.pid
        with pytest.raises(ServerError, match="already in use: choose another path"):
            Server(socket=path, executable=executable).start()
        assert ask(server, "PING")
    assert not path.exists()


def test_relative_socket_and_directory_stay_where_they_were_meant(any_executable, folder, monkeypatch):
    monkeypatch.chdir(folder)
    server = Server("data", socket="s", executable=any_executable)
    monkeypatch.chdir("/")
    with server:
        assert (folder / "s").is_socket()
        assert (folder / "data" / "server.log").exists()
        assert ask(server, "PING")


def test_socket_left_behind_by_a_crash(executable, folder):
    server = Server(socket=folder / "s", executable=executable)
    with server:
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running)
        assert (folder / "s").exists()
        server.start()
        assert ask(server, "PING")


def test_what_cannot_be_a_socket(any_executable, folder):
    with pytest.raises(ServerError, match="No such file"):
        Server(socket=folder / "missing" / "s", executable=any_executable).start()
    (folder / "precious").write_text("data")
    with pytest.raises(ServerError, match="is not a socket"):
        Server(socket=folder / "precious", executable=any_executable).start()
    assert (folder / "precious").read_text() == "data"


def test_bad_socket():
    with pytest.raises(InvalidArgumentError, match="longer"):
        Server(socket="/tmp/" + "x" * 200)
    with pytest.raises(InvalidArgumentError, match="give a port or a socket, not both"):
        Server(socket="/tmp/s", port=6379)
