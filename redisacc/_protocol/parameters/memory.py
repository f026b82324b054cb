"""Memory for the values that a reader hands out.

Arrays that were handed out never change, so no reader sees a mixture of two versions. Yet a reader in a training loop
needs no new memory for each version, which would cost more than receiving into it: memory is used again once no array
refers to it. CPython's reference counts tell when.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from redisacc._arrays.validation import Array

# How many pieces of memory are kept for later: in a loop, one holds the latest version, and one the version before.
KEPT = 3


class Memory:
    """A piece of memory, to which arrays that were handed out may refer.

    Args:
        nbytes: its size in bytes.

    Attributes:
        bytes: its bytes, to be written before anything is handed out.
    """

    __slots__ = ("_idle", "_shown", "bytes")

    def __init__(self, nbytes: int) -> None:
        self.bytes: Array = np.empty(nbytes, np.uint8)
        # Read-only, and so is every array that is made from it.
        self._shown: Array = self.bytes.view()
        self._shown.flags.writeable = False
        self._idle = self._references()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns a read-only array at this offset in bytes."""
        return np.ndarray(shape, dtype, self._shown, offset)

    def is_idle(self) -> bool:
        """Returns whether no array refers to it."""
        return self._references() == self._idle

    def _references(self) -> tuple[int, int]:
        # An array refers to the first array or to its view, depending on how it was made.
        return sys.getrefcount(self.bytes), sys.getrefcount(self._shown)


class MemoryPool:
    """Memory that was used before."""

    def __init__(self) -> None:
        self._kept: list[Memory] = []

    def get(self, nbytes: int, busy: Iterable[Memory | None]) -> Memory:
        """Returns memory of this size.

        Args:
            nbytes: its size in bytes.
            busy: memory that must not be returned, even if no array refers to it.
        """
        taken = set(map(id, busy))
        for memory in self._kept:
            if memory.bytes.nbytes == nbytes and id(memory) not in taken and memory.is_idle():
                return memory
        return Memory(nbytes)

    def lend(self, memory: Memory) -> Memory:
        """Returns memory that nobody else gets until it is kept again."""
        self._kept = [kept for kept in self._kept if kept is not memory]
        return memory

    def keep(self, memories: Iterable[Memory]) -> None:
        """Keeps memory for later, and drops the memory used longest ago, which its arrays keep alive."""
        fresh = list(memories)
        seen = set(map(id, fresh))
        self._kept = [*fresh, *(memory for memory in self._kept if id(memory) not in seen)]
        # Twice as many as are in use.
        del self._kept[max(KEPT, 2 * len(fresh)) :]
