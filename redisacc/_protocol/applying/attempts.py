"""Attempts to buffer a gradient: its parts are written under their final names, and then one script counts it.

In one slot, all of it travels together: an announcement, if the gradient is large; its parts, which have an expiry; and
``commit``, which sees that they are there, and removes the expiry. Copies that arrive late change nothing: parts are
written only where there are none.

In partitions, parts are on several nodes:

1. The leader registers the attempt. A stale gradient, or one for which there is no room, is refused here.
2. Each node stores its parts, under names that no other attempt has, and confirms that they are there for good.
3. The leader counts the gradient, unless a sweeper has given up the attempt meanwhile.

docs/internals/partitions.md explains why a crash at any moment loses nothing, counts nothing twice and leaks no
keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._format.attempts import ANNOUNCED_HEADER, StoredAttempt, parts_arrived, upload_begun
from redisacc._format.buffered import ANNOUNCED_INLINES, MESSAGE_BYTES, PART_MS, BufferedGradient, part_keys, part_ms
from redisacc._format.keys import Keys
from redisacc._format.stored_text import weight_text
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.scripts import COUNTED, Reply, Scripts
from redisacc._protocol.sessions import GradientRequest
from redisacc._telemetry.operation import Observe
from redisacc._wire.sockets import Command, Pieces
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long an attempt in partitions may take, in milliseconds; and the bytes for each further millisecond. After that,
# anybody may give it up, and its writer has to begin a new one.
ATTEMPT_MS = 60_000
BYTES_PER_MS = 128
# A server on this machine gets parts so fast that a message tells of this many times as many bytes: it costs a taker
# more than to fetch what has arrived.
LOCAL_MESSAGES = 8
# For how long an upload keeps its place in takers and reducers after its last sign of life, in milliseconds.
HOLDS_MS = 10_000

Part = memoryview | Pieces


@dataclass(slots=True)
class Way:
    """How the gradients of one handle reach the server.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator, with its partitions.
        scripts: its scripts.
        spec: its specification.
        observe: begins to observe a compaction.
        inline_bytes: larger gradients are sent in parts.
        announced_bytes: a gradient of at least so many bytes is announced before its parts, and then leaves part by
            part.
        min_replicas: how many replicas have to confirm a gradient, and of each node its parts in partitions; 0: none.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
    """

    transport: Transport
    keys: Keys
    scripts: Scripts
    spec: AccumulatorSpec
    observe: Observe
    inline_bytes: int
    min_replicas: int
    lease_ms: int
    announced_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.announced_bytes = ANNOUNCED_INLINES * self.inline_bytes


class _Attempt:
    """One attempt to buffer a gradient. Both kinds have the methods that ``SlotAttempt`` describes.

    Args:
        way: how it reaches the server.
        request: the request that applies the gradient.
        name: the id of the gradient; in partitions, the place that the attempt gets follows it.
        header: its header.
        lengths: the length of each part in bytes.
        data: all bytes of an inline gradient; empty if it has parts.
        replaced: the buffered gradients whose sum is part of it, the oldest first.
        summed_weight: the weight that the gradient of the request has in that sum.
    """

    def __init__(
        self,
        way: Way,
        request: GradientRequest,
        name: str,
        header: bytes,
        lengths: Sequence[int],
        *,
        data: bytes = b"",
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
    ) -> None:
        self._way, self._request, self._name = way, request, name
        self._header, self._lengths, self._data = header, lengths, data
        self._replaced, self._summed_weight = replaced, summed_weight
        # Its parts in one slot, which all have the name that they keep.
        self._part_keys = way.keys.parts(name, len(lengths)) if lengths and not way.keys.partitions else []
        # Whether takers and reducers can be told of it.
        self._is_announced = len(header) <= ANNOUNCED_HEADER

    def _counted(
        self,
        listed: StoredAttempt | None = None,
        place: str = "",
        *,
        before: Sequence[Command] = (),
        asks: bool = False,
    ) -> Reply:
        """Runs the script that counts it. If its parts are in partitions, it is listed, and has a place."""
        keys, request, replaced, name = self._way.keys, self._request, self._replaced, self._name
        where = dict(_NOTHING)
        if listed is not None:
            name = listed.id
            where |= {"attempt": str(listed), "registered": place, "bytes": sum(self._lengths)}
        elif self._lengths:
            where |= {"parts": self._part_keys, "lengths": self._lengths}
            if not replaced:
                where["place"] = [keys.place(name)]
        if replaced:
            in_parts = [held for held in replaced if held.lengths]
            where["summed_weight"] = weight_text(self._summed_weight)
            where["replaced"] = [held.id for held in replaced]
            if keys.partitions:
                where["replaced_attempts"] = [str(StoredAttempt(held.id, len(held.lengths))) for held in in_parts]
                where["replaced_bytes"] = sum(held.nbytes for held in in_parts)
            else:
                where["replaced_parts"] = [key for held in in_parts for key in part_keys(keys, held)]
        reply = self._way.scripts.commit(
            **request.arguments(),
            notes=request.notes,
            gradient=name,
            order=request.order,
            header=b"" if asks else self._header,
            data=self._data,
            ahead_bytes=self._way.announced_bytes,
            before=before,
            replicated=not asks,
            **where,
        )
        if where.get("replaced_attempts"):
            self._sweep()
        return reply

    def _messages(self, gradient: str, parts: Mapping[int, Part], every: int = 0) -> dict[int, Hint]:
        """Returns the messages that tell of parts: the number of a part → the message that is sent behind it.

        Args:
            gradient: the id of the gradient.
            parts: the parts, by their numbers.
            every: after this many bytes, a message tells of all parts so far; 0: each part has a message of its own.
        """
        keys, messages = self._way.keys, dict[int, Hint]()
        channels, step = list(map(keys.wake_of, keys.positions)), len(keys.positions)
        unannounced = [0] * step
        for number, part in parts.items() if self._is_announced else ():
            first, lane = divmod(number, step)
            position = keys.positions[lane]
            unannounced[lane] += part.nbytes
            is_due = unannounced[lane] >= every
            if every and number + step >= len(parts):
                # In one slot, the script announces the last ones.
                is_due = position is not None
            if is_due:
                there = (first + 1, position) if every else (1, position, first)
                messages[number] = Hint(("PUBLISH", channels[lane], parts_arrived(gradient, *there)))
                unannounced[lane] = 0
        return messages

    def _sweep(self, abandoned: Sequence[StoredAttempt] = ()) -> None:
        sweep_quietly(self._way.transport, self._way.keys, abandoned, min_replicas=self._way.min_replicas)

    def _renewed(self, message: str, **which: Any) -> str:
        request = self._request
        reply = self._way.scripts.renew_upload(
            worker=request.worker,
            local_step=request.local_step,
            own_step=request.own_step,
            expiry_ms=PART_MS,
            message=message,
            **{"attempt": "", "lease_ms": 0, **which},
        )
        return reply.outcome


# The arguments of ``commit`` about parts, and about gradients that are replaced, if there are none.
_NOTHING: dict[str, Any] = {"attempt": "", "registered": "", "summed_weight": "", "bytes": 0, "replaced_bytes": 0}


class SlotAttempt(_Attempt):
    """An attempt in the slot of the accumulator; also of an inline gradient."""

    def send(self, parts: Sequence[Part], *, announced: bool, asks: bool) -> Reply:
        """Sends the whole gradient.

        Args:
            parts: its parts; none: it is inline.
            announced: whether takers and reducers are told of it while its parts arrive.
            asks: whether to ask only if it would be accepted, if that is less work.

        Returns:
            The reply of the script that has counted or refused it. Its outcome is "unwritten" if parts are gone, so
            that a new attempt is needed; "unconfirmed" if the gradient replaces others, and too few replicas have its
            parts.
        """
        # Sending an inline gradient costs no more than asking.
        asks = asks and bool(parts)
        before: list[Command] = []
        if parts and not asks:
            way, numbered = self._way, dict(enumerate(parts))
            every = MESSAGE_BYTES * LOCAL_MESSAGES if way.transport.is_local else MESSAGE_BYTES
            messages = self._messages(self._name, numbered, every) if announced else {}
            before = written(self._part_keys, numbered, messages)
            if announced and self._is_announced:
                before.insert(0, self._announcement())
        return self._counted(before=before, asks=asks)

    def begin(self) -> str:
        """Announces an upload whose parts leave one by one. Returns "over" if its gradient would be dropped."""
        before = [self._announcement(HOLDS_MS)] if self._is_announced else []
        return self._renewed(parts_arrived(self._name, 0), before=before)

    def write(self, parts: Mapping[int, Part]) -> bool:
        """Writes parts of an upload, and tells of them. Returns whether they are there."""
        self._way.transport.pipeline(written(self._part_keys, parts, self._messages(self._name, parts)))
        return True

    def renew(self, written: Sequence[int] | None) -> str:
        """Lengthens the lease of an upload, and the expiry of what is written, unless that is None.

        Returns:
            "renewed"; "over": its gradient would be dropped; "expired": it was given up.
        """
        keys, which = self._way.keys, {}
        if written is not None:
            which = {"place": [keys.place(self._name)], "parts": [self._part_keys[part] for part in written]}
        return self._renewed(parts_arrived(self._name, 0), **which)

    def commit(self) -> Reply:
        """Counts the gradient of an upload whose parts are all written."""
        # It was announced with a weight of 1.
        changed = self._is_announced and self._request.weight != 1
        # If it fails, the parts may have been counted all the same. Those that are not expire.
        return self._counted(before=[self._announcement()] if changed else [])

    def ask(self) -> Reply:
        """Returns the outcome of an upload that is over; another one than those in COUNTED if it is not over."""
        return self._counted(asks=True)

    def remove(self) -> None:
        """Removes the parts of an upload that nobody will commit. Parts that it misses expire, or are swept."""
        keys = self._way.keys
        try:
            self._way.transport.pipeline([("UNLINK", key) for key in (keys.place(self._name), *self._part_keys)])
        except RedisAccError as error:
            logger.debug("%s: parts are left to expire: %s", keys.name, error)

    def _announcement(self, holds_ms: int = 0) -> Hint:
        """Returns the call that gives the gradient its place, and announces it. Its reply is not needed.

        Args:
            holds_ms: for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual.
        """
        request = self._request
        about = request.arguments()
        return self._way.scripts.hint(
            "stage",
            worker=request.worker,
            local_step=request.local_step,
            own_step=request.own_step,
            round_shape=about["round_shape"],
            weight=about["weight"],
            gradient=self._name,
            order=request.order,
            header=self._header.hex(),
            holds_ms=holds_ms,
            expiry_ms=PART_MS,
        )


class PartitionAttempt(_Attempt):
    """An attempt in partitions, which the leader lists under a lease."""

    _place = ""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._nbytes = sum(self._lengths)
        # How many replicas have confirmed parts, of each node that was asked.
        self._replicas: list[int] = []

    @property
    def _listed(self) -> StoredAttempt:
        return StoredAttempt(f"{self._name}-{self._place}", len(self._lengths))

    def send(self, parts: Sequence[Part], *, announced: bool, asks: bool) -> Reply:  # noqa: ARG002
        # Registering asks whether it would be accepted.
        registered = self._register(announced=announced)
        if registered.outcome != "registered":
            return registered
        self._place = registered.place
        way, attempt = self._way, self._listed
        with self._given_up_on_error():
            numbered = dict(enumerate(parts))
            if not self._write(numbered, self._messages(attempt.id, numbered, MESSAGE_BYTES) if announced else {}):
                # If the attempt was swept and forgotten before all parts were written, only we know the rest.
                remove_parts_quietly(way.transport, way.keys, [attempt])
                self._sweep([attempt])
                return Reply(outcome="unwritten")
            if self._replaced and any(number < way.min_replicas for number in self._replicas):
                # Replicas may have confirmed the gradients that it would replace, and their senders know that.
                self._sweep([attempt])
                return Reply(outcome="unconfirmed")
            return self._elsewhere()

    def begin(self) -> str:
        registered = self._register(announced=True, holds_ms=HOLDS_MS)
        if registered.outcome in COUNTED:
            return "over"
        if registered.outcome != "registered":
            return "expired"
        self._place = registered.place
        return "renewed"

    def write(self, parts: Mapping[int, Part]) -> bool:
        return self._write(parts, self._messages(self._listed.id, parts))

    def renew(self, written: Sequence[int] | None) -> str:  # noqa: ARG002
        attempt = self._listed
        return self._renewed(parts_arrived(attempt.id, 0, 0), attempt=str(attempt), lease_ms=lease_of(self._nbytes))

    def commit(self) -> Reply:
        request, attempt = self._request, self._listed.id
        with self._given_up_on_error():
            if self._is_announced and request.weight != 1:
                # It was announced with a weight of 1.
                text = upload_begun(
                    attempt,
                    request.order or self._place,
                    weight=weight_text(request.weight),
                    round_shape="[]",
                    header=self._header,
                    lease_ms=HOLDS_MS,
                )
                self._way.transport.pipeline([Hint(("PUBLISH", self._way.keys.wake, text))])
            return self._elsewhere()

    def ask(self) -> Reply:
        # An attempt that this begins has no parts, and ends with its lease.
        return self._register()

    def remove(self) -> None:
        if self._place:
            self._sweep([self._listed])
            # A sweeper may have forgotten it before the last parts were written.
            remove_parts_quietly(self._way.transport, self._way.keys, [self._listed])

    def _register(self, *, announced: bool = False, holds_ms: int = 0) -> Reply:
        replaced = self._replaced
        return self._way.scripts.register(
            **self._request.arguments(),
            summed_weight=weight_text(self._summed_weight) if replaced else "",
            gradient=self._name,
            order=self._request.order,
            parts=len(self._lengths),
            bytes=self._nbytes,
            replaced_bytes=sum(held.nbytes for held in replaced if not held.inline),
            replaced=[held.id for held in replaced],
            lease_ms=lease_of(self._nbytes),
            announced=self._header.hex() if announced and self._is_announced else "",
            holds_ms=holds_ms,
        )

    def _write(self, parts: Mapping[int, Part], hints: Mapping[int, Hint]) -> bool:
        way = self._way
        replicas = write_parts(
            way.transport,
            way.keys,
            {self._listed.id: parts},
            min_replicas=way.min_replicas,
            lease_ms=way.lease_ms,
            hints=hints,
        )
        self._replicas += replicas or ()
        return replicas is not None

    def _elsewhere(self) -> Reply:
        way, attempt = self._way, self._listed
        lost = way.transport.lost
        reply = self._counted(attempt, self._place)
        reply.replicas = min([reply.replicas, *self._replicas])
        if reply.outcome in ("applied", "swapped"):
            return reply
        if reply.outcome == "expired" or way.transport.lost == lost:
            # No copy of the commit has counted it, or ever will. A sweeper may have missed parts that were written
            # after it had looked.
            remove_parts_quietly(way.transport, way.keys, [attempt])
        if reply.outcome == "expired":
            return Reply(outcome="unwritten")
        self._sweep()
        return reply

    def _given_up_on_error(self) -> Any:
        way = self._way
        return given_up_on_error(way.transport, way.keys, [self._listed], min_replicas=way.min_replicas)


def lease_of(nbytes: int) -> int:
    """Returns how long an attempt in partitions to write that many bytes may take, in milliseconds."""
    return ATTEMPT_MS + nbytes // BYTES_PER_MS


def written(keys: Sequence[str], parts: Mapping[int, Part], messages: Mapping[int, Hint] = {}) -> list[Command]:
    """Returns the commands that write parts of a gradient in one slot, and those that tell of them.

    Args:
        keys: the keys of all its parts.
        parts: the parts, by their numbers.
        messages: the number of a part → the message that is sent behind it.
    """
    commands: list[Command] = []
    expiry = 0
    for number, part in parts.items():
        # The last part of a gradient is the only one that may be smaller.
        expiry = expiry or part_ms(len(parts) * part.nbytes)
        # NX: this may arrive again, also when the gradient counts.
        commands.append(("SET", keys[number], part, "NX", "PX", expiry))
        if number in messages:
            commands.append(messages[number])
    return commands
