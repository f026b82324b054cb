"""How the bytes of a buffered gradient are cut into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redisacc._data.gradient import Gradient, Section
from redisacc._format.buffered import PART_SIZES, cut, pack
from redisacc._format.parameter_record import blob_lengths
from redisacc._format.part_cut import part_lengths


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(8, 50), st.booleans())
def test_nothing_is_lost_and_every_part_but_the_last_has_the_given_size(pieces, size, runts):
    whole = b"".join(pieces)
    lengths = part_lengths(len(whole), size, runts=runts)
    parts = cut([memoryview(piece) for piece in pieces], lengths)
    assert b"".join(b"".join(part) if isinstance(part, tuple) else bytes(part) for part in parts) == whole
    assert [part.nbytes for part in parts] == lengths
    assert all(length == size for length in lengths[:-1])
    # A last part is a runt only if there is no part before it to which it could belong.
    assert len(lengths) < 2 or (0 if runts else size / 8) < lengths[-1] <= size * (1 if runts else 9 / 8)


@given(st.integers(1, 200 * 2**20))
def test_a_blob_has_no_part_of_a_few_bytes(nbytes):
    lengths = blob_lengths(nbytes)
    assert sum(lengths) == nbytes
    assert len(lengths) == 1 or lengths[-1] > lengths[0] / 8


@pytest.mark.parametrize("elements", [2**20, 2**21, 2**22, 2**20 + 1, 10 * 2**20])
def test_a_dense_gradient_has_no_part_of_a_few_bytes(elements):
    lengths = pack(Gradient([Section(np.zeros(elements, np.float32))])).lengths
    assert sum(lengths) == 4 * elements
    assert len({*lengths[:-1]}) == 1
    assert lengths[-1] > lengths[0] / 8


def test_a_million_floats_are_eight_parts():
    lengths = pack(Gradient([Section(np.zeros(2**20, np.float32))])).lengths
    # The size is a whole number of blocks that fits the allocator, and the last part has the rest.
    size = 2**19 - 1024
    assert [*lengths] == [size] * 7 + [size + 8192]
    assert size <= PART_SIZES[1] < size + 1024
