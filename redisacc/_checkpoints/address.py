"""Where checkpoints are: a path, or an address such as ``s3://bucket/folder``, which fsspec reads and writes.

``Address`` has what a folder of checkpoints needs of a ``Path``. A file is written to this machine first, and then put
where it belongs in one request: a store of objects shows the whole file, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


class Address:
    """A file or a folder on a file system of fsspec.

    Args:
        system: the file system.
        path: its path there.
    """

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.name = path.rpartition("/")[2]

    def __fspath__(self) -> str:
        return str(self._system.unstrip_protocol(self._path))

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Address:
        return Address(self._system, f"{self._path.rstrip('/')}/{name}")

    def absolute(self) -> Address:
        """Returns itself."""
        return self

    def exists(self) -> bool:
        """Returns whether it is there."""
        return bool(self._system.exists(self._path))

    def is_dir(self) -> bool:
        """Returns whether it is a folder that is there."""
        return bool(self._system.isdir(self._path))

    def iterdir(self) -> Iterator[Address]:
        """Yields the files of the folder."""
        for path in self._system.ls(self._path, detail=False):
            yield self / path.rstrip("/").rpartition("/")[2]

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:  # noqa: ARG002 - stores of objects have no folders
        """Creates the folder."""
        self._system.makedirs(self._path, exist_ok=exist_ok)

    def open(self, mode: str) -> Any:
        """Opens the file."""
        return self._system.open(self._path, mode)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Removes the file."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self._system.rm_file(self._path)

    def version(self) -> str:
        """Returns what changes when the file is replaced."""
        return str(self._system.info(self._path))

    @contextlib.contextmanager
    def replaced(self, *, is_new: bool) -> Iterator[BinaryIO]:
        """Yields a temporary file of this machine, which is put here when the block ends."""
        if is_new and self.exists():
            raise FileExistsError(str(self))
        with tempfile.NamedTemporaryFile() as file:
            yield file  # type: ignore[misc]
            file.flush()
            self._system.put_file(file.name, self._path)


Place = Path | Address


def place_of(given: str | os.PathLike[str]) -> Place:
    """Returns a path, or an address if there is a protocol in front of it.

    Raises:
        InvalidArgumentError: fsspec, or its package for this protocol, is missing.
    """
    text = os.fsdecode(given)
    if "://" not in text:
        return Path(text)
    try:
        import fsspec

        return Address(*fsspec.core.url_to_fs(text, use_listings_cache=False))
    except (ImportError, ValueError) as error:
        raise InvalidArgumentError(
            f"the address {shown(text)} needs fsspec and its package for this protocol, such as s3fs for s3: {error}"
        ) from error


def try_writing(folder: Place) -> None:
    """Writes a file that leaves nothing.

    Raises:
        OSError: that cannot be done.
    """
    if isinstance(folder, Path):
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    else:
        tried = folder / f".{secrets.token_hex(8)}"
        with tried.replaced(is_new=False) as file:
            file.write(bytes(4096))
        tried.unlink()
