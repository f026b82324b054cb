"""How and where a server keeps its data, and the lock that reserves the directory for one server."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from redisacc.embedded.program import Program
from redisacc.errors import ServerError

__all__ = ["DataDirectory", "DirectoryInUseError", "Persistence"]

_log = logging.getLogger("redisacc")

_LOCK_NAME = "server.lock"
_LOG_LIMIT = 1 << 20  # bytes

_SNAPSHOT = "dump.rdb"
# Redis 6.2 has one append-only file. Later servers have a directory with a manifest that lists the valid files; they
# move a file of 6.2 into it.
_FILE_OF_62 = "appendonly.aof"
_MANIFEST = Path("appendonlydir", "appendonly.aof.manifest")
# Files that a server was writing when it was killed.
_UNFINISHED = ("temp-*.rdb", "temp-rewriteaof-*.aof")


class Persistence(enum.Enum):
    """How a server keeps its data. The value says, as the end of a sentence, what a crash can lose."""

    NONE = "keeps nothing on disk: its data end with it"
    SNAPSHOTS = (
        "saves a snapshot a minute after a change, and when it is stopped: a crash of the server loses what changed "
        "since the last snapshot"
    )
    APPEND_ONLY_FILE = (
        "appends every change to a file: a crash of the server or of the machine loses at most about two seconds"
    )


class DirectoryInUseError(ServerError):
    """Another server holds the lock of the directory."""


@dataclasses.dataclass(frozen=True)
class DataDirectory:
    """An existing directory for the data of one server.

    Attributes:
        path: its absolute path.
        temporary: whether it is removed after the server has ended.

    The data are in an append-only file or in a snapshot. If both exist, the append-only file is the valid one: it is
    removed only after the snapshot has been saved, and a snapshot becomes an append-only file by being renamed. So
    whenever a change from one to the other is interrupted, the next server finds all data.
    """

    path: Path
    temporary: bool

    @classmethod
    def create(cls, path: Path | None) -> Self:
        """Creates the directory with mode 700 if it doesn't exist. None means a temporary one.

        Raises:
            OSError: the directory can't be created.
        """
        if path is None:
            # Before Python 3.12, the path is relative if the directory for temporary files has a relative path.
            return cls(Path(tempfile.mkdtemp(prefix="redisacc-")).absolute(), temporary=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(path, temporary=False)

    def check_readable_by(self, program: Program) -> None:
        """Checks that the server can read the data that an earlier server wrote.

        Raises:
            ServerError: the server would ignore the data.
        """
        # 6.2 ignores the append-only directory of 7.0 and would start empty, as if all data had been lost.
        if program.release < (7, 0) and (self.path / _MANIFEST).exists():
            raise ServerError(
                f"{self.path} was written by Valkey, or by Redis 7.0 or newer; {program.version} cannot read it"
            )

    def has_append_only_file(self) -> bool:
        """Returns whether the data are in an append-only file."""
        return (self.path / _MANIFEST).exists() or (self.path / _FILE_OF_62).exists()

    def append_to_snapshot(self) -> None:
        """Makes the snapshot, if there is one, the beginning of an append-only file. The caller holds the lock.

        An append-only file may begin with a snapshot, in every version of the server. Without this, a server that is
        started with `appendonly yes` ignores the snapshot and starts empty.
        """
        if not self.has_append_only_file() and (self.path / _SNAPSHOT).is_file():
            (self.path / _SNAPSHOT).replace(self.path / _FILE_OF_62)
            _sync(self.path)

    def remove_append_only_file(self) -> None:
        """Removes the append-only file. The snapshot is valid from then on, so it must have been saved before."""
        _sync(self.path)
        # This order keeps the data readable at every moment. Next to a manifest, a file of 6.2 is out of date and must
        # not outlive it. Without the manifest, the rest of its directory is ignored.
        (self.path / _FILE_OF_62).unlink(missing_ok=True)
        _sync(self.path)
        (self.path / _MANIFEST).unlink(missing_ok=True)
        directory = self.path / _MANIFEST.parent
        if directory.exists():
            _sync(directory)
            shutil.rmtree(directory, ignore_errors=True)

    def unfinished_snapshot_bytes(self) -> int:
        """Returns the size of the snapshots that are not complete yet. It grows while a server is saving one."""
        size = 0
        for path in self.path.glob(_UNFINISHED[0]):
            with contextlib.suppress(OSError):  # it has just been completed
                size += path.stat().st_size
        return size

    def remove_unfinished_files(self) -> None:
        """Removes what servers were writing when they were killed. The caller holds the lock."""
        for pattern in _UNFINISHED:
            for path in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    path.unlink()

    def open_log(self) -> int:
        """Opens the server's log, `server.log`, to append to it and to read it. Returns the descriptor.

        A log of more than 1 MiB from earlier servers is renamed to `server.log.1` first.

        Raises:
            OSError: the log can't be opened.
        """
        path = self.path / "server.log"
        if path.exists() and path.stat().st_size > _LOG_LIMIT:
            path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Locks the directory and returns the descriptor of the lock file as the context.

        Processes that inherit the descriptor keep the directory locked after the block.

        Raises:
            DirectoryInUseError: another server holds the lock.
            OSError: the lock file can't be opened.
        """
        descriptor = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another server"
                raise DirectoryInUseError(f"the directory {self.path} is in use by {holder}") from None
            except OSError as error:
                _log.warning(
                    "cannot lock %s (%s): a second server in this directory would overwrite the data of the first",
                    self.path,
                    error,
                )
            # Otherwise, until `sign`, the file would name the previous server as the holder of the lock.
            os.ftruncate(descriptor, 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def sign(self, holder: str) -> None:
        """Writes into the lock file who holds the lock, for the message of `DirectoryInUseError`."""
        with contextlib.suppress(OSError):
            (self.path / _LOCK_NAME).write_text(f"{holder}\n")

    def remove_if_temporary(self) -> None:
        """Removes a temporary directory, if it still exists."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Writes the names in a directory to the disk, so that a power failure does not undo a change of one of them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
