"""The embedded server: programs that are none, that end, hang or never answer."""

import os
import signal
import sys
import tempfile
import time

import pytest
from owners import OWNER, REAL, alive, ask, gone, group, program, run

from redisacc.embedded import Server
from redisacc.embedded.data_directory import DataDirectory
from redisacc.errors import ServerError

pytestmark = pytest.mark.servers(*REAL)


def leaves_nothing(server, monkeypatch, scratch, **options):
    """Start, expect an error, and check that nothing is left behind. Returns the error's text."""
    scratch.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(ServerError) as caught:
        server.start(**options)
    assert not server.running
    assert list(scratch.iterdir()) == []
    return str(caught.value)


def test_programs_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("plain text")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF\x00garbage" * 100)
    garbage.chmod(0o755)
    silent = program(tmp_path / "silent", "#!/bin/sh\n")
    other = program(tmp_path / "other", "#!/bin/sh\necho I am something else; exit 3\n")
    old = program(tmp_path / "old", "#!/bin/sh\necho Redis server v=6.0.16 sha=0 bits=64\n")
    scratch = tmp_path / "scratch"
    for path, reason in [
        (tmp_path / "missing", "no such program"),
        (tmp_path / "text", "no such program"),
        (garbage, "cannot be executed"),
        (silent, "is not a Redis or Valkey server"),
        (other, "I am something else"),
        (
            old,
            "Redis 6.0.16, but redisacc needs 6.2 or newer: name the path of a newer one with executable= or",
        ),
    ]:
        assert reason in leaves_nothing(Server(executable=path), monkeypatch, scratch)


def test_server_that_ends_at_once_is_quoted(tmp_path, monkeypatch):
    text = """
        #!/bin/sh
        [ "$1" = --version ] && { echo "Redis server v=7.0.0"; exit; }
        for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "complaint $i" >&2; done
        exit 5
    """
    short_lived = program(tmp_path / "short-lived", text)
    message = leaves_nothing(Server(executable=short_lived), monkeypatch, tmp_path / "scratch")
    assert "ended with exit code 5 before it was ready" in message
    assert "complaint 3\n" in message
    assert message.endswith("complaint 12")
    assert "complaint 2\n" not in message


def test_data_that_cannot_be_loaded(executable, tmp_path):
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
def test_loading_may_take_longer_than_the_timeout_while_it_goes_on(tmp_path):
    pid = str(tmp_path / "pid")
    text = FAKE.format(python=sys.executable, pid=pid, loading=3, progress=True)
    begin = time.monotonic()
    server = Server(executable=program(tmp_path / "fake", text))
    server.start(timeout=1.5)
    assert time.monotonic() - begin >= 3
    server.stop()


def test_loading_that_does_not_go_on_is_given_up(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    text = FAKE.format(python=sys.executable, pid=str(pid), loading=1000, progress=False)
    server = Server(executable=program(tmp_path / "fake", text))
    message = leaves_nothing(server, monkeypatch, tmp_path / "scratch", timeout=1.5)
    assert "has not answered for 1.5 s" in message
    assert gone(int(pid.read_text()))


def test_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
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


def test_server_that_does_not_end_is_killed(any_executable, durations, caplog):
    durations(ending=0.5)
    server = Server(executable=any_executable)
    server.start()
    pid, directory = server.pid, server.dir
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert gone(pid)
    assert not directory.exists()
    assert "does not end" in caplog.text


def test_server_that_takes_a_while_to_end_is_not_killed(tmp_path):
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
def test_no_process_is_left_when_a_server_has_ended(any_executable):
    server = Server(executable=any_executable)
    server.start()
    leaders = [server.pid, server._child.process.guard.process.pid]
    assert [*map(group, leaders)] == [[leader] for leader in leaders]
    server.stop()
    assert [*map(group, leaders)] == [[], []]


def test_hanging_server_is_killed_though_the_owner_is_gone(any_executable, tmp_path):
    hasty = "from redisacc._clock import durations; durations.ending = 2\n"
    with run("-c", hasty + OWNER, any_executable, "", cwd=tmp_path) as owner:
        pid = int(owner.line())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
        assert gone(pid, 8)
