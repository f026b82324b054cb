"""Lays out leaves of parameters in a row, as a blob holds them, and copies as little as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.leaves import Layout, Schema
from redisacc._redis.sockets import GATHER_BYTES


def packed(schema: Schema, arrays: Sequence[Array] | Mapping[int, Array], layout: Layout) -> list[memoryview]:
    """Returns the bytes of a blob of whole leaves, in pieces.

    Large leaves are not copied, so they must not be written to until the pieces have been sent.

    Args:
        schema: the schema of the leaves.
        arrays: the leaves, by their numbers.
        layout: which of them the blob has, and where.
    """
    pieces: list[memoryview] = []
    # The small leaves since the last large one, and where that ended.
    waiting: list[tuple[int, Array]] = []
    end = 0
    # A flat blob has the leaves of each dtype together, so they need not lie in the order of their numbers.
    for leaf, offset in sorted(zip(layout.leaves, layout.offsets, strict=True), key=itemgetter(1)):
        data = schema.leaves[leaf].bytes_of(arrays[leaf])
        if data.nbytes < GATHER_BYTES:
            waiting.append((offset, data))
            continue
        if end < offset:
            pieces.append(_together(end, offset, waiting))
            waiting = []
        pieces.append(data.data)
        end = offset + data.nbytes
    if end < layout.nbytes:
        pieces.append(_together(end, layout.nbytes, waiting))
    return pieces


def _together(start: int, stop: int, leaves: Sequence[tuple[int, Array]]) -> memoryview:
    """Returns the bytes of a blob between two places, given the leaves there and where they begin."""
    data = np.zeros(stop - start, np.uint8)
    for offset, leaf in leaves:
        data[offset - start : offset - start + leaf.nbytes] = leaf
    return data.data


def packed_rows(schema: Schema, arrays: Sequence[Array], rows: Mapping[int, Array]) -> list[memoryview]:
    """Returns the bytes of a blob of changed rows, in pieces.

    Args:
        schema: the schema of the leaves.
        arrays: all leaves.
        rows: leaf → the indices of its rows, ascending, in the order of the leaves.
    """
    pieces = []
    for leaf, chosen in rows.items():
        pieces.append(chosen.astype("<i8", copy=False).view(np.uint8).data)
        pieces.append(schema.leaves[leaf].bytes_of(arrays[leaf].take(chosen, axis=0)).data)
    return pieces
