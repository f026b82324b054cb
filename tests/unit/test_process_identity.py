"""Whether a process is dead: it is said only if that is certain."""

import os
import signal
import subprocess
import sys

import pytest
from support.rows import every_row

from redisacc._protocol.leases import process_identity
from redisacc._protocol.leases.process_identity import fate_of, own_identity

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

PROGRAM = """
import sys
from redisacc._protocol.leases.process_identity import own_identity
print(own_identity(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    """A process, and its identity."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_this_process_lives(monkeypatch):
    assert fate_of(own_identity()) == "alive"
    assert own_identity() == own_identity()
    assert 0 < len(own_identity()) <= 64
    assert not set(own_identity()) & set(" \t\n")
    own = own_identity()
    # As in a child after a fork.
    monkeypatch.setattr(os, "getpid", os.getppid)
    assert own_identity() != own


@linux
def test_another_process_lives_until_it_is_dead(other):
    process, identity = other
    assert fate_of(identity) == "alive"
    process.send_signal(signal.SIGSTOP)
    assert fate_of(identity) == "alive"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # Its parent has not asked for its exit code yet.
    assert fate_of(identity) == "dead"
    process.wait()
    assert fate_of(identity) == "dead"


@linux
def test_a_process_id_that_is_used_again(other):
    machine, pid, start = other[1].split(".")
    assert fate_of(f"{machine}.{pid}.{int(start) - 1}") == "dead"
    assert fate_of(f"{machine}.{pid}.{start}") == "alive"


def test_a_process_of_somebody_else_lives():
    own = own_identity().split(".")
    found = process_identity._state_and_start(1)
    if found is None or len(own) != 3:
        pytest.skip("needs /proc")
    assert fate_of(f"{own[0]}.1.{found[1]}") == "alive"


@every_row("identity", ["", "x", "0123456789abcdef.999999.5", "nowhere.1.1", "0123456789abcdef.1"])
def test_a_process_of_another_machine_is_unknown(identity):
    assert fate_of(identity) is None


@linux
@every_row("pid", [0, 2**32 - 1, 9_999_999_999])
def test_no_signal_goes_to_a_process_id_that_is_none(pid):
    """Process id 0 would be the whole process group."""
    machine = own_identity().split(".")[0]
    assert fate_of(f"{machine}.{pid}.1") in (None, "dead")


@linux
def test_without_proc_nothing_is_known(other, tmp_path):
    assert "." not in own_identity(tmp_path)
    assert fate_of(own_identity(tmp_path), tmp_path) == "alive"
    assert fate_of(other[1], tmp_path) is None


@linux
def test_a_process_that_proc_hides_is_unknown(other, tmp_path):
    pid = str(os.getpid())
    for name, target in (("self", pid), (pid, f"/proc/{pid}"), ("sys", "/proc/sys")):
        (tmp_path / name).symlink_to(target)
    assert own_identity(tmp_path) == own_identity()
    assert fate_of(other[1], tmp_path) is None
