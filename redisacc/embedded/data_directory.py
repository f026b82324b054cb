"""The directory in which a server keeps its data, and the lock that reserves it for one server."""

from __future__ import annotations

import contextlib
import dataclasses
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

__all__ = ["DataDirectory", "DirectoryInUseError"]

_log = logging.getLogger("redisacc")

_LOCK_NAME = "server.lock"


class DirectoryInUseError(ServerError):
    """Another server holds the lock of the directory."""


@dataclasses.dataclass(frozen=True)
class DataDirectory:
    """An existing directory for the data of one server.

    Attributes:
        path: its absolute path.
        temporary: whether it is removed after the server has ended.
    """

    path: Path
    temporary: bool

    @classmethod
    def create(cls, path: Path | None) -> Self:
        """Creates the directory with mode 700 if it doesn't exist. None: a temporary one.

        Raises:
            OSError: the directory can't be created.
        """
        if path is None:
            return cls(Path(tempfile.mkdtemp(prefix="redisacc-")), temporary=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(path, temporary=False)

    def check_readable_by(self, program: Program) -> None:
        """Checks that the server can read the data that an earlier server wrote.

        Raises:
            ServerError: the server would ignore the data.
        """
        # 6.2 ignores the append-only directory of 7.0 and would start empty, as if all data had been lost.
        if program.release < (7, 0) and (self.path / "appendonlydir").exists():
            raise ServerError(
                f"{self.path} was written by Valkey, or by Redis 7.0 or newer; {program.version} cannot read it"
            )

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
