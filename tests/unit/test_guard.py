"""The guard of a run, which kills its processes when the runner has been killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from redisacc.embedded.guarded_process import Guard


def test_another_guard_knows_every_process_before_it_is_started(monkeypatch):
    # The runner may be killed as soon as it is.
    def start(*_, stdin, **__):
        raise OSError(os.read(stdin, 100).decode())

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match=r"^0 12\n3 45\n$"):
        Guard(1, {0: 12, 3: 45})


def test_guard_kills_those_who_ignore_its_sigterm():
    watch = Guard(1)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    command = [sys.executable, "-c", deaf]
    with (
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as first,
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as released,
    ):
        try:
            for slot, process in enumerate((first, released)):
                process.stdout.readline()
                watch.tell(slot, process.pid)
            watch.tell(1, 0)
            began = time.monotonic()
            watch.close()
            assert time.monotonic() - began > 0.9
            assert first.wait(10) == -signal.SIGKILL
            assert released.poll() is None
        finally:
            first.kill()
            released.kill()
