"""The embedded server: its data outlive it, in a directory that one server has at a time."""

import os
import signal
import socket
import stat

import pytest
from owners import REAL, ask, executable_of, gone, program, run
from support.until import until

from redisacc.embedded import Server
from redisacc.embedded.data_directory import DataDirectory, DirectoryInUseError
from redisacc.errors import ServerError

pytestmark = pytest.mark.servers(*REAL)


def test_a_new_directory_is_private_and_may_have_an_awkward_name(executable, tmp_path):
    directory = tmp_path / "deep" / "--a \"b\" 'c' $(touch d) \\n;"
    for value in (None, "1"):
        with Server(directory, executable=executable) as server:
            assert server.dir == directory
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert ask(server, "GET", "a") == value
            ask(server, "SET", "a", "1")
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_existing_directory_keeps_its_mode(any_executable, tmp_path):
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with Server(directory, executable=any_executable):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert directory.exists()


def test_temporary_directory_goes_with_the_server(executable):
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
        until(lambda: not server.running)
    assert not server.dir.exists()


def test_directory_in_use(executable, tmp_path):
    with Server(tmp_path, executable=executable) as first:
        ask(first, "SET", "a", "1")
        with pytest.raises(ServerError, match=f"in use by {first.url} .process {first.pid}"):
            Server(tmp_path, executable=executable).start()
        ask(first, "SET", "b", "2")
    with Server(tmp_path, executable=executable) as second:
        assert ask(second, "MGET", "a", "b") == ["1", "2"]


def test_directory_stays_locked_as_long_as_the_server_lives(any_executable, tmp_path):
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
    script = """import sys; from redisacc.embedded import Server
Server('data', executable=sys.argv[1], port=int(sys.argv[2])).start()"""
    with socket.create_server(("127.0.0.1", 0)) as asked:
        asked.settimeout(60)
        with run("-c", script, str(deaf), str(asked.getsockname()[1]), cwd=tmp_path) as owner:
            until((tmp_path / "pid").exists)
            pid = int((tmp_path / "pid").read_text())
            # It asks the server whether it is ready, so it has told the guard which one that is.
            asked.accept()[0].close()
            owner.kill()
            owner.result()
            with pytest.raises(ServerError, match="in use by"):
                Server(tmp_path / "data", executable=any_executable).start()
            (tmp_path / "end").touch()
            assert gone(pid)
    with Server(tmp_path / "data", executable=any_executable) as server:
        assert ask(server, "PING")


def test_starting_server_is_not_taken_for_the_previous_one(tmp_path):
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


def test_redis_62_does_not_pass_over_newer_data(any_executable, tmp_path):
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


def test_directory_that_cannot_be_one(any_executable, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="file"):
        Server(tmp_path / "file", executable=any_executable).start()
    with pytest.raises(ServerError, match="file"):
        Server(tmp_path / "file" / "below", executable=any_executable).start()


def test_long_log_is_set_aside(any_executable, tmp_path):
    (tmp_path / "server.log").write_bytes(b"x" * ((1 << 20) + 1))
    with Server(tmp_path, executable=any_executable) as server:
        assert "x" not in server.log_tail(1000).split("\n")
    assert (tmp_path / "server.log").stat().st_size < 10_000
    assert (tmp_path / "server.log.1").stat().st_size > 1 << 20
    with Server(tmp_path, executable=any_executable) as server:
        # Only the lines of this run, although the file holds those of the last one too.
        assert server.log_tail(1000).count("eady to accept connections") == 1
    assert (tmp_path / "server.log").read_text().count("eady to accept connections") == 2
