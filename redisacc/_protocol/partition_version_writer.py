"""Stores the blobs of a version of parameters in partitions: one script at the leader makes it visible.

1. The leader registers the attempt. A version that cannot follow what is published is refused here.
2. Each node stores its parts, under names that no other attempt has, and confirms that they are there for good.
3. The leader makes the version visible, if nobody has given the attempt up meanwhile, and lists the blobs that the
   version does without. They are removed a minute later, by the next publisher or by ``redisacc gc``.

docs/design/partitions.md says why no reader sees a mixture of versions, and why nothing is lost or left behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import cut
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob, part_size
from redisacc._format.partitions import partitions_text
from redisacc._protocol.parameter_scripts import BeingDeleted, Follows, ParameterScripts, Refusal, RegisteredVersion
from redisacc._protocol.partition_parts import are_there, write_parts
from redisacc._protocol.partition_sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.partition_writer import lease_of
from redisacc._protocol.version_writer import Begun, Reply, SlotVersionWriter, Version, VersionWriter
from redisacc._redis.transport import Transport


class PartitionVersionWriter:
    """Writes versions whose parts are in partitions, as ``VersionWriter`` describes.

    Args:
        transport: the way to the nodes.
        keys: the keys of the parameters, with their partitions.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys) -> None:
        self._transport = transport
        self._keys = keys
        self._scripts = ParameterScripts(transport, keys)

    def begin(self, follows: Follows, name: str, blobs: Sequence[Blob], /) -> Begun | Refusal:
        """Registers an attempt to publish a version."""
        registered = self._scripts.register_version(
            follows,
            version=name,
            partitions=partitions_text(self._keys.partitions),
            lease_ms=lease_of(sum([blob.nbytes for blob in blobs])),
            blobs=[str(blob.attempt(self._keys)).removeprefix(f"{name}-") for blob in blobs],
        )
        return Begun(f"{name}-{registered.number}") if isinstance(registered, RegisteredVersion) else registered

    def write(self, version: Version) -> Reply:
        """Stores the blobs of a version, and makes it visible."""
        partitions = len(self._keys.partitions)
        attempts = self._attempts(version.blobs)
        with given_up_on_error(self._transport, self._keys, attempts):
            if not are_there(self._transport, [part for blob in version.kept for part in blob.parts(self._keys)]):
                sweep_quietly(self._transport, self._keys, attempts)
                return "lost"
            written = write_parts(
                self._transport,
                self._keys,
                {blob.id: cut(pieces, part_size(blob.nbytes, partitions)) for blob, pieces in version.blobs.items()},
            )
            if written is None:
                # If the attempt was swept and forgotten while some parts were still to be written, nobody knows these.
                remove_parts_quietly(self._transport, self._keys, attempts)
                sweep_quietly(self._transport, self._keys, attempts)
                return "unstaged"
            lost = self._transport.lost
            reply = self._scripts.commit_version(
                version.follows,
                version=version.id,
                event=version.event,
                blobs=attempts,
                retired=self._attempts(version.retired),
                removed=self._attempts(version.removed),
                fields=version.fields,
            )
        if reply == "published":
            sweep_quietly(self._transport, self._keys)
            return reply
        is_over = reply == "expired" or isinstance(reply, BeingDeleted)
        if is_over or self._transport.lost == lost:
            # No copy of the commit has made it visible, or ever will. A sweeper, or a deletion, may have missed parts
            # that were written after it had looked.
            remove_parts_quietly(self._transport, self._keys, attempts)
        if reply == "expired":
            return "unstaged"
        if is_over:
            return reply
        sweep_quietly(self._transport, self._keys, attempts)
        return reply

    def _attempts(self, blobs: Iterable[Blob]) -> list[StoredAttempt]:
        return [blob.attempt(self._keys) for blob in blobs]


def version_writer(transport: Transport, keys: ParameterKeys) -> VersionWriter:
    """Returns what writes versions of these parameters, which may have partitions."""
    return PartitionVersionWriter(transport, keys) if keys.partitions else SlotVersionWriter(transport, keys)
