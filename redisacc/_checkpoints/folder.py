"""A folder of checkpoints: ``step-00000100.safetensors`` for step 100, and ``manifest.json``, which says whose it is.

A file is removed only if this run wrote it, and only because of later files of this run that are whole. A process
remembers which files are, because many gigabytes must not be read again with each checkpoint: those that it wrote, and
those that it has read once. It reads another one only before it would remove something because of it.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from redisacc._checkpoints.address import Address, Place, try_writing
from redisacc._checkpoints.file import Checkpoint, check_file, name_in, read_file, replaced_file, write_file
from redisacc._interrupts import interrupt_in, suppressed
from redisacc._text import shown
from redisacc.errors import CorruptDataError, InvalidArgumentError

logger = logging.getLogger("redisacc")

MANIFEST = "manifest.json"

_FILE = re.compile(r"step-(-?\d{1,19})\.safetensors")
_LARGEST_MANIFEST = 2**24


class Stored(NamedTuple):
    """A file of the folder, which was not read yet, and the step in its name."""

    step: int
    path: Place


def _version_of(path: Place) -> str:
    if isinstance(path, Address):
        return path.version()
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


class Folder:
    """The checkpoints of one run. One process writes them.

    Args:
        path: the folder. ``claim`` creates it.
        name: the name of the run.
        keep: how many of the latest are kept, at least 1.
        keep_every: also keeps the first checkpoint of each interval of this many steps. None means only the latest.

    Raises:
        InvalidArgumentError: it is another run's folder.
        OSError: it cannot be read.
    """

    def __init__(self, path: Place, name: str, *, keep: int, keep_every: int | None) -> None:
        # The program may change its working directory.
        self.path = path.absolute()
        self._name = name
        self._keep = keep
        self._keep_every = keep_every
        # File -> its version, and whether it is a checkpoint of this run that can be read.
        self._known: dict[str, tuple[str, bool]] = {}
        self._check_owner(MANIFEST, self._claimed_for())
        for _, each in self.stored():
            self._check_owner(each.name, name_in(each))

    def claim(self) -> None:
        """Creates the folder, and notes in it whose it is.

        Raises:
            OSError: that cannot be done.
            InvalidArgumentError: it is another run's folder. Nothing was changed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / MANIFEST).exists():
            # If two trainings begin at once, one of them finds the manifest of the other.
            with suppressed(FileExistsError), replaced_file(self.path / MANIFEST, is_new=True) as file:
                file.write(json.dumps({"name": self._name}).encode())
        self._check_owner(MANIFEST, self._claimed_for())

    def try_out(self) -> None:
        """Claims the folder, and writes a file that leaves nothing. A full disk is a warning: there may be room later.

        Raises:
            OSError, InvalidArgumentError: as ``claim``.
        """
        try:
            self.claim()
            try_writing(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning("%s: no checkpoint can be written to %s now: %s", self._name, self.path, error)

    def write(self, checkpoint: Checkpoint) -> Place:
        """Writes a checkpoint, and then removes those that are not to be kept.

        Raises:
            OSError: the disk is full, say. Earlier checkpoints stay.
            InvalidArgumentError: it is another run's folder. Nothing was changed.
        """
        self.claim()
        path = self.path / f"step-{checkpoint.step:08d}.safetensors"
        self._check_owner(path.name, name_in(path))
        write_file(path, checkpoint)
        self._known[path.name] = _version_of(path), True
        try:
            self._remove_all_but(path)
        except OSError as error:
            if interrupt_in(error) is not None:
                raise
            logger.warning("%s was written, but earlier files cannot be removed: %s", path, error)
        return path

    def stored(self) -> list[Stored]:
        """Returns all checkpoints, the newest first."""
        files = self.path.iterdir() if self.path.is_dir() else ()
        found = [Stored(int(match[1]), path) for path in files if (match := _FILE.fullmatch(path.name))]
        return sorted(found, key=lambda one: -one.step)

    def valid(self) -> Iterator[Checkpoint]:
        """Yields the checkpoints that can be read, the newest first. A warning names each of the others."""
        for step, path in self.stored():
            try:
                found = read_file(path)
                if (found.name, found.step) != (self._name, step):
                    raise CorruptDataError(f"it holds step {found.step} of the run {shown(found.name)}")
                self._known[path.name] = _version_of(path), True
            except (CorruptDataError, OSError) as error:
                if interrupt_in(error) is not None:
                    raise
                logger.warning("%s: the checkpoint %s is skipped: %s", self._name, path, error)
            else:
                yield found

    def _check_owner(self, file: str, owner: str | None) -> None:
        """Raises InvalidArgumentError if a file is another run's."""
        if owner not in (None, self._name):
            raise InvalidArgumentError(
                f"the folder {self.path} cannot hold the checkpoints of the run {shown(self._name)}: its "
                f"{file} belongs to the run {shown(owner)}. Give each run its own folder. To begin with "
                "a checkpoint of another run, publish it with `redisacc restore`"
            )

    def _claimed_for(self) -> str | None:
        """Returns the name of the run to which the folder belongs; None if its manifest is missing or damaged."""
        path = self.path / MANIFEST
        try:
            with path.open("rb") as file:
                name = json.loads(file.read(_LARGEST_MANIFEST))["name"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            if interrupt_in(error) is not None:
                raise
            logger.warning("%s is ignored, because it cannot be read: %s", path, shown(str(error)))
            return None
        return name if isinstance(name, str) else None

    def _is_whole(self, one: Stored) -> bool:
        """Returns whether a file is a checkpoint of this run that can be read.

        Raises:
            OSError: now it cannot, but perhaps later.
        """
        file, version = one.path.name, _version_of(one.path)
        if file not in self._known or self._known[file][0] != version:
            try:
                is_whole = check_file(one.path) == self._name
            except CorruptDataError as error:
                logger.warning("%s: a checkpoint does not count for checkpoint.keep: %s", self._name, error)
                is_whole = False
            self._known[file] = version, is_whole
        return self._known[file][1]

    def _remove_all_but(self, written: Place) -> None:
        """Removes the files that are not to be kept, unless another run, or nobody, is known to have written them."""
        stored = self.stored()
        # In most cases there is nothing to remove, even if all files are whole.
        if removed := self._superseded(stored, lambda _: True):
            removed = self._superseded(stored, self._is_whole)
        for _, path in removed:
            if path != written and name_in(path) == self._name:
                path.unlink(missing_ok=True)
                self._known.pop(path.name, None)

    def _superseded(self, stored: list[Stored], is_whole: Callable[[Stored], bool]) -> list[Stored]:
        """Returns the files that are not to be kept: neither among the latest nor the first of an interval.

        Args:
            stored: all files, the newest first.
            is_whole: whether a file counts.
        """
        latest = 0
        while stored and latest < self._keep:
            latest += is_whole(stored[0])
            stored = stored[1:]
        if self._keep_every is None:
            return stored
        intervals: dict[int, list[Stored]] = {}
        for one in reversed(stored):
            intervals.setdefault(one.step // self._keep_every, []).append(one)
        superseded = []
        for ascending in intervals.values():
            # A single one is kept without a look at its contents.
            first = ascending[0] if len(ascending) == 1 else next(filter(is_whole, ascending), None)
            superseded += [one for one in ascending if one is not first]
        return superseded
