"""Every key of an accumulator, and of parameters, in one place.

All of them carry the hash tag ``{NAME}``, so they live in one slot of a Redis Cluster and one script may touch all of
them. Scripts get every key that they touch in KEYS. Only the parts of gradients, and of blobs of parameters, may lie in
other slots, the partitions ``{NAME/p}``, where p has five digits; no script touches them there. All of their keys and
channels there begin with ``redisacc:{NAME/p}:partition:``, and no other key does. So a pattern of the partitions of one
name matches nothing of another, even of one that is called ``NAME/00001``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from redisacc._format.stored_text import of_ascii
from redisacc._text import is_unicode, shown
from redisacc._wire.slot_map import SlotMap, key_slot
from redisacc.errors import InvalidArgumentError

PREFIX = "redisacc:"

# The set of all shared names, for listing.
NAMES = f"{PREFIX}names"

# While an accumulator or parameters are being deleted, their incarnation begins with this (lua/delete.lua), so no
# handle can use it.
DELETING = "deleted:"

# What a number of a partition looks like in a hash tag, as a glob of the server.
ANY_PARTITION = "[0-9]" * 5

_REF = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}")


@dataclass(slots=True)
class RoundKeys:
    """The keys of the hashes of a round, either the current one or one that was taken.

    Attributes:
        sums: gradients that were summed in place.
        buffered: the headers of buffered gradients.
        inline: buffered gradients that are small enough to be a field of this hash.
        workers: worker's name → number of gradients.
    """

    sums: str
    buffered: str
    inline: str
    workers: str

    @classmethod
    def under(cls, base: str) -> RoundKeys:
        """Returns the keys that begin with ``base``."""
        return cls(f"{base}:sums", f"{base}:buffered", f"{base}:inline", f"{base}:workers")

    @property
    def hashes(self) -> tuple[str, str, str, str]:
        """All four keys."""
        return self.sums, self.buffered, self.inline, self.workers


class PartitionedKeys:
    """The common keys of accumulators and of parameters: both have parts, which may be in partitions.

    Args:
        name: the name.
        record: the key of the record, which is in the slot ``{NAME}``.
        partitions: the numbers of the slots ``{NAME/p}`` that hold the parts (``partitions.py``); empty if that is the
            slot ``{NAME}``.

    Attributes:
        name: the name.
        base: what all keys in the slot of the record begin with.
        partitions: as above.
        record: the key of the record.
        attempts: the key of the attempts to store parts in partitions.
        events: the channel of events.
        homes: the prefix of the keys of each partition, in the order of the partitions; empty if there are none.
    """

    def __init__(self, name: str, record: str, partitions: tuple[int, ...]) -> None:
        self.name = name
        self.base = f"{PREFIX}{{{name}}}"
        self.partitions = partitions
        self.record = record
        self.attempts = f"{record}:attempts"
        self.events = f"{record}:events"
        self.homes = tuple([self.partition(number) for number in range(len(partitions))])

    def part(self, owner: str, number: int) -> str:
        """Returns the key of part ``number`` (from 0) of the gradient or blob with this id. Partitions take turns."""
        raise NotImplementedError

    def partition(self, number: int) -> str:
        """Returns what the keys of part ``number`` of all gradients and blobs begin with. Partitions take turns."""
        return f"{PREFIX}{{{self.name}/{self.partitions[number % len(self.partitions)]:05}}}:partition"

    def slot(self, number: int) -> str:
        """Returns the same; without partitions, what the keys in the slot of the record begin with."""
        return self.partition(number) if self.partitions else self.record


class Keys(PartitionedKeys):
    """The keys of one accumulator. lua/ and docs/reference/keys.md say what they hold.

    Args:
        name: the name of the accumulator.
        partitions: the numbers of the slots ``{NAME/p}`` that hold the parts of gradients.

    Attributes:
        name, partitions, record, attempts, events: as ``PartitionedKeys`` describes them. The key of the record is also
            the ``accumulator_ref``.
        sessions: the key of the sessions.
        queue: the key of the tokens of waiting takers, in order of arrival.
        takers: the key of the data of waiting takers.
        taken: the key of the list of rounds that were taken and not acknowledged.
        recovered: the key of the list of the latest recoveries.
        crew: the key of the leases of the chief and the workers who train under this name.
        wake: the channel for waiting takers: events that may complete a round, and gradients on their way.
        calls: the channel on which a waiting taker calls for reducers. In a cluster, all nodes pass its messages on.
        current: the keys of the current round.
        positions: the positions of the partitions, from 0 on; None alone if there are none. Each has a reducer of its
            own.
        reducers: the keys of the leases of all reducers.
    """

    positions: Sequence[int | None]

    def __init__(self, name: str, partitions: tuple[int, ...] = ()) -> None:
        super().__init__(name, f"{PREFIX}{{{name}}}", partitions)
        self.sessions = f"{self.record}:sessions"
        self.queue = f"{self.record}:queue"
        self.takers = f"{self.record}:takers"
        self.taken = f"{self.record}:taken"
        self.recovered = f"{self.record}:recovered"
        self.crew = f"{self.record}:crew"
        self.wake = f"{self.record}:wake"
        self.calls = f"{self.record}:calls"
        self.positions = range(len(partitions)) if partitions else (None,)
        self.reducers = [self.reducer(position) for position in self.positions]
        self.current = RoundKeys.under(self.record)
        # The keys of the latest taken round. A take asks for them three times.
        self._latest: tuple[str | None, RoundKeys] = (None, self.current)

    @classmethod
    def of_ref(cls, ref: str) -> Keys:
        """Returns the keys of the accumulator that an ``accumulator_ref`` denotes.

        Raises:
            InvalidArgumentError: it is not an ``accumulator_ref``.
        """
        match = _REF.fullmatch(ref) if isinstance(ref, str) and is_unicode(ref) else None
        if match is None:
            raise InvalidArgumentError(f"handle must be an accumulator_ref like '{PREFIX}{{NAME}}', not {shown(ref)}")
        return cls(match[1])

    @property
    def compacting(self) -> str:
        """The key of the lock, with an expiry of a few seconds, of the client that compacts buffered gradients."""
        return f"{self.record}:compacting"

    def taken_round(self, token: str) -> RoundKeys:
        """Returns the keys of the round that was granted to ``token``."""
        known, of = self._latest
        if known != token:
            of = RoundKeys.under(f"{self.taken}:{token}")
            self._latest = token, of
        return of

    def part(self, owner: str, number: int) -> str:
        """Returns the key of part ``number`` (from 0) of a buffered gradient. Partitions take turns."""
        if self.partitions:
            return f"{self.partition(number)}:part:{owner}:{number}"
        return f"{self.record}:part:{owner}:{number}"

    def home(self, position: int | None) -> str:
        """Returns a key in the slot of the partition at a position."""
        return self.record if position is None else self.partition(position)

    def reducer(self, position: int | None) -> str:
        """Returns the key of the lease of the reducer for the partition at a position. It has an expiry.

        It is always in the slot ``{NAME}``, so that a taker asks for all of them at once.
        """
        return f"{self.record}:reducer" if position is None else f"{self.record}:reducer:{self.partitions[position]}"

    def wake_of(self, position: int | None) -> str:
        """Returns the channel on which the node of the partition at a position announces arrived parts."""
        return self.wake if position is None else f"{self.partition(position)}:wake"

    def parts(self, owner: str, number: int) -> list[str]:
        """Returns the keys of all parts of a buffered gradient, given how many it has."""
        if self.partitions:
            return [self.part(owner, part) for part in range(number)]
        head = f"{self.record}:part:{owner}:"
        return [head + str(part) for part in range(number)] if number else []

    def place(self, gradient: str) -> str:
        """Returns the key of the place of a gradient whose parts are being written. It has an expiry."""
        return f"{self.record}:place:{gradient}"

    def sum(self, digest: str, number: int) -> str:
        """Returns the key of part ``number`` (from 0) of a sum that a reducer stored. It has an expiry.

        Args:
            digest: names the gradients that the sum contains.
            number: the number of the part, counted from the first one with dense elements. With partitions, it is where
                the part of the same number of a gradient without sparse parts would be.
        """
        return f"{self.slot(number)}:sum:{digest}:{number}"

    def squares(self, digest: str, number: int) -> str:
        """Returns the key of the sum of the squares of a part of a mean, from an updater. It has an expiry.

        The arguments are those of ``sum``.
        """
        return f"{self.slot(number)}:squares:{digest}:{number}"


class ParameterKeys(PartitionedKeys):
    """The keys of the parameters of one name. They share the hash tag of the accumulator of that name.

    Args:
        name: the name of the parameters.
        partitions: the numbers of the slots ``{NAME/p}`` that hold the parts of blobs.

    Attributes:
        name, partitions, record, attempts, events: as ``PartitionedKeys`` describes them.
        deleted: the key of the mark of a deletion: the incarnations that were deleted last. It has an expiry.
        claims: the key of the claims of workers whose training the server has lost. It has an expiry.
        history: the key of the history of a run: some of its steps, with their metrics.
        guard: a key that never exists. A user whose ACL allows it may delete the parameters.
    """

    def __init__(self, name: str, partitions: tuple[int, ...] = ()) -> None:
        super().__init__(name, f"{PREFIX}{{{name}}}:parameters", partitions)
        self.deleted = f"{self.record}:deleted"
        self.claims = f"{self.record}:claims"
        self.history = f"{self.record}:history"
        self.guard = f"{self.record}:guard"

    def part(self, owner: str, number: int) -> str:
        """Returns the key of part ``number`` (from 0) of a blob. Partitions take turns."""
        return f"{self.slot(number)}:{'blob' if self.partitions else 'object'}:{owner}:{number}"

    def updated_of(self, number: int) -> str:
        """Returns the channel on which updaters tell of part ``number`` of the next version. Partitions take turns."""
        return f"{self.slot(number)}:updated"


# What follows the name of a training of torch in the names of the parameters that hold what else its model has: frozen
# parameters and buffers; and snapshots of weights that each process updates itself.
REST, SNAPSHOT = ".rest", ".snapshot"


# Partitions: the slots of a Redis Cluster among which an accumulator spreads the parts of its gradients.
#
# A partition is a slot ``{NAME/p}``. Its number p was chosen when the accumulator was created, so that the partitions
# lie on as many nodes as there are. Part K of every gradient is in partition K modulo their number, and gradients are
# cut in such a way that the same partition has the same elements of all of them.

# The most partitions: a Redis Cluster has at most about a thousand nodes.
MOST_PARTITIONS = 1000
# The largest number of a partition. It bounds the search for numbers whose slots lie on the right nodes.
_LAST_NUMBER = 99_999

# The least bytes of a gradient for each partition if the number of partitions is chosen here. At 1 Gbit/s, with four
# workers and a node on each one's host, a step of 1 MiB takes 47 ms in one partition and 34 ms in four. Smaller pieces
# would cost more requests than the other nodes save. Beyond this many partitions, messages about parts are what takes
# time (benchmarks/results/scale.md), so that each needs more bytes.
AUTO_BYTES = 2**18
AUTO_MANY = 64
AUTO_BYTES_OF_MANY = 2**20

_TEXT = re.compile(r"(?:[0-9]{1,5},)*[0-9]{1,5}")
_LONGEST = MOST_PARTITIONS * 6


def parse_partitions(stored: bytes | str) -> tuple[int, ...]:
    """Returns the numbers that a record lists; () if the accumulator has no partitions.

    Raises:
        ValueError: redisacc writes no such text.
    """
    text = of_ascii(stored)
    if not text:
        return ()
    if len(text) > _LONGEST or _TEXT.fullmatch(text) is None:
        raise ValueError("the text is not a list of numbers")
    numbers = tuple(map(int, text.split(",")))
    if partitions_text(numbers) != text or not 2 <= len(set(numbers)) == len(numbers) <= MOST_PARTITIONS:
        raise ValueError("the numbers are not those of partitions")
    return numbers


def partitions_text(numbers: tuple[int, ...]) -> str:
    """Returns the text that a record lists."""
    return ",".join(map(str, numbers))


def choose_partitions(name: str, number: int, slot_map: SlotMap | None) -> tuple[int, ...]:
    """Returns the numbers of the partitions of a new accumulator, so that each master gets as many as any other.

    Args:
        name: the name of the accumulator.
        number: how many partitions; 1: none, because the slot of the record suffices.
        slot_map: the owners of the slots; None means a single server, which has all of them.
    """
    if number == 1:
        return ()
    if slot_map is None or len(slot_map.masters) < 2:
        return tuple(range(number))
    # The master with the record already has its work to do, so it is the last to get one more than the others.
    home = slot_map.owner(key_slot(f"{{{name}}}"))
    masters = sorted(slot_map.masters, key=lambda master: master == home)
    free = {master: number // len(masters) for master in masters}
    for master in masters[: number % len(masters)]:
        free[master] += 1
    chosen: list[int] = []
    for candidate in range(_LAST_NUMBER + 1):
        owner = slot_map.owner(key_slot(f"{{{name}/{candidate:05}}}"))
        if owner is not None and free.get(owner, 0) > 0:
            free[owner] -= 1
            chosen.append(candidate)
            if len(chosen) == number:
                break
    else:
        # A master has too few slots: the next free numbers take its place.
        chosen += [spare for spare in range(_LAST_NUMBER + 1) if spare not in chosen][: number - len(chosen)]
    return tuple(chosen)


def automatic_partitions(nbytes: int | None, slot_map: SlotMap | None) -> int:
    """Returns how many partitions a new accumulator should have.

    Args:
        nbytes: the bytes of a gradient; None if they are not known.
        slot_map: the owners of the slots; None means a single server.

    Returns:
        The number of masters, but at most one for each 256 KiB of a gradient, and of more than 64, at most one for each
        MiB; 1 on a single server.
    """
    masters = 1 if slot_map is None else len(slot_map.masters)
    return masters if nbytes is None else min(masters, most_automatic_partitions(nbytes))


def most_automatic_partitions(nbytes: int) -> int:
    """Returns among how many partitions a gradient of this many bytes is spread if there are enough masters."""
    return max(1, min(AUTO_MANY, nbytes // AUTO_BYTES), nbytes // AUTO_BYTES_OF_MANY)
