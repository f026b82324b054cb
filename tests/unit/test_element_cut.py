"""How dense sections are cut into parts by elements."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.rows import every_row

from redisacc._arrays.dtypes import TABLE
from redisacc._arrays.encodings import BLOCKS, encode
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._format.buffered import PART_SIZES, pack, part_size
from redisacc._format.keys import Keys
from redisacc._format.part_cut import LEAST_ALIGNED, Dense, ElementCut

FLOAT32, FLOAT64, INT8 = np.dtype("<f4"), np.dtype("<f8"), np.dtype("i1")
BFLOAT16 = np.dtype("bfloat16")


def cut(found, size, *, runts=False):
    return ElementCut([Dense(dtype, number) for dtype, number in found], size, runts=runts)


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=4), st.integers(LEAST_ALIGNED, 2**16), st.booleans())
def test_a_part_has_the_same_elements_however_they_are_encoded(elements, size, runts):
    parts = {cut([(dtype, n) for n in elements], size, runts=runts).parts for dtype in (FLOAT32, BFLOAT16, BLOCKS)}
    assert len(parts) == 1


@every_row("partitions", [2, 3, 4, 7])
@every_row("elements", [20_000, 10**6, 2**22])
def test_each_partition_gets_a_part_of_every_encoding(partitions, elements):
    keys = Keys("m", tuple(range(partitions)))
    spec = AccumulatorSpec.of_array("dense", TABLE["float32"], None, reduction_type="SUM")
    gradient = Gradient([Section(np.zeros(elements, np.float32))])
    number = {
        len(pack(keys, encode(gradient, encoding, spec), 0).parts) for encoding in ("float32", "bfloat16", "int8")
    }
    assert len(number) == 1
    assert number.pop() % partitions == 0


@every_row("size", PART_SIZES)
def test_a_part_fits_the_blocks_of_the_allocator(size):
    found = part_size(8 * size)
    assert size - 1024 < found <= size
    assert found % 1024 == 0
