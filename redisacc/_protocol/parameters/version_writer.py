"""Stores the blobs of a version of parameters, and makes it visible.

Each part is written under its final name, which no other attempt uses, with an expiry. The script ``publish`` makes the
version visible. It does so only if all parts are there and will stay:

- In the slot of the record, the script checks that itself, and removes the expiry. The parts travel ahead of it in the
  same round trip.
- In partitions, no script can. The leader registers the attempt first, which gives it a lease; a version that cannot
  follow the published one is refused there. Then each node stores its parts, and confirms that they are there to stay.
  The script makes the version visible if the attempt still has its lease, and lists the blobs that the new
  version does without. They are removed a minute later, by the next publisher or by ``redisacc doctor --fix``.

docs/explanations/partitions.md explains why no reader sees a mixture of versions, and why nothing is lost or leaked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import cut, part_ms
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._format.partitions import partitions_text
from redisacc._protocol.applying.attempts import lease_of
from redisacc._protocol.parts.fetch import differing
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.scripts import OF_PARAMETERS, Reply, Scripts, refused
from redisacc._redis.sockets.fast_socket import Command, Pieces
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError, ServerUnavailableError


@dataclass(frozen=True)
class Follows:
    """Which version is published, and what it follows.

    Attributes:
        incarnation: the incarnation that the client has seen; for a first version, the one that it gets.
        previous: id of the version that it follows; "" if it is the first.
        step: its step.
        replaces: whether it may have the step of the version that it follows, because that has lost parts.
    """

    incarnation: str
    previous: str
    step: int
    replaces: bool = False


@dataclass(frozen=True)
class Version:
    """A version on its way to the server.

    Attributes:
        id: its id.
        follows: which version it is.
        event: the message to waiting readers.
        fields: further fields of the record: names and values, alternately.
        blobs: the blobs that it brings, and their bytes.
        kept: blobs of the version before that it needs.
        retired: blobs of the version before that it does without.
        removed: blobs of still earlier versions. They are removed at once, even if a client is still reading them.
        past: what is added to the history of a training; "": nothing.
    """

    id: str
    follows: Follows
    event: str
    fields: Sequence[str]
    blobs: Mapping[Blob, Sequence[memoryview]]
    kept: Sequence[Blob]
    retired: Sequence[Blob]
    removed: Sequence[Blob]
    past: str = ""


@dataclass(frozen=True)
class Begun:
    """An attempt to publish a version has begun.

    Attributes:
        version: the id that the version will have.
    """

    version: str


class VersionWriter:
    """Writes versions of the parameters of one name.

    Args:
        transport: the way to the server, or to the nodes.
        keys: the keys of the parameters, with their partitions.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys) -> None:
        self._transport = transport
        self._keys = keys
        self._scripts = Scripts(transport, keys, OF_PARAMETERS)

    def begin(self, follows: Follows, name: str, blobs: Sequence[Blob]) -> Begun | Reply:
        """Begins an attempt to publish a version. In one slot, the server learns of it when it has all parts.

        Args:
            follows: which version it is.
            name: a random id.
            blobs: the blobs that it will bring.

        Returns:
            `Begun`; or, with nothing changed, the reply that says why there can be no such version.
        """
        if not self._keys.partitions:
            return Begun(name)
        reply = self._scripts.register_version(
            **vars(follows),
            version=name,
            partitions=partitions_text(self._keys.partitions),
            lease_ms=lease_of(sum([blob.nbytes for blob in blobs])),
            blobs=[str(attempt).removeprefix(f"{name}-") for attempt in self._attempts(blobs)],
        )
        return Begun(f"{name}-{reply.number}") if reply.outcome == "registered" else reply

    def write(self, version: Version) -> Reply:
        """Stores the blobs of a version, and makes it visible.

        Returns:
            The reply of ``publish``; its outcome is "lost" if a part of a blob that the version keeps is not there.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        partitions = len(self._keys.partitions)
        parts = {blob.id: cut(pieces, blob.lengths(partitions)) for blob, pieces in version.blobs.items()}
        attempts = self._attempts(version.blobs)
        if not partitions:
            return self._write_to_slot(version, parts, attempts)
        with given_up_on_error(self._transport, self._keys, attempts):
            return self._write_to_partitions(version, parts, attempts)

    def _write_to_slot(
        self, version: Version, parts: Mapping[str, Sequence[memoryview | Pieces]], attempts: Sequence[StoredAttempt]
    ) -> Reply:
        expiry_ms = part_ms(sum(blob.nbytes for blob in version.blobs))
        lengths: dict[str, int] = {}
        # If a connection breaks, this is sent again, and a copy of it may arrive at any time, also when the version is
        # visible. NX: it must not give an expiry to a part that is there.
        store: list[Command] = []
        for blob, of_blob in parts.items():
            for number, part in enumerate(of_blob):
                key = self._keys.part(blob, number)
                lengths[key] = part.nbytes
                store.append(("SET", key, part, "NX", "PX", expiry_ms))
        lost = self._transport.lost
        try:
            reply = self._publish(
                version,
                parts=list(lengths),
                lengths=list(lengths.values()),
                unused=self._part_keys(version.retired),
                before=store,
                # Nobody refers to these in any case. One to a command, because freeing a large string takes the server
                # some time: others get between.
                after=[("UNLINK", key) for key in self._part_keys(version.removed)],
            )
        except ServerUnavailableError:
            # A copy may still arrive, and publish the version.
            raise
        except RedisAccError:
            self._remove_unpublished(attempts, lost)
            raise
        if reply.outcome != "published":
            self._remove_unpublished(attempts, lost)
        return reply

    def _publish(self, version: Version, *, registered: bool = False, **values: Any) -> Reply:
        """Runs the script, with empty lists where nothing else is given."""
        return self._scripts.publish(
            **vars(version.follows),
            **{**dict.fromkeys(("parts", "lengths", "unused", "blobs", "retired", "removed"), ()), **values},
            version=version.id,
            registered=registered,
            event=version.event,
            past=version.past,
            history=[self._keys.history] if version.past else (),
            fields=version.fields,
        )

    def _remove_unpublished(self, attempts: Sequence[StoredAttempt], lost: int) -> None:
        """Removes the parts of a version that was refused, unless another copy of the request may have published it.

        In that case they expire, or a version lists them.
        """
        if self._transport.lost == lost:
            remove_parts_quietly(self._transport, self._keys, attempts)

    def _write_to_partitions(
        self, version: Version, parts: Mapping[str, Sequence[memoryview | Pieces]], attempts: Sequence[StoredAttempt]
    ) -> Reply:
        if differing(self._transport, [part for blob in version.kept for part in blob.parts(self._keys)]):
            sweep_quietly(self._transport, self._keys, attempts)
            return Reply(outcome="lost")
        if write_parts(self._transport, self._keys, parts) is None:
            # If the attempt was swept and forgotten before its last part was written, only we know these parts.
            remove_parts_quietly(self._transport, self._keys, attempts)
            sweep_quietly(self._transport, self._keys, attempts)
            return Reply(outcome="expired")
        lost = self._transport.lost
        reply = self._publish(
            version,
            registered=True,
            blobs=list(map(str, attempts)),
            retired=list(map(str, self._attempts(version.retired))),
            removed=list(map(str, self._attempts(version.removed))),
        )
        if reply.outcome == "published":
            sweep_quietly(self._transport, self._keys)
        elif reply.outcome in ("expired", "deleting"):
            # The attempt is over, so no copy of the request can publish the version. A sweeper, or a deletion, may have
            # missed parts that were written after it had looked.
            remove_parts_quietly(self._transport, self._keys, attempts)
        else:
            self._remove_unpublished(attempts, lost)
            sweep_quietly(self._transport, self._keys, attempts)
        return reply

    def _attempts(self, blobs: Iterable[Blob]) -> list[StoredAttempt]:
        return [blob.attempt(self._keys) for blob in blobs]

    def _part_keys(self, blobs: Iterable[Blob]) -> list[str]:
        return [key for blob in blobs for key in blob.keys(self._keys)]


def amend_latest(transport: Transport, keys: ParameterKeys, *, event: str, fields: Sequence[str]) -> None:
    """Changes fields of the record that do not belong to a version. Something must have been published.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        event: the message to waiting readers.
        fields: names and values, alternately.

    Raises:
        NotFoundError: the parameters were deleted.
    """
    [incarnation] = transport.call("HMGET", keys.record, "incarnation")
    if incarnation is None:
        raise refused(OF_PARAMETERS["missing"], keys)
    amend = Scripts(transport, keys, OF_PARAMETERS).amend
    amend(incarnation=incarnation.decode("ascii", "replace"), event=event, fields=list(fields))
