"""Starts Python programs by forking a process that has imported redisacc already.

A start of Python that imports redisacc costs half a second of a processor, most of it for numpy and redis-py. A fork
costs a hundredth of that, and the tests start hundreds of programs. A forked program shares nothing with others but the
modules that are imported: it has a directory, an environment and, if it wants, a session of its own, and it ends as an
interpreter does. Programs whose test is about imports or forks start as usual, and so does `redisacc demo`, which hangs
when it is started in this way.
"""

import builtins
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

# Modules that programs find imported.
PRELOADED = (
    "numpy",
    "redisacc.optim",
    "redisacc.raw_ops",
    "redisacc._training.chief",
    "redisacc._training.worker",
    "redisacc.tools.cli",
    "redisacc.tools.cli.run",
    "redisacc.tools.cli.server",
)

LENGTH = struct.Struct("=I")

# A process that ignores one of these signals passes that on to the programs that it starts.
INHERITED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class WarmPython:
    """A process that runs a Python program. It has what the tests use of a ``subprocess.Popen``.

    Args:
        arguments: those of the interpreter: ``-W FILTER``, any number of times; then ``-m MODULE``, ``-c CODE`` or the
            path of a program; then the program's own.
        stdin, stdout, stderr: as in ``Popen``, but without None.
        text: whether the pipes carry text.
        cwd: the directory that it runs in.
        env: its environment.
        start_new_session: whether it leads a session of its own.
    """

    def __init__(
        self,
        arguments,
        *,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        text=False,
        cwd=None,
        env=None,
        start_new_session=False,
    ):
        self.returncode = None
        self.stdin, self.stdout, self.stderr = None, None, None
        task = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
            "ignored": [number for number in INHERITED if signal.getsignal(number) == signal.SIG_IGN],
        }
        with contextlib.ExitStack() as stack:

            def pipe(*, reads):
                """Returns the end that the program gets, which is closed here, and the other one."""
                reader, writer = os.pipe()
                theirs, ours = (reader, writer) if reads else (writer, reader)
                stack.callback(os.close, theirs)
                return theirs, ours

            given = []
            for name, what in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                if what == PIPE:
                    theirs, ours = pipe(reads=name == "stdin")
                    mode = ("w" if name == "stdin" else "r") + ("" if text else "b")
                    setattr(self, name, os.fdopen(ours, mode))
                elif what == DEVNULL:
                    theirs = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, theirs)
                elif what == STDOUT:
                    theirs = given[1]
                else:
                    theirs = what.fileno()
                given.append(theirs)
            theirs, ours = pipe(reads=False)
            self._status = os.fdopen(ours)
            _forker().start(task, [*given, theirs])
        self.pid = int(self._status.readline())
        self._waiting = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def poll(self):
        """Returns how it ended, as ``Popen`` does, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        """Waits for its end, and returns how it ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        with self._waiting:
            if self.returncode is None:
                if not _readable(self._status, timeout):
                    raise subprocess.TimeoutExpired("a program", timeout or 0.0)
                self.returncode = int(self._status.readline())
                self._status.close()
            return self.returncode

    def communicate(self, timeout=None):
        """Reads both outputs until the program has ended, and closes its pipes.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.stdin is not None:
            self.stdin.close()
        read = {}

        def read_all(name, file):
            read[name] = file.read()

        files = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [threading.Thread(target=read_all, args=item, daemon=True) for item in files.items() if item[1]]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a program", timeout or 0.0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
        for file in filter(None, files.values()):
            file.close()
        return read.get("stdout"), read.get("stderr")

    def send_signal(self, number):
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """Kills it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        """Tells it to end."""
        self.send_signal(signal.SIGTERM)


def _readable(file, timeout):
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(None if timeout is None else timeout * 1000))


class _Forker:
    """The process that forks. It ends when this one does, or with `close_forker`."""

    def __init__(self):
        self._socket, its_end = socket.socketpair()
        with its_end:
            # A session of its own, because Ctrl-C is for the programs that it starts.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore::DeprecationWarning", __file__, str(its_end.fileno())],
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lock = threading.Lock()

    def start(self, task, descriptors):
        text = json.dumps(task).encode()
        with self._lock:
            # The descriptors travel with the length.
            socket.send_fds(self._socket, [LENGTH.pack(len(text))], descriptors)
            self._socket.sendall(text)

    def close(self):
        # A forked process may have a copy of the socket, whose other end would not be told.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait()


@functools.cache
def _forker():
    return _Forker()


def close_forker():
    """Ends the process that forks, if it was started. Otherwise, Python would complain at its end."""
    if _forker.cache_info().currsize:
        _forker().close()
        _forker.cache_clear()


# The other side


def _serve(connection):
    """Forks a process for each task. Returns in a forked process, with its task."""
    # Nobody waits for the processes that wait for programs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        length, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 4)
        if not length:
            sys.exit()
        # Not a byte more: another thread's task may follow at once, and its descriptors would be lost.
        text = bytearray()
        while left := LENGTH.unpack(length)[0] - len(text):
            text += connection.recv(left)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(status)
        for place, descriptor in enumerate(standard):
            os.dup2(descriptor, place)
        for descriptor in {*standard} - {0, 1, 2}:
            os.close(descriptor)
        return json.loads(text)
    for descriptor in {0, 1, 2, *standard}:
        os.close(descriptor)
    os.write(status, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{code}\n".encode())
    os._exit(0)


def _run(task):
    """Becomes the interpreter that a task describes."""
    if task["session"]:
        os.setsid()
    for number in task["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"])
    time.tzset()
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=at_once)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    if "REDISACC_TEST_CLOCK" in os.environ:
        importlib.import_module("moved_clock").follow(os.environ["REDISACC_TEST_CLOCK"])
    sys.path[0] = ""
    arguments = task["arguments"]
    warnings.resetwarnings()
    while arguments[0] == "-W":
        action, _, category = arguments[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        del arguments[:2]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    # Garbage collections of programs would copy what they share.
    gc.collect()
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
