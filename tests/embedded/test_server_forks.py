"""The embedded server: forks and interrupts of its owner, at any moment."""

import pytest
from owners import REAL, gone, run

from redisacc.embedded import Server

pytestmark = pytest.mark.servers(*REAL)


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


@pytest.mark.slow
def test_end_of_a_forked_child_leaves_the_server_alone(any_executable, tmp_path):
    with run("-W", "ignore::ResourceWarning", "-c", FORK, any_executable, cwd=tmp_path) as owner:
        status, out, err = owner.result(60)
        assert (status, err) == (0, "")
        pid, verdict = out.split()
        assert verdict == "good"
        assert gone(int(pid))


FORK_WHILE_STARTING = """
import os, queue, signal, subprocess, sys, threading
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
            signal.pause()
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
def test_fork_in_the_middle_of_a_start_does_not_keep_the_server(any_executable, tmp_path):
    # A child with a copy of our end of the pipe would keep the guard running as long as it lives itself.
    with run("-W", "ignore::DeprecationWarning", "-c", FORK_WHILE_STARTING, any_executable, cwd=tmp_path) as owner:
        assert owner.line() == "stopped"
        status, _, err = owner.result()
        assert (status, err) == (0, "")


def test_stop_after_an_interrupt_that_left_popens_lock_locked():
    """CPython's Popen.poll() takes a lock a moment before it makes sure to release it; Ctrl-C may fall in between."""
    server = Server()
    server.start()
    pid = server.pid
    server._child.process._server._waitpid_lock.acquire()
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

def interrupt_again(ignored):
    # Python has ignored the interrupt, because it came in the callback of a weak reference.
    assert ignored.exc_type is KeyboardInterrupt, ignored
    signal.setitimer(signal.ITIMER_REAL, 0.0001)

sys.unraisablehook = interrupt_again
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


@pytest.mark.slow
def test_interrupted_at_any_moment_of_its_start_a_server_ends_at_once(any_executable, tmp_path, everything):
    # Most starts take 20 to 30 ms.
    moments = [step / 5 for step in range(1, 250)] if everything else [step * 1.3 for step in range(1, 25)]
    (tmp_path / "scratch").mkdir()
    with run(
        "-W", "ignore::ResourceWarning", "-c", INTERRUPTED_STARTS, any_executable, *map(str, moments), cwd=tmp_path
    ) as owner:
        # A server on which SIGTERM had no effect would be killed 10 s later, with a warning on standard error.
        assert owner.result(110) == (0, "good\n", "")
