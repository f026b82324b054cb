"""Processes that are forked from the tests' own, and may be killed or stopped in the middle of what they do."""

import contextlib
import gc
import multiprocessing
import os
import signal
import traceback
import warnings

from support.moved_clock import runs
from support.until import until

# How long a process may take for anything, in seconds.
PATIENCE = 60.0


class Child:
    """A process that was forked from this one.

    Args:
        work: what it does. It stops at each value that this yields, until ``go()``.

    Attributes:
        pid: its process id.
    """

    def __init__(self, work):
        self._ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            # From Python 3.12 on, a fork beside threads warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self._ours.close()
            _run(work, theirs)
        theirs.close()
        self._has_ended = False

    def go(self):
        """Lets it continue."""
        self._ours.send(None)

    @property
    def has_value(self):
        """Whether it has another value, or has ended."""
        return self._ours.poll(0)

    def value(self):
        """Waits for its next value. Raises EOFError if it has ended without one."""
        assert self._ours.poll(PATIENCE), "the process does not answer"
        failed, value = self._ours.recv()
        assert not failed, value
        return value

    def signal(self, number):
        """Sends a signal."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # What a thread is sending still leaves.
            until(lambda: not runs(self.pid))

    def kill(self):
        """Kills it. What it has said stays."""
        if not self._has_ended:
            self._has_ended = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def close(self):
        """Kills it, and forgets what it has said."""
        self.kill()
        self._ours.close()


def _run(work, pipe):
    # A collection would end what belongs to the parent.
    gc.disable()
    try:
        for value in work():
            pipe.send((False, value))
            pipe.recv()
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((True, traceback.format_exc()))
    finally:
        os._exit(0)
