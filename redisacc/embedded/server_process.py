"""A server process with its guard, its directory and its log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Sequence

import redis

from redisacc._interrupts import interrupt_in
from redisacc.embedded.addresses import Address, TCPAddress, facts_in
from redisacc.embedded.command_line import ENVIRONMENT, secrets, server_command
from redisacc.embedded.data_directory import DataDirectory, DirectoryInUseError, Persistence
from redisacc.embedded.forks import disown_after_fork, fork_lock, handlers_deferred
from redisacc.embedded.guarded_process import GuardedProcess, status_text
from redisacc.embedded.program import Program
from redisacc.errors import ServerError

__all__ = ["PortInUseError", "ServerProcess"]

_log = logging.getLogger("redisacc")

# Seconds to wait for the lock of the directory, which start again while a snapshot grows there.
_LOCK_TIMEOUT = 1.0

# Seconds that a server may take to answer one request for its status: while it starts, and when it runs. The first
# is short, because a stranger on the same port may never answer, while the new server has already failed to bind it.
_STARTING_STATUS_TIMEOUT = 0.5
_RUNNING_STATUS_TIMEOUT = 5.0


class PortInUseError(ServerError):
    """Another process took the port."""


@dataclasses.dataclass(eq=False)
class ServerProcess:
    """One run of a server, from its start to its end.

    Attributes:
        program: the server program.
        directory: the data directory.
        address: where the server listens.
        persistence: how the server keeps its data.
        options: further arguments of the server program.
        process: the server, and the guard that ends it when its owner is gone.
        owned: whether this process has started the server; False before `start` and in a forked child.
    """

    program: Program
    directory: DataDirectory
    address: Address
    persistence: Persistence
    options: Sequence[str]

    owned = False
    _ready = False

    def start(self) -> None:
        """Starts the server, without waiting until it answers. Must be called once.

        Raises:
            DirectoryInUseError: another server uses the directory.
            OSError: the log, the lock file, the shell or the server can't be opened or started.
        """
        deadline, saved = 0.0, -1
        while True:
            try:
                # While the lock isn't held, a fork in another thread would copy the guard's socket and the lock
                # file into a process that doesn't know them and may live on.
                with fork_lock, handlers_deferred():
                    self._spawn()
                    self.owned = True
                    disown_after_fork(self)
                return
            except DirectoryInUseError:
                # The previous server may still be saving its last snapshot, although its owner is gone.
                before, saved = saved, self.directory.unfinished_snapshot_bytes()
                if saved != before:
                    deadline = time.monotonic() + _LOCK_TIMEOUT
                elif time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    def _spawn(self) -> None:
        with self.directory.locked() as lock:
            self.directory.remove_unfinished_files()
            append_only = self.persistence is Persistence.APPEND_ONLY_FILE
            if append_only:
                self.directory.append_to_snapshot()
            # A server without an append-only file of its own still loads the file of an earlier server.
            self._leaves_file = not append_only and self.directory.has_append_only_file()
            # Open as long as this object exists, because a temporary directory is gone once the server has ended.
            self._log = self.directory.open_log()
            weakref.finalize(self, os.close, self._log)
            self._log_start = os.fstat(self._log).st_size
            command = server_command(
                self.program,
                self.directory.path,
                self.address,
                self.persistence,
                append_only=append_only or self._leaves_file,
            )
            self.process = GuardedProcess(
                # The "-" is the standard input.
                [*command, *self.options, "-"],
                directory=self.directory,
                lock=lock,
                log=self._log,
                environment=ENVIRONMENT,
                written=secrets(self.address),
            )

    def wait_until_ready(self, timeout: float) -> None:
        """Blocks until this server, and not another one on the same port, answers and has loaded its data.

        Args:
            timeout: maximum number of seconds without an answer and without progress in loading the data.

        Raises:
            PortInUseError: another process took the port.
            ServerError: the server ended, or the timeout ran out.
        """
        deadline = time.monotonic() + timeout
        loaded_bytes = None
        pause = 0.005
        while (exit_status := self.process.exit_status()) is None:
            if facts := self._facts(_STARTING_STATUS_TIMEOUT):
                if facts.get("loading") == "0":
                    self._ready = True
                    self.directory.sign(f"{self.address.url} (process {self.process.pid})")
                    return
                if (now := facts.get("loading_loaded_bytes")) != loaded_bytes:
                    loaded_bytes = now
                    deadline = time.monotonic() + timeout
            if time.monotonic() >= deadline:
                raise ServerError(f"{self.program.version} has not answered for {timeout:g} s{self._end_of_log()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        if isinstance(self.address, TCPAddress) and "Address already in use" in self.log_tail(100):
            raise PortInUseError(f"port {self.address.port} is already in use on this machine: choose another one")
        raise ServerError(f"{self.program.version} {status_text(exit_status)} before it was ready{self._end_of_log()}")

    def leave_append_only_file(self) -> None:
        """Moves the data of an earlier server's append-only file into a snapshot. Blocks until that is saved.

        Has no effect if there was no such file. The server doesn't answer other clients meanwhile.

        Raises:
            ServerError: the snapshot could not be saved. The append-only file is still there.
        """
        if not self._leaves_file:
            return
        # Saving takes as long as it takes, and a server that ends closes the connection.
        settings = {**self.address.settings, "socket_timeout": None}
        with contextlib.closing(redis.Redis.from_url(self.address.url, **settings)) as client:
            try:
                _save(client)
                self.directory.remove_append_only_file()
                client.config_set("appendonly", "no")
            except (redis.RedisError, OSError) as error:
                # The server would not end while it cannot save another snapshot.
                with contextlib.suppress(redis.RedisError):
                    client.config_set("save", "")
                raise ServerError(
                    f"the data in {self.directory.path} are in an append-only file and could not be saved as a "
                    f"snapshot ({error}): make room on the disk, or start the server with durable=True (--durable)"
                    f"{self._end_of_log()}"
                ) from error

    def alive(self) -> bool:
        """Returns whether the server process is alive; in a forked child, whether it answers."""
        if self.owned:
            return self.process.exit_status() is None
        return bool(self._facts(_RUNNING_STATUS_TIMEOUT))

    def _facts(self, timeout: float) -> dict[str, str]:
        """Returns what this server says about itself; nothing if it does not answer, or something else does."""
        try:
            facts = facts_in(self.address.ask("INFO", timeout=timeout))
        except (OSError, redis.RedisError) as error:
            if interrupt_in(error) is not None:
                raise
            return {}
        return facts if facts.get("process_id") == str(self.process.pid) else {}

    def log_tail(self, lines: int) -> str:
        """Returns the last lines that the server has logged."""
        size = os.fstat(self._log).st_size - self._log_start
        text = os.pread(self._log, size, self._log_start).decode(errors="replace")
        return "\n".join(text.rstrip().split("\n")[-lines:])

    def end(self) -> None:
        """Ends the server and blocks until it has ended. May be called at any time and more than once.

        Has no effect before `start` and in a forked child.
        """
        if not self.owned:
            return
        stops = self._ready and self.process.exit_status() is None
        self.process.end()
        if stops and self.persistence is not Persistence.NONE and self.process.exit_status() != 0:
            _log.warning(
                "%s did not end as it should, and changes since it last wrote to %s are lost%s",
                self.program.version,
                self.directory.path,
                self._end_of_log(),
            )
        # The guard has removed a temporary directory, unless it was killed.
        self.directory.remove_if_temporary()

    def disown(self) -> None:
        """Lets go, in a forked child, of everything that would keep the server alive or end it."""
        self.owned = False
        self.process.disown()

    def _end_of_log(self) -> str:
        tail = self.log_tail(10)
        return f"; its log ends with:\n{tail}" if tail else "; its log is empty"


def _save(client: redis.Redis) -> None:
    """Saves a snapshot, after the one that the server may be saving already."""
    while True:
        try:
            client.save()
            return
        except redis.ResponseError as error:
            if "in progress" not in str(error):
                raise
        time.sleep(0.05)
