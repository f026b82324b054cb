"""A folder of checkpoints: ``step-00000100.safetensors`` for step 100, and ``manifest.json``, which lists them.

The manifest is for people, for tools, and for the checksums, and says to which run the folder belongs. The files
count: one that the manifest lacks, because the process died in between, is a checkpoint all the same, because it got
its name after all its bytes were on the disk.

A file is removed only if this run wrote it, and only because of later files that are whole. A process remembers
which files are whole, because many gigabytes must not be read again with each checkpoint: those that it wrote, and
those that it has read once. It reads another one only before it would remove something because of it.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redisacc._checkpoints.address import Address, Place, try_writing
from redisacc._checkpoints.file import (
    Checkpoint,
    check_format,
    hash_of,
    name_in,
    read_file,
    replaced_file,
    write_file,
)
from redisacc._interrupts import interrupt_in, suppressed
from redisacc._text import shown
from redisacc.errors import CorruptDataError, InvalidArgumentError

logger = logging.getLogger("redisacc")

MANIFEST = "manifest.json"

_FILE = re.compile(r"step-(-?\d{1,19})\.safetensors")
_LARGEST_MANIFEST = 2**24


@dataclass(frozen=True)
class Stored:
    """A file of the folder, which was not read yet.

    Attributes:
        step: its step.
        path: the file.
        sha256: the hash of its contents by the manifest; None if that does not list it.
    """

    step: int
    path: Place
    sha256: str | None

    def read(self) -> Checkpoint:
        """Returns what the file holds.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is damaged.
        """
        self._check_hash()
        found = read_file(self.path)
        if found.step != self.step:
            raise CorruptDataError(f"{self.path} holds step {found.step}")
        return found

    def check(self) -> None:
        """Raises what ``read`` would raise, without the memory for the arrays if the manifest lists the file."""
        if self.sha256 is None:
            self.read()
        else:
            check_format(self.path)
            self._check_hash()

    def _check_hash(self) -> None:
        if self.sha256 is not None and hash_of(self.path) != self.sha256:
            raise CorruptDataError(f"{self.path} is damaged: its contents do not have the hash that {MANIFEST} lists")


@dataclass
class _Known:
    """What this process knows of a file, for as long as the file stays the same.

    Attributes:
        version: what changes when it is replaced.
        name: the run that wrote it; None if it is no checkpoint.
        is_whole: whether its contents can be read. None means nobody has tried.
    """

    version: str
    name: str | None
    is_whole: bool | None = None


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
        self._known: dict[str, _Known] = {}
        # Entries that could not be written into the manifest yet.
        self._unlisted: dict[str, dict[str, Any]] = {}
        self._check_owner()

    def claim(self) -> None:
        """Creates the folder, and notes in it whose it is.

        Raises:
            OSError: that cannot be done.
            InvalidArgumentError: it is another run's folder. Nothing was changed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_owner()
        if not (self.path / MANIFEST).exists():
            # If two trainings begin at once, one of them finds the manifest of the other.
            with suppressed(FileExistsError):
                self._write_manifest({}, is_new=True)
            self._check_owner()

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
        listed = self._manifest()[1]
        if path.name in listed:
            # After a crash, the hash of the file that is replaced would make the new one look damaged.
            self._write_manifest({file: entry for file, entry in listed.items() if file != path.name})
        size, sha256 = write_file(path, checkpoint)
        self._look_at(path).is_whole = True
        self._unlisted[path.name] = {"step": checkpoint.step, "bytes": size, "sha256": sha256}
        try:
            self._remove_all_but(path)
        except OSError as error:
            if interrupt_in(error) is not None:
                raise
            logger.warning("%s was written, but %s or earlier files are not up to date: %s", path, MANIFEST, error)
        return path

    def stored(self) -> list[Stored]:
        """Returns all checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        listed = self._manifest()[1]
        found = []
        for path in self.path.iterdir():
            match = _FILE.fullmatch(path.name)
            if match is not None:
                sha256 = listed.get(path.name, {}).get("sha256")
                found.append(Stored(int(match[1]), path, sha256 if isinstance(sha256, str) else None))
        return sorted(found, key=lambda one: -one.step)

    def valid(self) -> Iterator[Checkpoint]:
        """Yields the checkpoints that can be read, the newest first. A warning names each of the others."""
        for one in self.stored():
            try:
                found = one.read()
                if found.name != self._name:
                    raise CorruptDataError(f"it belongs to the run {shown(found.name)}")
                self._look_at(one.path).is_whole = True
            except (CorruptDataError, OSError) as error:
                if interrupt_in(error) is not None:
                    raise
                logger.warning("%s: the checkpoint %s is skipped: %s", self._name, one.path, error)
            else:
                yield found

    def _check_owner(self) -> None:
        """Raises InvalidArgumentError if the manifest or a file is another run's."""
        if not self.path.is_dir():
            return
        owners = {MANIFEST: self._manifest()[0]}
        owners |= {path.name: self._look_at(path).name for path in self.path.iterdir() if _FILE.fullmatch(path.name)}
        for file, owner in owners.items():
            if owner not in (None, self._name):
                raise InvalidArgumentError(
                    f"the folder {self.path} cannot hold the checkpoints of the run {shown(self._name)}: its "
                    f"{file} belongs to the run {shown(owner)}. Give each run its own folder. To begin with "
                    "a checkpoint of another run, publish it with `redisacc restore`"
                )

    def _look_at(self, path: Place) -> _Known:
        """Returns what is known of a file. Only its header is read."""
        try:
            version = _version_of(path)
            known = self._known.get(path.name)
            if known is None or known.version != version:
                known = self._known[path.name] = _Known(version, name_in(path))
            return known
        except OSError as error:
            if interrupt_in(error) is not None:
                raise
            return _Known("", None)

    def _is_whole(self, one: Stored) -> bool:
        """Returns whether a file can be read.

        Raises:
            OSError: now it cannot, but perhaps later.
        """
        known = self._look_at(one.path)
        if known.is_whole is None:
            try:
                one.check()
                known.is_whole = True
            except CorruptDataError as error:
                logger.warning("%s: a checkpoint does not count for checkpoint.keep: %s", self._name, error)
                known.is_whole = False
        return known.is_whole

    def _remove_all_but(self, written: Place) -> None:
        """Removes the files that are not to be kept, and lists the others."""
        stored = self.stored()
        own = [one for one in stored if self._look_at(one.path).name == self._name]
        # In most cases there is nothing to remove, even if all files are whole.
        if removed := self._superseded(own, lambda _: True):
            removed = self._superseded(own, self._is_whole)
        gone = {one.path.name for one in removed if one.path != written}
        entries = {one.path.name for one in stored} - gone
        try:
            # In this order: the manifest may list less than there is, but no file that is gone.
            self._write_manifest({file: entry for file, entry in self._manifest()[1].items() if file in entries})
            self._unlisted.clear()
        finally:
            # If the disk is full, this makes room.
            for file in gone:
                (self.path / file).unlink(missing_ok=True)
                self._known.pop(file, None)

    def _superseded(self, stored: list[Stored], is_whole: Callable[[Stored], bool]) -> list[Stored]:
        """Returns the files that are not to be kept: neither among the latest nor the first of an interval.

        Args:
            stored: all files of this run, the newest first.
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

    def _manifest(self) -> tuple[str | None, dict[str, dict[str, Any]]]:
        """Returns what the manifest says: the name of the run, and an entry for each file.

        The name is None, and there are no entries, if it is missing or damaged.
        """
        path = self.path / MANIFEST
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_LARGEST_MANIFEST))
            name = found.get("name")
            entries = {entry["file"]: entry for entry in found["checkpoints"] if isinstance(entry["file"], str)}
        except FileNotFoundError:
            return None, dict(self._unlisted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if interrupt_in(error) is not None:
                raise
            logger.warning("%s is ignored, because it cannot be read: %s", path, shown(str(error)))
            return None, dict(self._unlisted)
        return name if isinstance(name, str) else None, entries | self._unlisted

    def _write_manifest(self, entries: dict[str, dict[str, Any]], *, is_new: bool = False) -> None:
        listed = [
            {"file": file, "step": entry.get("step"), "bytes": entry.get("bytes"), "sha256": entry.get("sha256")}
            for file, entry in sorted(entries.items(), key=lambda item: str(item[1].get("step")).zfill(20))
        ]
        text = json.dumps({"name": self._name, "checkpoints": listed}, indent=1) + "\n"
        with replaced_file(self.path / MANIFEST, is_new=is_new) as file:
            file.write(text.encode())
