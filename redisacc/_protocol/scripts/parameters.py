"""Crosses into Lua for parameters, as ``scripts`` does for accumulators: one typed function for each script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redisacc._format.attempts import StoredAttempt
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.scripts.deletion import Deletion, run_delete
from redisacc._protocol.scripts.replication import confirmed, wait_commands
from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Command
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import shown
from redisacc.errors import NotFoundError


@dataclass(frozen=True)
class BeingDeleted:
    """The parameters are being deleted, by a client that may have died."""

    incarnation: str


@dataclass(frozen=True)
class RegisteredVersion:
    """An attempt to publish a version in partitions may begin.

    Attributes:
        number: the number of the attempt, which no other one has.
    """

    number: int


@dataclass(frozen=True)
class Claimed:
    """A claim was noted.

    Attributes:
        asked: the place of the worker that a chief asks to publish what it has; "": none.
    """

    asked: str


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


Refusal = Literal["changed", "older"] | BeingDeleted


class ParameterScripts:
    """Runs the scripts on the parameters of one name.

    Every function raises the errors of `Transport.run`, and CorruptDataError if a key, a field or a reply holds what
    redisacc never writes.

    Args:
        transport: the server.
        keys: the keys of the parameters.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys) -> None:
        self._transport = transport
        self._keys = keys

    def publish(
        self,
        follows: Follows,
        *,
        version: str,
        event: str,
        fields: Sequence[str],
        past: str = "",
        parts: Mapping[str, int] = {},
        unused: Sequence[str] = (),
        registered: bool = False,
        blobs: Sequence[StoredAttempt] = (),
        retired: Sequence[StoredAttempt] = (),
        removed: Sequence[StoredAttempt] = (),
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
    ) -> Literal["published", "expired"] | Refusal:
        """Publishes a version after all its parts have been written.

        Args:
            follows: which version it is.
            version: its id.
            event: the message to waiting readers.
            fields: further fields of the record: names and values, alternately.
            past: what is added to the history of a training, as ``history_text`` makes it; "": nothing.
            parts: key of each part in the slot of the record → its length in bytes. These parts have an expiry.
            unused: keys of parts in this slot that get an expiry.
            registered: whether ``register_version`` has begun it, and its parts are in partitions.
            blobs: the blobs that were written to partitions.
            retired: blobs in partitions that the version does without. A minute later, they are due to be removed.
            removed: blobs in partitions of still earlier versions, which are due at once.
            before: commands that are sent before the script, in the same round trip.
            after: commands that are sent after it, whatever it replies.

        Returns:
            "published"; or, with nothing changed: "expired" if a part is not there, or a sweeper gave the attempt up,
            so that parts may be gone; "changed" if another version than the previous one is there; "older" if the step
            is not higher than its step.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        reply, _ = self._transport.run_and_read(
            *load("publish").bind(
                keys={
                    **self._leader_keys(),
                    "deleted": self._keys.deleted,
                    "history": self._history(past),
                    "parts": list(parts),
                    "unused": unused,
                },
                args={
                    **self._of(follows, version),
                    "registered": int(registered),
                    "event": event,
                    "past": past,
                    "lengths": list(parts.values()),
                    "blobs": list(map(str, blobs)),
                    "retired": list(map(str, retired)),
                    "removed": list(map(str, removed)),
                    "fields": fields,
                },
            ),
            before=before,
            after=after,
        )
        match reply:
            case [b"published"]:
                return "published"
            case [b"expired"]:
                return "expired"
        return self._refused(reply)

    def register_version(
        self, follows: Follows, *, version: str, partitions: str, lease_ms: int, blobs: Sequence[str]
    ) -> RegisteredVersion | Refusal:
        """Registers an attempt to publish a version in partitions, before the first of its parts is written.

        Args:
            follows: which version it is.
            version: a random id. The version gets this id, followed by a hyphen and the number of the attempt.
            partitions: the numbers of the partitions, as a record lists them. The first version decides.
            lease_ms: how long the attempt may take, in milliseconds.
            blobs: "SORT parts" of each blob.

        Returns:
            `RegisteredVersion`; or, with nothing changed, "changed" if another version than the previous one is there,
            "older" if the step is not higher than its step.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        reply = self._transport.run(
            *load("register_version").bind(
                keys={**self._leader_keys(), "deleted": self._keys.deleted},
                args={
                    **self._of(follows, version),
                    "partitions": partitions,
                    "lease_ms": lease_ms,
                    "blobs": blobs,
                },
            )
        )
        match reply:
            case [b"registered", number] if number.isdigit() and len(number) <= 15:
                return RegisteredVersion(int(number))
            case [b"published"]:
                # No version has this id, because those in partitions end with the number of the attempt.
                return "changed"
        return self._refused(reply)

    def _leader_keys(self) -> dict[str, str]:
        return {"record": self._keys.record, "attempts": self._keys.attempts}

    def _history(self, past: str) -> list[str]:
        """Returns the key of the history, if something is added to it."""
        return [self._keys.history] if past else []

    @staticmethod
    def _of(follows: Follows, version: str) -> dict[str, str | int | Sequence[str]]:
        return {
            "incarnation": follows.incarnation,
            "previous": follows.previous,
            "version": version,
            "step": follows.step,
            "replaces": int(follows.replaces),
        }

    def _refused(self, reply: list[bytes]) -> Refusal:
        """Parses a reply that refuses a version.

        Raises:
            NotFoundError: the parameters were deleted.
            CorruptDataError: it says something else.
        """
        match reply:
            case [b"changed"]:
                return "changed"
            case [b"older", _]:
                return "older"
            case [b"deleting", incarnation]:
                return BeingDeleted(incarnation.decode(errors="backslashreplace"))
            case [b"missing"]:
                raise gone(self._keys.name)
            case [b"replaced"]:
                raise replaced(self._keys.name)
        raise corrupt(self._keys.record, reply)

    def amend(self, *, incarnation: str, event: str, fields: Sequence[str], min_replicas: int = 0) -> int:
        """Changes fields of the record that do not belong to a version.

        Args:
            incarnation: the incarnation that the client has seen.
            event: the message to waiting readers.
            fields: fields of the record: names and values, alternately.
            min_replicas: how many replicas are waited for, until they have this and every earlier change; 0: none.

        Returns:
            How many replicas have confirmed it in time; 0 if none were waited for.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        reply, replicas = self._transport.run_and_read(
            *load("amend").bind(
                keys={"record": self._keys.record},
                args={"incarnation": incarnation, "event": event, "fields": fields},
            ),
            after=wait_commands(min_replicas),
        )
        match reply:
            case [b"noted"]:
                return confirmed(self._keys.record, replicas)
            case [b"missing"]:
                raise gone(self._keys.name)
            case [b"replaced"]:
                raise replaced(self._keys.name)
        raise corrupt(self._keys.record, reply)

    def claim(
        self,
        *,
        place: str,
        incarnation: str,
        step: int,
        process: str = "",
        asks: bool = False,
        timeout: float = TIMEOUT,
    ) -> Claimed | Literal["there", "deleted"]:
        """Notes that a worker has the parameters of a training that the server has lost, or that a chief asks for them.

        Args:
            place: "worker" and its number.
            incarnation: the incarnation that the worker has seen.
            step: the step of the parameters that it has.
            process: the identity of its process, without spaces; of no use if a chief asks.
            asks: whether a chief asks this worker.
            timeout: how long to try to reach the server, in seconds.

        Returns:
            `Claimed`; or, with nothing changed, "there" if a version is published, "deleted" if the parameters were not
            lost but deleted.
        """
        keys = self._keys
        reply = self._transport.run(
            *load("claim").bind(
                keys={"record": keys.record, "claims": keys.claims, "deleted": keys.deleted},
                args={
                    "place": place,
                    "incarnation": incarnation,
                    "step": step,
                    "process": process,
                    "asks": int(asks),
                },
            ),
            timeout=timeout,
        )
        match reply:
            case [b"there"]:
                return "there"
            case [b"deleted"]:
                return "deleted"
            case [b"claimed", asked]:
                return Claimed(asked.decode("ascii", "replace"))
        raise corrupt(keys.claims, reply)

    def give_up(self, *, incarnation: str, version: str) -> bool:
        """Makes a training whose version has lost a part one that the server has lost as a whole.

        Args:
            incarnation: the incarnation that the client has seen.
            version: the id of the version.

        Returns:
            Whether it is gone. False: another version is there, and nothing changed.
        """
        keys = self._keys
        reply = self._transport.run(
            *load("give_up").bind(
                keys={"record": keys.record, "claims": keys.claims},
                args={"incarnation": incarnation, "version": version},
            )
        )
        match reply:
            case [b"gone"]:
                return True
            case [b"changed"]:
                return False
        raise corrupt(keys.record, reply)

    def delete(self, *, incarnation: str, finish: bool, timeout: float = TIMEOUT) -> Deletion:
        """Closes the parameters for everybody, or removes their record once they are closed.

        Args:
            incarnation: the incarnation to delete.
            finish: whether to remove the record instead of closing it.
            timeout: how long to try to reach the server, in seconds.
        """
        # Only operators may touch `guard`, by the rules of `redisacc acl`.
        return run_delete(
            self._transport,
            self._keys.record,
            [self._keys.attempts, self._keys.claims, self._keys.history, self._keys.guard],
            marks=[self._keys.deleted],
            incarnation=incarnation,
            finish=finish,
            wakes=False,
            timeout=timeout,
        )


def gone(name: str) -> NotFoundError:
    """Returns the error that says that parameters which existed are there no longer."""
    return NotFoundError(
        f"there are no parameters {shown(name)} any longer: they were deleted, or the server has lost its data"
    )


def replaced(name: str) -> NotFoundError:
    """Returns the error that says that there are other parameters now."""
    return NotFoundError(
        f"parameters {shown(name)} were deleted and published again after this handle had seen them. Open them again"
    )


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
        raise gone(keys.name)
    ParameterScripts(transport, keys).amend(
        incarnation=incarnation.decode("ascii", "replace"), event=event, fields=list(fields)
    )
