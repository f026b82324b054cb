"""What an embedded server keeps on disk, what a crash loses, and changes from one kind of persistence to the other."""

import contextlib
import logging
import os
import shutil
import signal
import textwrap
import threading
import time

import pytest
from owners import REAL, ask, gone, run, written
from support.rows import every_row
from support.selection import thorough
from support.until import until

from redisacc.embedded import Server
from redisacc.embedded.data_directory import DataDirectory
from redisacc.errors import InvalidArgumentError, ServerError

pytestmark = pytest.mark.servers(*REAL)


def put(server, *keys):
    for key in keys:
        ask(server, "SET", key, "v")


def keys(server):
    with contextlib.closing(server.client(decode_responses=True)) as client:
        return set(client.keys())


def crash(server):
    """Kills the server itself, as a lack of memory would, once its append-only file holds all changes."""
    assert written(server.url)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.running)


def settings(server, *names):
    with contextlib.closing(server.client(decode_responses=True)) as client:
        return {name: client.config_get(name)[name] for name in names}


def test_settings_of_each_kind(executable, tmp_path):
    with Server(tmp_path, executable=executable) as server:
        names = ("appendonly", "save", "stop-writes-on-bgsave-error")
        assert settings(server, *names) == {"appendonly": "no", "save": "60 1", "stop-writes-on-bgsave-error": "no"}
    with Server(tmp_path, durable=True, executable=executable) as server:
        expected = {"appendonly": "yes", "save": "", "appendfsync": "everysec"}
        assert settings(server, *expected) == expected
    with Server(executable=executable) as server:
        assert settings(server, "appendonly", "save") == {"appendonly": "no", "save": ""}
        assert not (server.dir / "dump.rdb").exists()


def test_durable_needs_a_directory():
    with pytest.raises(InvalidArgumentError, match="durable=True needs dir="):
        Server(durable=True)


@every_row("name", ["dir", "socket"])
def test_an_empty_path_is_refused(name):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is an empty path; for the current directory, give '.'"):
        Server(**{name: ""})


def test_start_says_what_a_crash_loses_and_a_stop_that_saves_says_nothing(any_executable, tmp_path, caplog):
    caplog.set_level(logging.INFO, "redisacc")
    for durable, text in ((False, "loses what changed since the last snapshot"), (True, "at most about two seconds")):
        with Server(tmp_path, durable=durable, executable=any_executable) as server:
            assert any(server.url in line and text in line for line in caplog.messages)
            put(server, "a")
    with Server(executable=any_executable):
        assert "keeps nothing on disk" in caplog.messages[-1]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_damaged_snapshot_is_an_error(executable, tmp_path):
    with Server(tmp_path, executable=executable) as server:
        put(server, "a")
    snapshot = tmp_path / "dump.rdb"
    snapshot.write_bytes(snapshot.read_bytes()[:-12])
    damaged = snapshot.read_bytes()
    for durable in (False, True):
        # The damaged file is kept, also by the change to an append-only file.
        with pytest.raises(ServerError, match="before it was ready"):
            Server(tmp_path, durable=durable, executable=executable).start()
        assert any(path.read_bytes() == damaged for path in tmp_path.rglob("*") if path.is_file())


def test_the_kinds_take_turns(executable, tmp_path):
    known = set()
    for number, durable in enumerate([True, False, False, True, True, False]):
        with Server(tmp_path, durable=durable, executable=executable) as server:
            assert keys(server) == known
            assert settings(server, "appendonly") == {"appendonly": "yes" if durable else "no"}
            put(server, f"key:{number}")
            known.add(f"key:{number}")
            if durable:
                crash(server)
        assert DataDirectory(tmp_path, temporary=False).has_append_only_file() == durable
        assert (tmp_path / "dump.rdb").exists() != durable


# Changes that are interrupted


@pytest.mark.parametrize("then", thorough([False, True], usual=[False]))
@pytest.mark.parametrize("removed", thorough(["names", "all"], usual=["all"]))
def test_server_killed_while_it_leaves_its_append_only_file(executable, tmp_path, monkeypatch, removed, then):
    with Server(tmp_path, durable=True, executable=executable) as server:
        put(server, *(f"key:{number}" for number in range(50)))
        crash(server)
    changing = Server(tmp_path, executable=executable)
    remove = shutil.rmtree

    def interrupted(directory, **_):
        # The manifest is gone, and the files that it listed are still there.
        assert (tmp_path / "dump.rdb").exists()
        assert not DataDirectory(tmp_path, temporary=False).has_append_only_file()
        if removed == "all":
            remove(directory)
        signed = (tmp_path / "server.lock").read_text()
        os.kill(int(signed.rpartition("process ")[2].rstrip(")\n")), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(
            ServerError,
            match=r"could not be saved as a snapshot .*: make room on the disk, or start the server with durable=True",
        ):
            changing.start()
    for durable in (then, not then):
        with Server(tmp_path, durable=durable, executable=executable) as server:
            assert len(keys(server)) == 50


@pytest.mark.parametrize("then", thorough([False, True], usual=[False]))
def test_server_that_fails_after_its_snapshot_was_renamed(executable, tmp_path, then):
    with Server(tmp_path, executable=executable) as server:
        put(server, "a")
    failing = tmp_path / "failing"
    failing.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {executable} --version\nkill -KILL $$\n')
    failing.chmod(0o755)
    with pytest.raises(ServerError, match="before it was ready"):
        Server(tmp_path, durable=True, executable=failing).start()
    assert not (tmp_path / "dump.rdb").exists()
    with Server(tmp_path, durable=then, executable=executable) as server:
        assert keys(server) == {"a"}


def test_append_only_file_stays_if_no_snapshot_can_be_saved(executable, tmp_path):
    with Server(tmp_path, durable=True, executable=executable) as server:
        put(server, "a")
    block_snapshots(tmp_path)
    with pytest.raises(ServerError, match=r"(?s)append-only file and could not be saved as a snapshot.*--durable"):
        Server(tmp_path, executable=executable).start()
    with Server(tmp_path, durable=True, executable=executable) as server:
        assert keys(server) == {"a"}


# Snapshots that fail or take long


def block_snapshots(directory):
    """Makes every snapshot fail, also for root: a file cannot replace a folder that isn't empty."""
    (directory / "dump.rdb").unlink(missing_ok=True)
    (directory / "dump.rdb" / "full").mkdir(parents=True)


def test_server_goes_on_when_a_snapshot_fails(executable, tmp_path, durations, caplog):
    durations(ending=1.0)
    with Server(tmp_path, executable=executable) as server:
        block_snapshots(tmp_path)
        with contextlib.closing(server.client()) as client:
            client.bgsave()
            until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        put(server, "a")
        assert keys(server) == {"a"}
    assert "did not end as it should, and changes since it last wrote" in caplog.text


# It writes its snapshot for 3 seconds after SIGTERM. Without growth of the snapshot, it would have 1 second.
SLOW = """
    #!/bin/sh
    [ "$1" = --version ] && { echo "Redis server v=7.0.0"; exit; }
    save() {
        for second in 1 2 3 4 5 6; do echo more >>"temp-$$.rdb"; sleep 0.5; done
        mv "temp-$$.rdb" dump.rdb
        exit 0
    }
    trap save TERM
    touch running
    while :; do sleep 0.1; done
"""


@pytest.fixture
def slow(tmp_path):
    path = tmp_path / "slow"
    path.write_text(textwrap.dedent(SLOW).lstrip())
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_server_is_not_killed_while_its_snapshot_grows(slow, tmp_path, durations):
    durations(ending=0.7)
    with pytest.raises(ServerError, match="has not answered"):
        Server(tmp_path / "data", executable=slow).start(timeout=0.5)
    assert (tmp_path / "data" / "dump.rdb").read_text() == "more\n" * 6


@pytest.mark.thorough
def test_server_of_a_killed_owner_is_not_killed_while_its_snapshot_grows(slow, tmp_path):
    script = """
import sys
from redisacc._clock import durations
from redisacc.embedded import Server
durations.ending = 2
Server("data", executable=sys.argv[1]).start()
"""
    with run("-c", script, str(slow), cwd=tmp_path) as owner:
        until((tmp_path / "data" / "running").exists)
        owner.kill()
        until((tmp_path / "data" / "dump.rdb").exists)
    assert (tmp_path / "data" / "dump.rdb").read_text() == "more\n" * 6


OWNER = """
import os, sys
from redisacc.embedded import Server
server = Server("data", durable=sys.argv[2] == "durable", executable=sys.argv[1])
server.start()
server.client().set("a", 1)
print(server.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["snapshots", "durable"])
@pytest.mark.parametrize("how", thorough([signal.SIGKILL, signal.SIGTERM], usual=[signal.SIGKILL]))
def test_data_of_a_killed_owner_are_saved(executable, tmp_path, kind, how):
    with run("-c", OWNER, executable, kind, cwd=tmp_path) as owner:
        pid = int(owner.line())
        owner.kill(how)
        assert gone(pid)
    with Server(tmp_path / "data", executable=executable) as server:
        assert keys(server) == {"a"}


@pytest.mark.slow
def test_directory_is_waited_for_while_its_last_server_saves(any_executable, tmp_path):
    directory = DataDirectory.create(tmp_path)
    growing = tmp_path / "temp-1.rdb"

    def save(locked):
        for _ in range(25):
            with growing.open("a") as file:
                file.write("more")
            time.sleep(0.1)
        locked.__exit__(None, None, None)

    locked = directory.locked()
    locked.__enter__()
    saving = threading.Thread(target=save, args=(locked,))
    saving.start()
    # It waits for 1 second only if nothing grows.
    with Server(tmp_path, executable=any_executable) as server:
        saving.join()
        assert server.running


def test_unfinished_files_are_removed(executable, tmp_path):
    for name in ("temp-1234.rdb", "temp-rewriteaof-bg-77.aof"):
        (tmp_path / name).write_text("half")
    with Server(tmp_path, executable=executable):
        pass
    assert not list(tmp_path.glob("temp-*"))


def test_a_crash_loses_what_changed_since_the_last_whole_snapshot(executable, tmp_path):
    with Server(tmp_path, executable=executable) as server:
        put(server, "before")
        ask(server, "SAVE")
        with contextlib.closing(server.client()) as client:
            client.mset({f"key:{number}": "v" for number in range(1000)})
            # In microseconds for each key, so that it takes 100 seconds.
            client.config_set("rdb-key-save-delay", 100_000)
            client.bgsave()
            until(lambda: list(tmp_path.glob("temp-*.rdb")))
        crash(server)
        # The process that was saving neither keeps the directory locked nor finishes its snapshot.
        server.start()
        assert keys(server) == {"before"}
        assert not list(tmp_path.glob("temp-*.rdb"))
        put(server, "stopped")
    with Server(tmp_path, executable=executable) as server:
        assert keys(server) == {"before", "stopped"}
