"""Parts of the next version that are fetched before it is published, and what forged messages about them do."""

from __future__ import annotations

import numpy as np
import pytest

from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._protocol.parameters.ahead import PartsAhead
from redisacc._protocol.parameters.memory import Memory
from redisacc._redis.connect import connect

pytestmark = pytest.mark.servers("valkey")

LENGTHS = (5, 5, 3)
FIRST, SECOND = "aa-1", "bb-1"


class Ahead:
    """Parts of versions that a test writes and tells of."""

    def __init__(self, client, partitions):
        self.client = client
        self.keys = ParameterKeys("ahead", partitions)
        self.found = PartsAhead(connect(client))
        self.memory = Memory(sum(LENGTHS))
        self.found.expect(self.keys, self.blob("cc-1"), self.memory)

    def blob(self, version):
        return Blob(f"{version}-flat", sum(LENGTHS), LENGTHS, len(LENGTHS))

    def parts(self, version, numbers=range(3)):
        return {self.keys.part(f"{version}-flat", number) for number in numbers}

    def write(self, version, number, data):
        self.client.set(self.keys.part(f"{version}-flat", number), data)

    def tell(self, text, number):
        """Returns whether it was heard."""
        return self.client.publish(self.keys.updated_of(number), text) > 0


@pytest.fixture(params=[(), (0, 1, 2)], ids=["one slot", "partitions"])
def ahead(request, real_client, until):
    made = Ahead(real_client, request.param)
    # A message that redisacc never sends, until somebody listens.
    for number in range(3):
        until(lambda number=number: made.tell("?", number))
    yield made
    made.found.close()
    for version in (FIRST, SECOND):
        real_client.delete(*made.parts(version))


def test_parts_are_fetched_into_their_places(ahead, until):
    for number, data in enumerate((b"abcde", b"fghij", b"klm")):
        ahead.write(FIRST, number, data)
        ahead.tell(f"{FIRST} {number}", number)
    until(lambda: len(ahead.found._there) == 3)
    memory, there = ahead.found.take(ahead.blob(FIRST))
    assert memory is ahead.memory
    assert there == ahead.parts(FIRST)
    assert bytes(memory.bytes) == b"abcdefghijklm"
    # It belongs to the caller now.
    assert ahead.found.take(ahead.blob(FIRST)) is None


def test_nothing_is_written_to_memory_that_was_taken(ahead, until):
    ahead.write(FIRST, 0, b"abcde")
    ahead.tell(f"{FIRST} 0", 0)
    until(lambda: ahead.found._there == {0})
    memory, there = ahead.found.take(ahead.blob(FIRST))
    assert there == ahead.parts(FIRST, [0])
    memory.bytes[:] = 7
    for version in (FIRST, SECOND):
        ahead.write(version, 1, b"fghij")
        ahead.tell(f"{version} 1", 1)
    until(lambda: not ahead.found._heard and not ahead.found._in_flight)
    assert np.all(memory.bytes == 7)


def test_another_version_is_not_mixed_with_the_first(ahead, until):
    for number in range(3):
        ahead.write(FIRST, number, b"-" * LENGTHS[number])
        ahead.tell(f"{FIRST} {number}", number)
    until(lambda: len(ahead.found._there) == 3)
    ahead.write(SECOND, 1, b"fghij")
    ahead.tell(f"{SECOND} 1", 1)
    until(lambda: ahead.found._there == {1})
    assert ahead.found.take(ahead.blob(FIRST)) is None
    memory, there = ahead.found.take(ahead.blob(SECOND))
    assert there == ahead.parts(SECOND, [1])
    assert bytes(memory.bytes[5:10]) == b"fghij"


def test_forged_messages_do_no_harm(ahead, until):
    ahead.write(FIRST, 0, b"too long")
    ahead.write(FIRST, 2, b"klm")
    for text in ("", "x", f"{FIRST} -1", f"{FIRST} 3", f"{FIRST} 999999", f"{FIRST} 1", f"{FIRST} 0", "* 0", "a-1:b 0"):
        ahead.tell(text, 0)
    # The thread still works. What is on its way together with a part of a wrong length is given up, and fetched later.
    until(lambda: ahead.tell(f"{FIRST} 2", 2) and ahead.found._there == {2})
    _, there = ahead.found.take(ahead.blob(FIRST))
    assert there == ahead.parts(FIRST, [2])
