"""Strings that a test fetches."""

from typing import NamedTuple


class Expected(NamedTuple):
    """A string to fetch, and its number among the others."""

    key: str
    lane: int
    number: int


class Strings:
    """The wanted strings, in turn on the lanes, and what arrived of them."""

    def __init__(self, keys, *sizes, lanes=1):
        self.lanes = lanes
        self.keys = list(keys)
        self.buffers = [bytearray(size) for size in sizes]
        # The lengths of those that began to arrive, and the numbers of those that have arrived, in order.
        self.lengths = []
        self.finished = []

    def wanted(self):
        every = [Expected(key, number % self.lanes, number) for number, key in enumerate(self.keys)]
        return [string for string in every if string.number not in self.finished]

    def more(self):
        return []

    def begin(self, string, length):
        self.lengths.append(length)
        if length != len(self.buffers[string.number]):
            raise LookupError(length)
        return memoryview(self.buffers[string.number])

    def missing(self, _):
        self.lengths.append(-1)
        raise LookupError(-1)

    def finish(self, string):
        self.finished.append(string.number)
