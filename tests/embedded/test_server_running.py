"""The embedded server, with real processes: it starts, answers, stops, and starts again."""

import contextlib
import shutil
import socket
import threading

import pytest
from owners import REAL, alive, ask
from support.rows import every_row

from redisacc.embedded import Server
from redisacc.errors import ServerError

pytestmark = pytest.mark.servers(*REAL)


def bound(address, family, port):
    """Whether somebody listens at this port of an address of this machine. None if it has no such address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing, only asks the routing table
        except OSError:
            return None
        own = probe.getsockname()[0]
    try:
        socket.create_connection((own, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_running_server(executable, server_name):
    server = Server(executable=executable)
    assert not server.running
    with server:
        assert server.running
        with contextlib.closing(server.client(decode_responses=True, db=3)) as client:
            client.set("a", "b")
            assert client.get("a") == "b"
            assert client.connection_pool.connection_kwargs["db"] == 3
            info = client.info()
            expected = {"maxmemory-policy": "noeviction", "protected-mode": "yes", "dir": str(server.dir.resolve())}
            assert {name: client.config_get(name)[name] for name in expected} == expected
        assert info["process_id"] == server.pid
        assert info["tcp_port"] == server.port
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert server.version.split()[0] == ("Valkey" if server_name == "valkey" else "Redis")
        assert server.version.split()[1] == info.get("valkey_version", info["redis_version"])
        assert "eady to accept connections" in server.log_tail()
        # Only loopback is bound, that of IPv6 too where there is one.
        assert bound("127.0.0.1", socket.AF_INET, server.port)
        assert bound("::1", socket.AF_INET6, server.port) in (True, None)
        assert not bound("192.0.2.1", socket.AF_INET, server.port)
        pid = server.pid
        server.start()
        assert server.pid == pid
    server.stop()
    assert not server.running
    assert not alive(pid)
    assert "ended" in repr(server)
    with pytest.raises(ServerError):
        server.pid  # noqa: B018
    assert server.log_tail()


@every_row("free, least", [(2**40, 2**30), (2**30, 2**28), (10**8, 2**26), (0, 2**26)])
def test_the_append_only_file_leaves_room_on_a_small_disk(executable, tmp_path, monkeypatch, free, least):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**41, 0, free))
    with Server(tmp_path / str(free), durable=True, executable=executable) as server:
        assert ask(server, "CONFIG", "GET", "auto-aof-rewrite-min-size")["auto-aof-rewrite-min-size"] == str(least)


def test_before_the_first_start_there_is_nothing_to_ask(any_executable):
    server = Server(executable=any_executable)
    for name in ("url", "port", "pid", "dir", "version"):
        with pytest.raises(ServerError, match=r"has not been started: call start\(\) or use a with block"):
            getattr(server, name)
    with pytest.raises(ServerError):
        server.client()
    server.stop()
    assert "not started" in repr(server)


def test_restart_keeps_the_port(any_executable):
    server = Server(executable=any_executable)
    with server:
        url = server.url
    assert server.url == url
    with server:
        assert server.url == url
    with socket.create_server(("127.0.0.1", int(url.split(":")[2].split("/")[0]))), server:
        assert server.url != url
        assert ask(server, "PING")


def test_concurrent_starts_make_one_server(any_executable):
    server = Server(executable=any_executable)
    pids = []

    def start():
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
