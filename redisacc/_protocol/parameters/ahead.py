"""Fetches parts of the next version while it is being made: a bet that saves a waiting reader time.

Updaters tell of each part that they have written. Which version follows is not decided by then, so a part is used only
if the record then names the version of which it is a part. Contents depend on nothing but the name, so it makes no
difference to the values whether a part was fetched early, late, or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from redisacc._arrays.validation import Array
from redisacc._clock import clock
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._format.update_order import parse_updated
from redisacc._protocol.parameters.memory import Memory
from redisacc._protocol.parts.fetch import wrong_length
from redisacc._wire.lanes import LANES
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# With more partitions than this, nothing is fetched ahead, because each takes a thread and a connection.
MOST_CHANNELS = 128
# The most messages that wait to be used. Any client can send them; parts that are not fetched ahead are fetched later.
MOST_HEARD = 10_000
# The sort of the blob that readers read.
FLAT = "flat"
# How often the thread looks whether it is to end, in seconds.
LOOK = 60.0
# How long a part that is on its way is waited for, in seconds, before it is fetched a second time.
PATIENCE = 0.5


@dataclass(slots=True, eq=False, frozen=True)
class _PartAhead:
    """A part that is on its way.

    Attributes:
        key: its key.
        lane: the lane in which it travels.
        version: the id of the version.
        number: its number.
        place: where it goes.
        memory: the memory in which that is.
    """

    key: str
    lane: int
    version: str
    number: int
    place: Array
    memory: Memory


class PartsAhead:
    """The parts of the next version that have arrived, and those that are on their way.

    It listens from the first flat version that a reader has read until it is closed. It needs the memory of a version,
    one thread, and a connection to each node.

    Args:
        transport: the way to the nodes.

    Attributes:
        lanes, homes: as ``Arrivals`` describes them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._alarm = transport.waits.alarm()
        # Set when a part has arrived, or is no longer on its way.
        self._changed = transport.waits.event()
        # Guards what follows.
        self._lock = transport.waits.lock()
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Begins as if nothing had been read or heard."""
        self._process = os.getpid()
        self._keys: ParameterKeys | None = None
        self._listening = contextlib.ExitStack()
        self._offsets: Sequence[int] = (0,)
        # Where the parts of one version go; None means nothing is fetched.
        self._memory: Memory | None = None
        self._version = ""
        self._heard: deque[tuple[str, int]] = deque(maxlen=MOST_HEARD)
        self._in_flight: dict[int, _PartAhead] = {}
        # The numbers of the parts of the version that have arrived.
        self._there: set[int] = set()

    @property
    def homes(self) -> Sequence[str]:
        return () if self._keys is None else self._keys.homes

    @property
    def lanes(self) -> int:
        # This process uploads its own gradient meanwhile.
        return len(self.homes) or LANES

    def close(self) -> None:
        """Ends the thread. Closing twice does nothing."""
        self._closed = True
        if self._process == os.getpid():
            self._listening.close()
            self._alarm.set()

    def expect(self, keys: ParameterKeys, blob: Blob, memory: Memory) -> None:
        """Notes that the next version will be cut as this blob of the latest one is. Begins to listen.

        Args:
            keys: the keys of the parameters, with their partitions.
            blob: the blob that readers read.
            memory: where the next one goes, as long as this one.
        """
        if self._process != os.getpid():
            # The thread is the parent's.
            self._begin()
        with self._lock:
            self._offsets = [0, *accumulate(blob.lengths(len(keys.partitions)))]
            self._memory, self._version = memory, ""
            self._there.clear()
        if self._keys is not None or self._closed or len(keys.partitions) > MOST_CHANNELS:
            return
        self._keys = keys
        try:
            for position in range(len(keys.partitions) or 1):
                channel = keys.updated_of(position)
                heard = pubsub_of(self._transport, channel).listen(channel, self._hear, confirmed=False)
                self._listening.enter_context(heard)
            self._transport.waits.start(self._run, "redisacc-ahead")
        except RuntimeError as error:
            logger.debug("%s: there is no thread left to listen: %s", keys.name, error)
            self._listening.close()

    def take(self, blob: Blob) -> tuple[Memory, frozenset[str]] | None:
        """Returns the memory for a blob of a version, and the keys of the parts that are in it already.

        Waits for parts that are on their way. Nothing is written to the memory afterwards. Returns None if no part of
        this version was fetched ahead.

        Args:
            blob: the blob of the version that readers read.
        """
        if self._keys is None or self._process != os.getpid():
            return None
        arrived, give_up = -1, 0.0
        while True:
            with self._lock:
                self._changed.clear()
                memory = self._memory
                if memory is None or f"{self._version}-{FLAT}" != blob.id:
                    return None
                if not self._in_flight:
                    self._memory = None
                    return memory, frozenset([self._keys.part(blob.id, number) for number in self._there])
                if len(self._there) > arrived:
                    arrived, give_up = len(self._there), clock.now() + PATIENCE
            if self._closed or clock.now() >= give_up:
                return None
            self._changed.wait(PATIENCE)

    def bring(self, version: str, number: int, data: Array) -> None:
        """Takes the bytes of a part that this process has computed itself, so that it is not fetched.

        Called by the thread that leads. The parts are those of the blob that readers read.
        """
        with self._lock:
            part = self._part_of(version, number)
            if part is not None and part.place.nbytes == data.nbytes:
                part.place[:] = data
                self._there.add(number)

    def _hear(self, text: str | None) -> None:
        """Notes a message, in the thread that listens."""
        found = None if text is None else parse_updated(text)
        if found is not None:
            self._heard.append(found)
            self._alarm.set()

    def _run(self) -> None:
        process = self._process
        while not self._closed and process == os.getpid():
            if not self._heard:
                self._alarm.wait(LOOK)
                continue
            try:
                self._transport.fetch(self)
            except RedisAccError as error:
                # The reader fetches it again, and reports it if something is wrong.
                logger.debug("could not fetch ahead: %s", error)
            finally:
                with self._lock:
                    self._in_flight.clear()
                    self._changed.set()

    # Arrivals of sockets:

    def wanted(self) -> list[_PartAhead]:
        """Returns the parts that are on their way."""
        self.more()
        return list(self._in_flight.values())

    def more(self) -> list[_PartAhead]:
        """Returns the parts of which messages have come since."""
        found = []
        with self._lock:
            while self._heard:
                part = self._part_of(*self._heard.popleft())
                if part is not None:
                    self._in_flight[part.number] = part
                    found.append(part)
        return found

    def _part_of(self, version: str, number: int) -> _PartAhead | None:
        """Returns the part that a message tells of, if it is to be fetched."""
        if self._memory is None or self._keys is None or number >= len(self._offsets) - 1:
            return None
        if version != self._version:
            # Another round than was expected, for example because a worker was started again.
            self._version = version
            self._there.clear()
        # What is on its way for another version would be written to the same place.
        if number in self._there or number in self._in_flight:
            return None
        place = self._memory.bytes[self._offsets[number] : self._offsets[number + 1]]
        key = self._keys.part(f"{version}-{FLAT}", number)
        return _PartAhead(key, number % self.lanes, version, number, place, self._memory)

    def begin(self, part: _PartAhead, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.place.nbytes:
            raise wrong_length(part.key, length, part.place.nbytes, "the version before")
        return part.place.data

    def missing(self, part: _PartAhead) -> None:
        """Notes that there is no such part: the message was forged, or the part has expired."""
        self._end(part, arrived=False)

    def finish(self, part: _PartAhead) -> None:
        """Notes that a part has arrived."""
        self._end(part, arrived=True)

    def _end(self, part: _PartAhead, *, arrived: bool) -> None:
        with self._lock:
            del self._in_flight[part.number]
            # An earlier version's message may come again, after that version's memory was given up.
            if arrived and part.version == self._version and part.memory is self._memory:
                self._there.add(part.number)
            self._changed.set()
