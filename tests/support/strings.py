"""Strings that a test fetches."""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """A string to fetch, and its number among the others."""

    key: str
    lane: int
    number: int


class Strings:
    """The wanted strings, in turn on the lanes, and what arrived of them."""

    def __init__(self, keys: str | list[str], *sizes: int, lanes: int = 1) -> None:
        self.lanes = lanes
        self.keys = list(keys)
        self.buffers = [bytearray(size) for size in sizes]
        # The lengths of those that began to arrive, and the numbers of those that have arrived, in order.
        self.lengths: list[int] = []
        self.finished: list[int] = []

    def wanted(self) -> list[Expected]:
        every = [Expected(key, number % self.lanes, number) for number, key in enumerate(self.keys)]
        return [string for string in every if string.number not in self.finished]

    def more(self) -> list[Expected]:
        return []

    def expected(self, string: Expected) -> memoryview:
        return memoryview(self.buffers[string.number])

    def begin(self, string: Expected, length: int) -> memoryview:
        self.lengths.append(length)
        if length != len(self.buffers[string.number]):
            raise LookupError(length)
        return self.expected(string)

    def missing(self, _: Expected) -> None:
        self.lengths.append(-1)
        raise LookupError(-1)

    def finish(self, string: Expected) -> None:
        self.finished.append(string.number)
