"""Helpers of the tests in this folder: which server, and other Python processes that own one."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import redis
from support import servers
from support.until import until
from support.warm_python import WarmPython

REAL = tuple(name for name in servers.NAMES if name not in (servers.FAKE, servers.CLUSTER))


def executable_of(name):
    """The program of that server. Skips where it is missing; in CI, fails."""
    try:
        return servers._EXECUTABLES[name]()
    except servers.MissingError as error:
        if os.environ.get("CI", "").lower() in ("true", "1") and not error.excused:
            pytest.fail(f"no server {name}: {error}")
        pytest.skip(f"no server {name}: {error}")


def alive(pid):
    """Whether the process exists and isn't a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        # No /proc on macOS; on Linux, it has just ended.
        return not Path("/proc/self").exists()


def written(url):
    """Waits until the append-only file, if there is one, has got all changes. On a busy disk, it gets them late."""
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        return until(lambda: not client.info("persistence").get("aof_buffer_length"))


def timer_has_run(url):
    """Waits until a server's timer has run, which would end one that got a signal, before it removes what expired."""
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        client.set("expires", "", px=1)
        until(lambda: client.dbsize() == 0)


def gone(pid, seconds=10):
    """Waits for the end of a process."""
    return until(lambda: not alive(pid), seconds)


def group(leader):
    """The processes of a process group that exist and aren't zombies. Only on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # The process may end at any time.
        with contextlib.suppress(OSError):
            status, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == leader and status != "Z":
                found.append(int(path.parent.name))
    return found


class Owner:
    """A Python process that runs a script and talks to us line by line."""

    def __init__(self, process):
        self.process = process
        self.pid = process.pid

    def line(self):
        return self.process.stdout.readline().rstrip("\n")

    def error_line(self):
        return self.process.stderr.readline().rstrip("\n")

    def say(self, text=""):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def result(self, seconds=20):
        """Exit status, and what was still to be read of output and errors."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@contextlib.contextmanager
def run(*command, cwd, warm=False, **env):
    """Run Python with these arguments in a session of its own, and make sure that it is gone afterwards.

    Args:
        command: the arguments.
        cwd: its directory.
        warm: whether it finds the package imported. The tests of processes that fork or die with a server start cold.
        env: more variables of its environment.
    """
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": cwd,
        "env": {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "80", **env},
        "start_new_session": True,
    }
    words = ["-W", "error", *command]
    process = WarmPython(words, **options) if warm else subprocess.Popen([sys.executable, *words], **options)
    with process:
        try:
            yield Owner(process)
        finally:
            if process.poll() is None:
                process.kill()


def program(path, text):
    """Write an executable script."""
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)
    return path


def ask(server, *command):
    with contextlib.closing(server.client(decode_responses=True)) as client:
        return client.execute_command(*command)


# A process that owns a server.
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
