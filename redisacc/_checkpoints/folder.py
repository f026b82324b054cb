"""A folder of checkpoints: ``step-00000100.safetensors`` for step 100, and ``manifest.json``, which lists them.

The manifest is for people, for tools, and for the checksums. The files count: one that the manifest lacks, because the
process died in between, is a checkpoint all the same, because it got its name after all its bytes were on the disk.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redisacc._checkpoints.file import Checkpoint, hash_of, read_file, replaced_file, write_file
from redisacc._text import shown
from redisacc.errors import CorruptDataError

logger = logging.getLogger("redisacc")

MANIFEST = "manifest.json"

_FILE = re.compile(r"step-(-?\d{1,19})\.safetensors")
# The temporary files that a process leaves which is killed.
_TEMPORARY = re.compile(r"\.(?:step-.*\.safetensors|manifest\.json)\.\d+\.tmp")
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
    path: Path
    sha256: str | None

    def read(self) -> Checkpoint:
        """Returns what the file holds.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is damaged.
        """
        if self.sha256 is not None and hash_of(self.path) != self.sha256:
            raise CorruptDataError(f"{self.path} is damaged: its contents do not have the hash that {MANIFEST} lists")
        found = read_file(self.path)
        if found.step != self.step:
            raise CorruptDataError(f"{self.path} holds step {found.step}")
        return found


class Folder:
    """The checkpoints of one training. One process writes them.

    Args:
        path: the folder. It is created with the first checkpoint.
        keep: how many of the latest are kept, at least 1.
        keep_every: also keeps the first checkpoint of each interval of this many steps. None: only the latest.
    """

    def __init__(self, path: Path, *, keep: int, keep_every: int | None) -> None:
        self.path = path
        self._keep = keep
        self._keep_every = keep_every

    def write(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, and then removes those that are not to be kept.

        Raises:
            OSError: the disk is full, say. Earlier checkpoints stay.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"step-{checkpoint.step:08d}.safetensors"
        size, sha256 = write_file(path, checkpoint)
        entries = self._manifest() | {path.name: {"step": checkpoint.step, "bytes": size, "sha256": sha256}}
        kept = self._kept()
        # In this order: the manifest may list less than there is, but no file that is gone.
        self._write_manifest(checkpoint.name, {name: entry for name, entry in entries.items() if name in kept})
        for one in self.path.iterdir():
            if (_FILE.fullmatch(one.name) and one.name not in kept) or _TEMPORARY.fullmatch(one.name):
                one.unlink(missing_ok=True)
        return path

    def stored(self) -> list[Stored]:
        """Returns all checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        listed = self._manifest()
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
                yield one.read()
            except (CorruptDataError, OSError) as error:
                logger.warning("the checkpoint %s is skipped: %s", one.path, error)

    def _kept(self) -> set[str]:
        """Returns the names of the files that are kept."""
        stored = self.stored()
        kept = {one.path.name for one in stored[: self._keep]}
        if self._keep_every is not None:
            ranges: dict[int, str] = {}
            for one in stored:
                # The last that is seen of each range is its first.
                ranges[one.step // self._keep_every] = one.path.name
            kept |= set(ranges.values())
        return kept

    def _manifest(self) -> dict[str, dict[str, Any]]:
        """Returns the entries of the manifest by the name of the file; none if it is missing or damaged."""
        path = self.path / MANIFEST
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_LARGEST_MANIFEST))
            entries = found["checkpoints"]
            return {entry["file"]: entry for entry in entries if isinstance(entry["file"], str)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is ignored, because it cannot be read: %s", path, shown(str(error)))
            return {}

    def _write_manifest(self, name: str, entries: dict[str, dict[str, Any]]) -> None:
        listed = [
            {"file": file, "step": entry.get("step"), "bytes": entry.get("bytes"), "sha256": entry.get("sha256")}
            for file, entry in sorted(entries.items(), key=lambda item: str(item[1].get("step")).zfill(20))
        ]
        with replaced_file(self.path / MANIFEST) as temporary:
            temporary.write_text(json.dumps({"name": name, "checkpoints": listed}, indent=1) + "\n", "utf-8")
