"""How the bytes of a buffered gradient are cut into parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.rows import every_row

from redisacc._arrays.gradient import Gradient, Section
from redisacc._format.buffered import PART_SIZES, pack
from redisacc._format.keys import Keys
from redisacc._format.parameter_record import MAX_BLOB_BYTES, MAX_PARTS, blob_lengths


@given(st.integers(1, 200 * 2**20) | st.integers(1, MAX_BLOB_BYTES) | st.just(MAX_BLOB_BYTES))
def test_a_blob_has_not_too_many_parts_and_none_of_a_few_bytes(nbytes):
    lengths = blob_lengths(nbytes)
    assert sum(lengths) == nbytes
    assert len(lengths) <= MAX_PARTS
    assert max(lengths) <= 512 * 2**20
    assert len(lengths) == 1 or lengths[-1] > lengths[0] / 8


def test_a_million_floats_are_four_parts():
    lengths = pack(Keys("x"), Gradient([Section(np.zeros(2**20, np.float32))])).lengths
    # The size is a whole number of blocks that fits the allocator, and the last part has the rest.
    size = 2**20 - 1024
    assert [*lengths] == [size] * 3 + [size + 4096]
    assert size <= PART_SIZES[2] < size + 1024


@every_row("partitions", [2, 3, 8, 64, 999])
@every_row("rows", [1001, 1200, 9_000, 60_000, 300_000])
def test_rows_have_as_many_parts_in_each_partition(partitions, rows):
    """Otherwise, the dense parts would lie in other partitions than those of gradients with fewer rows."""
    values = np.zeros((rows, 8), np.float32)
    gradient = Gradient([Section(values, np.arange(rows)), Section(np.zeros(50_000, np.float32))])
    packed = pack(Keys("x", tuple(range(partitions))), gradient, 0)
    rows_only = pack(Keys("x", tuple(range(partitions))), Gradient([gradient.sections[0]]), 0)
    assert len(rows_only.parts) % partitions == 0
    assert max(rows_only.lengths) - min(rows_only.lengths) <= 1
    assert [*packed.lengths[: len(rows_only.lengths)]] == [*rows_only.lengths]
    assert sum(packed.lengths) == rows * 40 + 200_000
