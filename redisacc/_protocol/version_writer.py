"""Stores the blobs of a version of parameters, and makes it visible. Here, all parts are in the slot of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from redisacc._format.buffered import STAGING_MS, cut
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob, part_size
from redisacc._protocol.parameter_scripts import Follows, ParameterScripts, Refusal
from redisacc._redis.fast_socket import Command
from redisacc._redis.transport import Transport

# Staged parts of large versions expire later than others: an upload may be as slow as this, in bytes per millisecond.
SLOWEST_UPLOAD = 1000

Reply = Literal["published", "unstaged", "lost"] | Refusal


@dataclass(frozen=True)
class Version:
    """A version on its way to the server.

    Attributes:
        id: its id.
        follows: which version it is.
        event: what waiting readers are told.
        fields: what the record gets beside that: the name of a field, its value, and so on.
        blobs: the blobs that it brings, and their bytes.
        kept: blobs of the version before that it needs.
        retired: blobs of the version before that it does without.
        removed: blobs of still earlier versions, which nobody is waited for to finish reading.
    """

    id: str
    follows: Follows
    event: str
    fields: Sequence[str]
    blobs: Mapping[Blob, Sequence[memoryview]]
    kept: Sequence[Blob]
    retired: Sequence[Blob]
    removed: Sequence[Blob]


@dataclass(frozen=True)
class Begun:
    """An attempt to publish a version has begun.

    Attributes:
        version: the id that the version will have.
    """

    version: str


class VersionWriter(Protocol):
    """Writes versions of the parameters of one name."""

    def begin(self, follows: Follows, name: str, blobs: Sequence[Blob], /) -> Begun | Refusal:
        """Begins an attempt to publish a version.

        Args:
            follows: which version it is.
            name: a random id.
            blobs: the blobs that it will bring.

        Returns:
            `Begun`; or, with nothing changed, why there can be no such version.
        """

    def write(self, version: Version) -> Reply:
        """Stores the blobs of a version, and makes it visible.

        Returns:
            "published"; or, with nothing changed, "unstaged" if a part is not there, "lost" if a part of a blob that
            the version keeps is not, or why the version is refused.

        Raises:
            ParametersNotFoundError: the parameters were deleted.
        """


class SlotVersionWriter:
    """Writes versions whose parts are in the slot of the record: one script, to which all of them are sent ahead.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys) -> None:
        self._keys = keys
        self._scripts = ParameterScripts(transport, keys)

    def begin(self, _follows: Follows, name: str, _blobs: Sequence[Blob], /) -> Begun:
        """Begins an attempt, of which the server learns nothing until it has all parts."""
        return Begun(name)

    def write(self, version: Version) -> Reply:
        """Stores the blobs of a version, and makes it visible, as ``VersionWriter`` describes."""
        staged: list[str] = []
        objects: list[str] = []
        lengths: list[int] = []
        stage: list[Command] = []
        expiry_ms = max(STAGING_MS, sum(blob.nbytes for blob in version.blobs) // SLOWEST_UPLOAD)
        for blob, pieces in version.blobs.items():
            for number, part in enumerate(cut(pieces, part_size(blob.nbytes))):
                staged.append(self._keys.staged(blob.id, number))
                objects.append(self._keys.part(blob.id, number))
                lengths.append(part.nbytes)
                stage.append(("SET", staged[-1], part, "PX", expiry_ms))
        return self._scripts.publish(
            version.follows,
            version=version.id,
            event=version.event,
            lengths=lengths,
            fields=version.fields,
            staged=staged,
            objects=objects,
            retired=[key for blob in version.retired for key in blob.keys(self._keys)],
            stage=stage,
            # Nobody refers to these in any case. One to a command, because freeing a large string takes the server
            # some time: others get between.
            after=[("UNLINK", key) for blob in version.removed for key in blob.keys(self._keys)],
        )
