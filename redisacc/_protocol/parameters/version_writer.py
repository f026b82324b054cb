"""Stores the blobs of a version of parameters, and makes it visible.

Each part is written under its final name, which no other attempt uses, with an expiry. The script ``publish`` makes the
version visible. It does so only if all parts are there and will stay:

- In the slot of the record, the script checks that itself, and removes the expiry. The parts travel ahead of it in the
  same round trip.
- In partitions, no script can. The leader registers the attempt first, which gives it a lease; a version that cannot
  follow the published one is refused there. Then each node stores its parts, and confirms that they are there to stay.
  The script makes the version visible if the attempt still has its lease, and lists the blobs that the new
  version does without. They are removed a minute later, by the next publisher or by ``redisacc doctor --fix``.

docs/internals/partitions.md explains why no reader sees a mixture of versions, and why nothing is lost or leaked.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from redisacc._clock import durations, running_time
from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import cut, part_ms
from redisacc._format.keys import ParameterKeys, partitions_text
from redisacc._format.leaves import Schema
from redisacc._format.parameter_record import FORMAT, Blob, announcement
from redisacc._format.stored_text import parse_number
from redisacc._protocol.applying.attempts import lease_of
from redisacc._protocol.parameters.deletion import delete_parameters
from redisacc._protocol.parameters.upload_plan import Change
from redisacc._protocol.parts.fetch import are_there
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.rounds.granted_rounds import EndedRound
from redisacc._protocol.scripts import (
    OF_PARAMETERS,
    Reply,
    Scripts,
    confirmed,
    refused,
    wait_commands,
)
from redisacc._text import shown
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import RedisAccError, ServerError, ServerUnavailableError

logger = logging.getLogger("redisacc")

# How long the first pause between two tries is, in seconds, and how long later ones are at most. Each is twice as long
# as the one before.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0

# Why a version was not published, as clauses, by the outcome.
_CAUSES = {
    "expired": "parts of it disappeared before it was visible",
    "lost": "a part of the version before is lost",
    "changed": "another version was published meanwhile",
    "older": "another version was published meanwhile",
    "deleting": "the parameters were being deleted",
}

# The arguments of ``publish`` for a version that belongs to no round.
_NO_ROUND = {"token": "", "more": False}


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
        id: its id. In partitions, it ends with the number under which it is registered.
        follows: which version it is.
        publisher: who publishes it.
        schema: the leaves as readers get them.
        encoding: how they are stored.
        change: its blobs, and what becomes of earlier ones.
        fields: further fields of the record: names and values, alternately.
        pieces: the bytes of the blobs that this process brings.
        finished: whether it is the last one.
        round: the round from which it follows, which ends when it is published; None means it belongs to none.
        kept: what the program keeps from now on, as text; None means the same as before.
    """

    id: str
    follows: Follows
    publisher: str
    schema: Schema
    encoding: str
    change: Change
    fields: Sequence[str]
    pieces: Mapping[Blob, Sequence[memoryview]]
    finished: bool = False
    round: EndedRound | None = None
    kept: str | None = None

    @cached_property
    def blobs(self) -> Collection[Blob]:
        """The blobs that it consists of."""
        return self.change.manifest.blobs(self.schema.stored(self.encoding)).values()

    @cached_property
    def brought(self) -> list[Blob]:
        """Those that it brings itself."""
        return [blob for blob in self.blobs if blob.id.startswith(f"{self.id}-")]

    @property
    def event(self) -> str:
        """The message to waiting readers, who do not fetch the state."""
        manifest = self.change.manifest
        state = (manifest.state, *manifest.slots)
        return announcement(self.follows.step, [blob for blob in self.brought if blob not in state])

    def every_field(self) -> list[str]:
        """Returns the fields of the record that it sets: names and values, alternately."""
        fields = [*self.change.manifest.fields(), "publisher", self.publisher, "encoding", self.encoding, *self.fields]
        if self.finished:
            fields += ["finished", "1"]
        if self.kept is not None:
            fields += ["kept", self.kept]
        if not self.follows.previous:
            fields += ["format", FORMAT, "structure", self.schema.text]
            fields += ["leaves", str(len(self.schema.leaves)), "bytes", str(self.schema.nbytes)]
        return fields


class Tries:
    """Tries to publish a version, with longer and longer pauses between them.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        step: the step of the version.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys, step: int) -> None:
        self._transport, self._keys, self._step = transport, keys, step
        self._deadline = running_time() + durations.call
        self._failures = 0

    def pause(self, reply: Reply) -> None:
        """Pauses before the next try. ``reply`` says why the last one failed.

        Raises:
            ServerError: the time is up.
        """
        if reply.outcome == "deleting":
            # Somebody is deleting it, or died while deleting it. Finishing their work twice does no harm.
            delete_parameters(self._transport, self._keys, reply.incarnation)
        cause = _CAUSES[reply.outcome]
        self._failures += 1
        # Each try may upload the whole model, so a cause that lasts must not fill the network.
        pause = min(FIRST_PAUSE * 2 ** (self._failures - 1), LONGEST_PAUSE)
        left = self._deadline - running_time()
        if pause >= left:
            raise ServerError(
                f"step {self._step} of parameters {shown(self._keys.name)} could not be published in {self._failures} "
                f"tries within {durations.call:.0f} s. The last one failed because {cause}"
            )
        if self._failures == 2:
            # Once may happen at any time, for example because another publisher was faster.
            logger.warning(
                "%s: step %d could not be published yet, because %s; trying again for %.0f s",
                self._keys.name,
                self._step,
                cause,
                left,
            )
        self._transport.waits.sleep(pause)
        running_time(waited=pause)


class VersionWriter:
    """Writes versions of the parameters of one name.

    Args:
        transport: the way to the server, or to the nodes.
        keys: the keys of the parameters, with their partitions.
        min_replicas: how many replicas of each node ``confirm`` waits for.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys, min_replicas: int = 0) -> None:
        self._transport = transport
        self._keys = keys
        self._scripts = Scripts(transport, keys, OF_PARAMETERS, min_replicas=min_replicas)

    def write(self, previous: str, make: Callable[[str], Version]) -> tuple[Version, Reply]:
        """Writes the blobs of a version, and makes it visible. No process but this one writes them.

        Args:
            previous: the id of the version that it follows; "" if it is the first.
            make: returns the version, given its id.

        Returns:
            The version; and the reply that says whether it is published, or why there can be no such version. Its
            outcome is "lost" if a part of a blob that the version keeps is not there.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        # Every attempt has its own names: after a failover, the leader may give the number to another one, while a
        # sweeper is still removing the parts of the first.
        name, number = secrets.token_hex(8), 1
        if not self._keys.partitions:
            version = make(name)
            return version, self._write_to_one_slot(version)
        with contextlib.suppress(ValueError):
            # Usually no attempt has failed since.
            number += parse_number(previous.rpartition("-")[2])
        while True:
            version = make(f"{name}-{number}")
            reply = self.register(version.follows, version.id, number, version.brought)
            if reply.outcome == "registered":
                attempts = [blob.attempt(self._keys) for blob in version.brought]
                with given_up_on_error(self._transport, self._keys, attempts):
                    return version, self._write_to_partitions(version, attempts)
            if reply.outcome != "renumbered":
                return version, reply
            number = reply.number

    def register(self, follows: Follows, version: str, number: int, blobs: Sequence[Blob], *, order: str = "") -> Reply:
        """Registers an attempt to publish a version in partitions.

        Args:
            follows: which version it is.
            version: its id, which ends with the number.
            number: the number of the attempt.
            blobs: the blobs that it will bring.
            order: what updaters are told; "": no optimizer makes it.
        """
        return self._scripts.register_version(
            **vars(follows),
            version=version,
            number=number,
            order=order,
            partitions=partitions_text(self._keys.partitions),
            lease_ms=lease_of(sum([blob.nbytes for blob in blobs])),
            blobs=self._listed(blobs),
        )

    def _write_to_one_slot(self, version: Version) -> Reply:
        attempts = [blob.attempt(self._keys) for blob in version.brought]
        lost = self._transport.lost
        try:
            reply = self.publish(version)
        except ServerUnavailableError:
            # A copy may still arrive, and publish the version.
            raise
        except RedisAccError:
            self._remove_unpublished(attempts, lost)
            raise
        if reply.outcome != "published":
            self._remove_unpublished(attempts, lost)
        return reply

    def publish(self, version: Version, *, before: Sequence[Command] = (), after: Sequence[Command] = ()) -> Reply:
        """Makes a version visible if all its parts are there. In one slot, the pieces travel ahead of the script.

        Args:
            version: the version.
            before: further commands that travel ahead of it, in one slot.
            after: those that travel behind it. Their replies are the last that the reply has ``read``.
        """
        keys, ended, is_registered = self._keys, version.round, bool(self._keys.partitions)
        _, retired, removed = version.change
        past = "" if ended is None else ended.past
        lengths = {} if is_registered else {key: size for blob in version.brought for key, size in blob.parts(keys)}
        reply = self._scripts.publish(
            **vars(version.follows),
            **(_NO_ROUND if ended is None else ended.arguments()),
            past=past,
            history=[keys.history] if past else (),
            version=version.id,
            registered=is_registered,
            event=version.event,
            parts=list(lengths),
            lengths=list(lengths.values()),
            unused=() if is_registered else self._part_keys(retired),
            blobs=self._listed(version.brought),
            retired=self._listed(retired),
            removed=self._listed(removed),
            fields=version.every_field(),
            before=() if is_registered else [*before, *self._stored(version.pieces)],
            # Nobody refers to these in any case. One to a command, because freeing a large string takes the server some
            # time: others get between.
            after=[*([] if is_registered else [("UNLINK", key) for key in self._part_keys(removed)]), *after],
        )
        if ended is not None and ended.token and reply.outcome == "published":
            ended.has_ended = True
        return reply

    def _stored(self, blobs: Mapping[Blob, Sequence[memoryview]]) -> list[Command]:
        """Returns the commands that store blobs in the slot of the record.

        If a connection breaks, they are sent again, and a copy of them may arrive at any time, also when the version is
        visible. NX: it must not give an expiry to a part that is there.
        """
        expiry_ms = part_ms(sum([blob.nbytes for blob in blobs]))
        return [
            ("SET", self._keys.part(blob.id, number), part, "NX", "PX", expiry_ms)
            for blob, pieces in blobs.items()
            for number, part in enumerate(cut(pieces, blob.lengths(0)))
        ]

    def _remove_unpublished(self, attempts: Sequence[StoredAttempt], lost: int) -> None:
        """Removes the parts of a version that was refused, unless another copy of the request may have published it.

        In that case they expire, or a version lists them.
        """
        if self._transport.lost == lost:
            remove_parts_quietly(self._transport, self._keys, attempts)

    def _write_to_partitions(self, version: Version, attempts: Sequence[StoredAttempt]) -> Reply:
        transport, keys = self._transport, self._keys
        kept = [blob for blob in version.blobs if blob not in version.brought]
        if not are_there(transport, keys, kept):
            sweep_quietly(transport, keys, attempts)
            return Reply(outcome="lost")
        if not self.write_parts(version.pieces):
            # If the attempt was swept and forgotten before its last part was written, only we know these parts.
            remove_parts_quietly(transport, keys, attempts)
            sweep_quietly(transport, keys, attempts)
            return Reply(outcome="expired")
        lost = transport.lost
        reply = self.publish(version)
        if reply.outcome == "published":
            sweep_quietly(transport, keys)
        elif reply.outcome in ("expired", "deleting"):
            # The attempt is over, so no copy of the request can publish the version. A sweeper, or a deletion, may have
            # missed parts that were written after it had looked.
            remove_parts_quietly(transport, keys, attempts)
        else:
            self._remove_unpublished(attempts, lost)
            sweep_quietly(transport, keys, attempts)
        return reply

    def write_parts(self, blobs: Mapping[Blob, Sequence[memoryview]]) -> bool:
        """Writes blobs to partitions. Returns whether all their parts are there to stay."""
        partitions = len(self._keys.partitions)
        parts = {blob.id: cut(pieces, blob.lengths(partitions)) for blob, pieces in blobs.items()}
        return write_parts(self._transport, self._keys, parts) is not None

    def confirm(self, incarnation: str, step: int, blobs: Iterable[Blob]) -> None:
        """Blocks until replicas have a version that was published, for up to 5 s for its parts, and 5 s for its record.

        Replicas confirm what a connection has written, so this writes something that changes no value: the number of
        replicas into the record, and nothing to the end of each part. Their confirmation then covers every earlier
        write of the same server, also those of a publisher who died, and those that were sent twice
        (see ``parts/write.py``).

        Args:
            incarnation: which parameters of that name.
            step: the step of the version, for the error.
            blobs: its blobs. Those in the slot of the record are covered by its confirmation.

        Raises:
            NotReplicatedError: fewer have confirmed it in time. The version is published all the same.
            NotFoundError: the parameters were deleted.
        """
        keys, needed, counts = self._keys, self._scripts.min_replicas, list[int]()
        if keys.partitions:
            batches: list[list[Command]] = [[("APPEND", key, b"")] for blob in blobs for key in blob.keys(keys)]
            found = self._transport.scatter(batches, after=wait_commands(needed))
            counts += [confirmed(str(batch[0][1]), of[-1:]) for batch, of in zip(batches, found, strict=True)]
        fields = ["min_replicas", str(needed)]
        reply = self._scripts.amend(incarnation=incarnation, event="confirming", fields=fields, replicated=True)
        self._scripts.check_replicated(
            min([*counts, reply.replicas]),
            f"step {step} is published",
            ". If their master fails now, the step is lost. Publish the same again, which waits again",
        )

    def _listed(self, blobs: Iterable[Blob]) -> Sequence[str]:
        """Returns blobs as the list of attempts has them; in one slot, it has none."""
        return [str(blob.attempt(self._keys)) for blob in blobs] if self._keys.partitions else ()

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
