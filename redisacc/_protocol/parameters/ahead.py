"""Fetches parts of the next version while it is being made: a bet that saves a waiting reader time.

Updaters tell of each part that they have written. Which version follows is not decided by then, so a part is used only
if the record then names the version of which it is a part. Contents depend on nothing but the name, so it makes no
difference to the values whether a part was fetched early, late, or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._format.update_order import parse_updated
from redisacc._protocol.parts.fetch import wrong_length
from redisacc._redis.pubsub import pubsub_of
from redisacc._redis.sockets.lanes import LANES
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# With more partitions than this, nothing is fetched ahead, because each takes a thread and a connection.
MOST_CHANNELS = 128
# The most messages that wait to be used. Any client can send them; parts that are not fetched ahead are fetched later.
MOST_HEARD = 10_000
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
    """

    key: str
    lane: int
    version: str
    number: int
    place: Array


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
        self._lengths: Sequence[int] = ()
        self._heard: deque[tuple[str, int]] = deque(maxlen=MOST_HEARD)
        self._in_flight: dict[int, _PartAhead] = {}
        # Number of a part → the version of which it has arrived, and its bytes.
        self._there: dict[int, tuple[str, Array]] = {}

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

    def expect(self, keys: ParameterKeys, blob: Blob) -> None:
        """Notes that the next version will be cut as this blob of the latest one is. Begins to listen.

        Args:
            keys: the keys of the parameters, with their partitions.
            blob: the blob that readers read.
        """
        if self._process != os.getpid():
            # The thread is the parent's.
            self._begin()
        self._lengths = blob.lengths(len(keys.partitions))
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

    def take(self, blob: Blob) -> Mapping[str, Array]:
        """Returns the parts of a version that were fetched ahead: key → its bytes. Waits for those on their way.

        Args:
            blob: the blob of the version that readers read.
        """
        if self._keys is None or self._process != os.getpid():
            return {}
        wanted = blob.id.rpartition("-")[0]
        give_up = time.monotonic() + PATIENCE
        arrived = -1
        while True:
            with self._lock:
                coming = [part for part in self._in_flight.values() if part.version == wanted]
                there = {number: data for number, (version, data) in self._there.items() if version == wanted}
                self._changed.clear()
            if not coming or self._closed:
                break
            if len(there) > arrived:
                arrived, give_up = len(there), time.monotonic() + PATIENCE
            if time.monotonic() >= give_up:
                break
            self._changed.wait(PATIENCE)
        with self._lock:
            self._there.clear()
        return {self._keys.part(blob.id, number): data for number, data in there.items()}

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

    # Arrivals of fast_socket:

    def wanted(self) -> list[_PartAhead]:
        """Returns the parts that are on their way."""
        self.more()
        return list(self._in_flight.values())

    def more(self) -> list[_PartAhead]:
        """Returns the parts of which messages have come since."""
        found = []
        while self._heard and self._keys is not None:
            version, number = self._heard.popleft()
            there = self._there.get(number)
            if number >= len(self._lengths) or number in self._in_flight or (there and there[0] == version):
                continue
            # New memory each time, because a part may be in use that was taken before it was whole here.
            place = np.empty(self._lengths[number], np.uint8)
            key = self._keys.part(f"{version}-flat", number)
            part = _PartAhead(key, number % self.lanes, version, number, place)
            with self._lock:
                self._in_flight[number] = part
            found.append(part)
        return found

    def expected(self, part: _PartAhead) -> memoryview:
        """Returns where a part goes if it is as long as that part of the latest version."""
        return part.place.data

    def begin(self, part: _PartAhead, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.place.nbytes:
            raise wrong_length(part.key, length, part.place.nbytes, "the version before")
        return part.place.data

    def missing(self, part: _PartAhead) -> None:
        """Notes that there is no such part: the message was forged, or the part has expired."""
        self._end(part)

    def finish(self, part: _PartAhead) -> None:
        """Notes that a part has arrived."""
        self._end(part, (part.version, part.place))

    def _end(self, part: _PartAhead, there: tuple[str, Array] | None = None) -> None:
        with self._lock:
            if self._in_flight.get(part.number) is part:
                del self._in_flight[part.number]
                if there is not None:
                    self._there[part.number] = there
            self._changed.set()
