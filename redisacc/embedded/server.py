"""The class `Server`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from redisacc._interrupts import interrupt_in
from redisacc.embedded.addresses import LOOPBACK, TLS, Address, TCPAddress, UnixAddress, free_port
from redisacc.embedded.data_directory import DataDirectory, Persistence
from redisacc.embedded.forks import handlers_deferred
from redisacc.embedded.program import Program, find_program
from redisacc.embedded.server_process import PortInUseError, ServerProcess
from redisacc.errors import InvalidArgumentError, ServerError

__all__ = ["Server"]

_log = logging.getLogger("redisacc")

_PORT_ATTEMPTS = 10


class Server:
    """A server that belongs to this process, evicts nothing, and is reachable from this machine only by default.

    `start()` or a `with` block starts it. It ends with `stop()`, with the block, when the object is garbage
    collected, and with the process that called `start()`, even if that process is killed with SIGKILL. A forked child
    may use `url` and `client()`; neither its end nor its `stop()` affects the server. Methods may be called from any
    thread.

    With a `dir`, the server saves a snapshot of its data there a minute after a change, and whenever it is stopped. A
    crash of the server itself, or of the machine, loses all changes since the last snapshot. With `durable`, it appends
    every change to a file instead, which is written to the disk once a second: a crash loses at most about two seconds,
    and rounds of large gradients take 1.5 to 2.7 times as long. You may switch between the two: a server that finds
    data of the other kind converts it. If snapshots fail, for example on a full disk, the server continues without
    them, and logs that.

    Args:
        dir: the data directory. It is created with mode 700 if it doesn't exist, and kept. Two servers in one directory
            would overwrite each other's data, so the second one fails to start. None means a temporary directory, which
            is removed by `stop()` or when this process ends; no data is written to it.
        durable: whether every change is written to disk, instead of snapshots. Needs `dir`.
        port: the TCP port, 1 to 65535, on 127.0.0.1 and, where the machine has it, ::1. None means a free port.
        host: the IP address of this machine at which it listens, for other machines. Needs `port`, and a `password`.
        password: the password that clients need. None means none.
        tls: the files for TLS. None means plain TCP.
        socket: the path of a Unix socket, which gets mode 700. The server then has no TCP port.
        executable: the server program, a path or a name on the `PATH`. None means `find_server()`.

    Raises:
        InvalidArgumentError: the port is out of range, both a port and a socket are given, `durable` is given without
            `dir`, or `host`, `password` or `tls` without `port`; `host` is not an IP address, or other machines can
            reach it and there is no `password`; `dir` or `socket` is empty, or the path of the socket is too long (more
            than 107 bytes; 103 on macOS).
    """

    def __init__(
        self,
        # It shadows a builtin, which nothing here needs: the short name is what users write.
        dir: str | os.PathLike[str] | None = None,  # noqa: A002
        *,
        durable: bool = False,
        port: int | None = None,
        host: str = LOOPBACK,
        password: str | None = None,
        tls: TLS | None = None,
        socket: str | os.PathLike[str] | None = None,
        executable: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, path in (("dir", dir), ("socket", socket)):
            if path is not None and not os.fspath(path):
                raise InvalidArgumentError(f"{name} is an empty path; for the current directory, give '.'")
        # Paths become absolute now, so that a later chdir doesn't change what they mean.
        self._address: Address | None = None
        if port is not None:
            if socket is not None:
                raise InvalidArgumentError("give a port or a socket, not both")
            self._address = TCPAddress(port, host, password, tls)
        elif host != LOOPBACK or password is not None or tls is not None:
            raise InvalidArgumentError("host, password and tls need a port")
        elif socket is not None:
            self._address = UnixAddress(Path(os.path.abspath(os.fspath(socket))))
        if dir is None:
            if durable:
                raise InvalidArgumentError(
                    "durable=True needs dir=, because a temporary directory is removed when the server ends"
                )
            self._persistence = Persistence.NONE
        else:
            self._persistence = Persistence.APPEND_ONLY_FILE if durable else Persistence.SNAPSHOTS
        self._directory = None if dir is None else Path(os.path.abspath(os.fspath(dir)))
        self._executable = None if executable is None else os.fspath(executable)
        self._lock = threading.RLock()
        self._child: ServerProcess | None = None
        self._finalizer: weakref.finalize[..., Server] | None = None

    def __repr__(self) -> str:
        """Returns the version, the URL and whether the server is running."""
        child = self._child
        if child is None:
            return "<redisacc.embedded.Server, not started>"
        state = "running" if child.alive() else "ended"
        return f"<redisacc.embedded.Server {child.program.version} at {child.address.url}, {state}>"

    def start(self, timeout: float = 30.0) -> None:
        """Starts the server and blocks until it has loaded its data and answers. Has no effect if it is running.

        After `stop()`, you may start it again, on the same port if that is still free.

        Args:
            timeout: maximum number of seconds without an answer. While the server loads its data, the time starts
                again whenever the server reports progress. The time to save a snapshot of data from an earlier server
                with `durable` is not limited.

        Raises:
            ServerError: no server program was found, or it is older than 6.2; the port, the socket or the directory
                is in use; the server ended at once (the message quotes the end of its log); it didn't answer in
                time; the data of an earlier server with `durable` could not be saved as a snapshot. No process is left
                running.
        """
        with self._lock:
            if self.running:
                return
            program = find_program(self._executable)
            if self._finalizer is not None:
                self._finalizer.detach()
            if self._child is not None:
                # It may have crashed, or may still be ending.
                self._child.end()
            self._start(program, timeout)

    def _start(self, program: Program, timeout: float) -> None:
        if self._address is not None:
            self._start_at(self._address, program, timeout)
            return
        previous = self._child.address if self._child is not None else None
        for _ in range(_PORT_ATTEMPTS - 1):
            # Any process may take the port between `free_port` and the server's bind.
            with contextlib.suppress(PortInUseError):
                self._start_at(previous or self._free_address(), program, timeout)
                return
            previous = None
        self._start_at(self._free_address(), program, timeout)

    # A node of a cluster differs in these three.

    def _free_address(self) -> TCPAddress:
        """Returns an address that nobody uses at this moment."""
        return TCPAddress(free_port())

    def _options(self) -> list[str]:
        """Returns further arguments of the server program."""
        return []

    def _prepare(self, directory: Path) -> None:
        """Writes what the server reads from its data directory when it starts."""

    def _start_at(self, address: Address, program: Program, timeout: float) -> None:
        if isinstance(address, UnixAddress):
            address.check_unused()
        with contextlib.ExitStack() as on_failure:
            try:
                with handlers_deferred():
                    directory = DataDirectory.create(self._directory)
                    on_failure.callback(directory.remove_if_temporary)
                directory.check_readable_by(program)
                self._prepare(directory.path)
                child = ServerProcess(program, directory, address, self._persistence, self._options())
                on_failure.callback(child.end)
                child.start()
            except OSError as error:
                if interrupt_in(error) is not None:
                    raise
                raise ServerError(f"cannot start {program.path}: {error}") from error
            child.wait_until_ready(timeout)
            child.leave_append_only_file()
            with handlers_deferred():
                on_failure.pop_all()
                self._child = child
                self._finalizer = weakref.finalize(self, child.end)
        _log.info("%s at %s %s", program.version, address.url, self._persistence.value)

    def stop(self) -> None:
        """Stops the server and blocks until it has ended and its latest data is on disk.

        Has no effect if it isn't running, or in a forked child. A server that hasn't ended 10 seconds after SIGTERM
        is killed, but not while the file of its snapshot grows. A warning is logged if it was killed, because its
        latest changes are then lost, as they are if the disk is full.
        """
        child = self._child
        # Checked before the lock is taken: in a forked child, a thread that no longer exists may hold it.
        if child is None or not child.owned:
            return
        with self._lock:
            child.end()

    @property
    def running(self) -> bool:
        """Whether the server process is alive; in a forked child, whether it answers."""
        child = self._child
        return child is not None and child.alive()

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, or ``unix://PATH``. It can still be read after `stop()`.

        Raises:
            ServerError: the server was never started.
        """
        return self._started().address.url

    @property
    def port(self) -> int | None:
        """The TCP port; None when the server has only a socket.

        Raises:
            ServerError: the server was never started.
        """
        address = self._started().address
        return address.port if isinstance(address, TCPAddress) else None

    @property
    def pid(self) -> int:
        """The process id of the server, which isn't a direct child of this process.

        Raises:
            ServerError: the server was never started, or has ended.
        """
        child = self._started()
        if not child.alive():
            raise ServerError("the server is not running")
        return child.process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status of the server, negative for the number of a signal; None while it runs.

        Also None in a forked child, which cannot know it.

        Raises:
            ServerError: the server was never started.
        """
        child = self._started()
        return child.process.exit_status() if child.owned else None

    @property
    def dir(self) -> Path:
        """The data directory. It also holds the server's log, `server.log`.

        Raises:
            ServerError: the server was never started.
        """
        return self._started().directory.path

    @property
    def version(self) -> str:
        """Name and version of the server, such as "Valkey 9.1.2".

        Raises:
            ServerError: the server was never started.
        """
        return self._started().program.version

    def log_tail(self, lines: int = 10) -> str:
        """Returns the last lines that the server has logged since it was started.

        Raises:
            ServerError: the server was never started.
        """
        return self._started().log_tail(lines)

    def client(self, **kw: Any) -> redis.Redis:
        """Returns a new redis-py client for the server.

        Args:
            **kw: arguments of `redis.Redis.from_url`.

        Raises:
            ServerError: the server was never started.
        """
        address = self._started().address
        # In redis-py a database in the URL overrides the argument `db`.
        url = address.url.removesuffix("/0") if isinstance(address, TCPAddress) else address.url
        client: redis.Redis = redis.Redis.from_url(url, **{**address.settings, **kw})
        return client

    def _started(self) -> ServerProcess:
        if self._child is None:
            raise ServerError("the server has not been started: call start() or use a with block")
        return self._child

    def __enter__(self) -> Self:
        """Starts the server."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the server."""
        self.stop()
