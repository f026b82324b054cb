"""Runs `redisacc run` as a process of its own, and finds every process that it has left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from itertools import pairwise
from pathlib import Path

from support.until import until
from support.warm_python import WarmPython

# A variable that every process of one test inherits, wherever it moves to.
_MARK = "REDISACC_TEST_MARK"


class Run:
    """A running `redisacc run`, and what it has written.

    Args:
        machine: the beginning of a command that runs on another machine; empty: this one.
    """

    def __init__(self, command, cwd, environment, *, read, machine=()):
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._temporary = Path(tempfile.mkdtemp(prefix="run-"))
        given = [cwd / path for option, path in pairwise(command) if option == "--server-dir"]
        self._directories = [self._temporary, *given]
        arguments = ["-W", "error", "-m", "redisacc", "run", *command]
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": cwd,
            "env": {**os.environ, "TMPDIR": str(self._temporary), **environment, _MARK: self._mark.partition("=")[2]},
            "start_new_session": True,
        }
        self.process = (
            subprocess.Popen([*machine, sys.executable, *arguments], **options)
            if machine
            else WarmPython(arguments, **options)
        )
        self._written = {"out": bytearray(), "err": bytearray()}
        self._readers = []
        if read:
            for name in ("out", "err"):
                self._readers.append(threading.Thread(target=self._read, args=(name,)))
                self._readers[-1].start()

    def _read(self, name):
        pipe = self.process.stdout if name == "out" else self.process.stderr
        while chunk := os.read(pipe.fileno(), 65536):
            self._written[name] += chunk

    @property
    def out(self):
        return self._written["out"].decode()

    @property
    def err(self):
        return self._written["err"].decode()

    def seen(self, pattern, count=1):
        """Waits until the output has so many matches of a pattern, and returns them."""
        until(lambda: len(re.findall(pattern, self.out)) >= count or self.process.poll() is not None)
        found = re.findall(pattern, self.out)
        assert len(found) >= count, (pattern, self.out, self.err)
        return found

    def signal(self, number):
        self.process.send_signal(number)

    def code(self, within=30):
        """Waits for the end, after which no process may be left. Returns the exit code."""
        code = self.process.wait(within)
        for reader in self._readers:
            reader.join(30)
        assert not self.left()
        return code

    def left(self):
        """The processes of this run that are alive, but for `redisacc run` itself.

        A server writes its title over its environment, so it is known by its directory.
        """
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                where = (folder / "cwd").readlink()
                if marked or any(where.is_relative_to(directory) for directory in self._directories):
                    found.append(int(folder.name))
        return sorted(set(found) - {self.process.pid})

    def end(self):
        for pid in [self.process.pid, *self.left()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()
        # The guard of a server that was killed just now may still be removing its directory.
        shutil.rmtree(self._temporary, ignore_errors=True)


class Starter:
    """Starts runs of one script, in one folder."""

    def __init__(self, folder, url):
        self.folder = folder
        self._url = url
        self._started = []

    def __call__(self, *options, script="", read=True, machine=(), **environment):
        """Runs `redisacc run OPTIONS -- python script.py`, or with an empty script `redisacc run OPTIONS`."""
        command = [str(option) for option in options]
        if script:
            (self.folder / "script.py").write_text(script)
            command += ["--", sys.executable, "script.py"]
        run = Run(command, self.folder, {"REDISACC_URL": self._url, **environment}, read=read, machine=machine)
        self._started.append(run)
        return run

    def end(self):
        for run in self._started:
            run.end()


@contextlib.contextmanager
def starter(folder, url):
    started = Starter(folder, url)
    try:
        yield started
    finally:
        started.end()
