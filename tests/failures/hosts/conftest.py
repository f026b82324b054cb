"""Hosts that can be cut off from their network, or lose their power: network namespaces, which need root on Linux."""

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.servers import executable
from support.until import until

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks").is_dir():
    collect_ignore_glob = ["test_*.py"]
elif str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PROGRAM = Path(__file__).with_name("member.py")
PORT = 6400
# Seconds in which a line has to come.
PATIENCE = 60.0


class Member:
    """A process on a host, and what it says."""

    def __init__(self, command, log):
        environment = {**os.environ, "PYTHONPATH": ":".join([str(ROOT / "tests"), *filter(None, sys.path)])}
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.split())
        self._lines.put(None)

    def told(self, what):
        """Returns whether its log holds a text."""
        return what in self._log.read_text()

    def wait_for(self, what, at_least=0):
        """Returns the first line that begins with a word, and whose number is at least this one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.1))
            assert line is not None, self._log.read_text()
            if line[0] == what and (len(line) == 1 or not line[1].isdigit() or int(line[1]) >= at_least):
                return line

    def continues(self):
        """Lets a process that holds a step continue."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Site:
    """Hosts on a switch: one has the server, and each of the others may have processes of a training."""

    def __init__(self, hosts, folder):
        self._hosts = hosts
        self._folder = folder
        self._members = []
        self._log = folder / "server.log"
        command = [executable("valkey"), "--port", str(PORT), "--protected-mode", "no", "--save", ""]
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [*hosts.command("server"), *command, "--dir", str(folder)], stdout=log, stderr=log
            )

        def ready():
            assert self._server.poll() is None, self._log.read_text()
            return b"Ready to accept connections" in self._log.read_bytes()

        until(ready, details=self._log.read_text)

    def start(self, host, role, until, *more):
        """Starts a process of the training on a host. No other host can see whether it lives."""
        url = f"redis://{self._hosts.address('server')}:{PORT}"
        # Processes of one machine know each other by its name and their process ids.
        machine = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
        command = [sys.executable, str(PROGRAM), role, url, str(until), *more]
        log = self._folder / f"{len(self._members)}-{host}.log"
        self._members.append(Member([*self._hosts.command(host), *machine, *command], log))
        return self._members[-1]

    def cut_off(self, host):
        """Takes a host from the network. Its processes run on, and no connection is closed."""
        self._hosts.cut_off(host)

    def connect(self, host):
        """Connects a host again. What its processes sent last is still on its way."""
        self._hosts.connect(host)

    def end(self):
        for member in self._members:
            member.end()
        self._server.kill()
        self._server.wait()


@pytest.fixture
def site(tmp_path):
    """Builds three hosts and a server, and removes them. Skips the test where the system refuses that."""
    from benchmarks.network import hosts

    if reasons := hosts.obstacles():
        pytest.skip(" ".join(reasons))
    try:
        with hosts.Hosts(["server", "first", "second", "workers"], 1) as built:
            made = Site(built, tmp_path)
            try:
                yield made
            finally:
                made.end()
    except hosts.HostsError as error:
        pytest.skip(f"the system refuses network namespaces: {error}")
