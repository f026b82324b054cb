"""Accumulators whose keys are overwritten with foreign bytes, and what must follow from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from support.planting import raw_text
from support.servers import contents

import redisacc
from redisacc import Sparse

RECORD = "redisacc:{w}"
SPEC = {"d": ("float32", (2, 2)), "i": ("int32", (3,)), "s": Sparse("float32", (9, 2))}
TREE = {"d": np.ones((2, 2), np.float32), "i": [1, 2, 3], "s": ([1, 4], [[1, 1], [2, 2]])}
DENSE, ROWS = (np.ones(600, np.float32),), ([0, 1, 2], np.ones((3, 2), np.float32))
WIDE_ROWS = ([3], np.ones((1, 600), np.float32))
# Kind of accumulator → which fixture opens it, with what, and a gradient.
KINDS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "dense": ("open_dense", ("float32", [600], "w"), {}, DENSE),
    "sparse": ("open_sparse", ("float32", [9, 2], "w"), {}, ROWS),
    "unbounded": ("open_sparse", ("float32", [None, 2], "w"), {}, ROWS),
    "integers": ("open_dense", ("int32", [1], "w"), {}, ([3],)),
    "tree": ("open_tree", (SPEC, "w"), {"mean": redisacc.Mean(missing="skip")}, (TREE,)),
    "bfloat16": ("open_dense", ("float32", [600], "w"), {"encoding": "bfloat16"}, DENSE),
    "int8": ("open_dense", ("float32", [600], "w"), {"encoding": "int8"}, DENSE),
    "int8 rows": ("open_sparse", ("float32", [99, 600], "w"), {"encoding": "int8"}, WIDE_ROWS),
}


def refused(call, client, match="redisacc", error=redisacc.CorruptDataError):
    """The call fails with a typed error whose message is short and printable, and changes nothing."""
    before = contents(client)
    with pytest.raises(error, match=match) as failure:
        call()
    assert contents(client) == before
    assert raw_text(str(failure.value)) == []
    assert len(str(failure.value)) < 2000


def gradients_in(found):
    """Returns all gradients in the contents of a database, in whatever round."""
    return sorted(str(value) for key, value in found.items() if b":sums" in key or b":part" in key)


class Round:
    """A round of two gradients. Forgeries change what is stored of it."""

    def __init__(self, client, acc):
        self.client = client
        self.acc = acc
        entries = client.hgetall(f"{RECORD}:buffered")
        self.ids = sorted(entries, key=lambda field: int(entries[field].split(b" ")[0]))

    def row(self, field: bytes | str, change: Callable[[bytes], bytes | None]) -> None:
        """Changes a field of the sums; None: removes it."""
        put(self.client, f"{RECORD}:sums", field, change(self.client.hget(f"{RECORD}:sums", field)))

    def another_row(self, field: bytes, like: bytes | str) -> None:
        self.client.hset(f"{RECORD}:sums", field, self.client.hget(f"{RECORD}:sums", like))

    def entry(self, change: Callable[[bytes], bytes | None], number: int = 0) -> None:
        """Changes the entry of a buffered gradient: its place and its header."""
        key, field = f"{RECORD}:buffered", self.ids[number]
        put(self.client, key, field, change(self.client.hget(key, field)))

    @property
    def header(self) -> dict[str, Any]:
        header: dict[str, Any] = msgpack.unpackb(self.client.hget(f"{RECORD}:buffered", self.ids[0]).partition(b" ")[2])
        return header

    def write_header(self, header: object, number: int = 0) -> None:
        self.entry(lambda entry: entry.partition(b" ")[0] + b" " + msgpack.packb(header), number)

    def data(self, change: Callable[[bytes], bytes | None], number: int = 0, part: int = -1) -> None:
        """Changes the bytes of an inline gradient, or those of a part."""
        field, key = self.ids[number], f"{RECORD}:inline"
        if self.client.hexists(key, field):
            put(self.client, key, field, change(self.client.hget(key, field)))
            return
        key = sorted(self.client.scan_iter(f"{RECORD}:part:{field.decode()}:*"))[part]
        changed = change(self.client.get(key))
        self.client.delete(key)
        if changed is not None:
            self.client.set(key, changed)

    def retype(self, pattern: str) -> None:
        """Replaces the last key of a pattern by a list."""
        key = sorted(self.client.scan_iter(pattern))[-1]
        self.client.delete(key)
        self.client.rpush(key, "x")


def put(client, key, field, value):
    client.hdel(key, field)
    if value is not None:
        client.hset(key, field, value)
