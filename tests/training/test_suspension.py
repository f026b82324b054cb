"""A process that stands still beyond all leases at any exchange of a step, and is continued: the bits stay the same."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.proxy import Fault, proxy_before_server
from support.selection import thorough

PROGRAM = Path(__file__).with_name("suspended_program.py")
UNTIL = 16
# In seconds: longer than the leases of the program.
STANDS_STILL = 3.0

pytestmark = pytest.mark.servers("valkey")


class Process:
    """A process of the training, and what it has said."""

    def __init__(self, url, name, kind):
        command = [sys.executable, str(PROGRAM), url, name, str(UNTIL), kind]
        self.started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self.started.stdout is not None
        self.said.extend(line.split() for line in self.started.stdout)

    @property
    def step(self):
        return max((int(words[1]) for words in self.said), default=-1)

    def end(self):
        """Returns what it says at its end."""
        assert self.started.wait(60) == 0
        self._reader.join()
        return self.said[-1]

    def close(self):
        for number in (signal.SIGCONT, signal.SIGKILL):
            self.started.send_signal(number)
        self.started.wait()
        self._reader.join()
        assert self.started.stdout is not None
        self.started.stdout.close()


@pytest.fixture
def pair(real_server):
    """Starts the two processes; the first one reaches the server over a proxy."""
    opened = []

    def start(first_url, name, kind):
        opened.extend([Process(first_url, name, kind), Process(real_server.url, name, kind)])
        return opened[-2:]

    yield start
    for process in opened:
        process.close()


@pytest.mark.slow
@pytest.mark.loses_data
@pytest.mark.parametrize("after", thorough(range(24), usual=[0, 8, 16]))
@pytest.mark.parametrize("direction", ["request", "reply"])
@pytest.mark.parametrize("kind", ["optimizer", "update"])
def test_at_each_exchange(pair, real_server, real_client, until, kind, direction, after):
    undisturbed = {tuple(process.end()) for process in pair(real_server.url, "undisturbed", kind)}
    assert len(undisturbed) == 1
    with proxy_before_server(real_server.url) as proxy:
        first, second = pair(proxy.url, "train", kind)
        until(lambda: first.step >= 2)
        stopped = threading.Event()

        def stop():
            first.started.send_signal(signal.SIGSTOP)
            stopped.set()

        proxy.when_it_happens = stop
        proxy.arm(Fault(direction, after, 0, "pass"))
        assert stopped.wait(60)
        time.sleep(STANDS_STILL)
        first.started.send_signal(signal.SIGCONT)
        assert {tuple(first.end()), tuple(second.end())} == undisturbed
    real_client.flushall()
