"""The encodings in memory: what rounding costs, and what blocks refuse."""

import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.rows import every_row

import redisacc
from redisacc._arrays import dtypes
from redisacc._arrays.encodings import (
    BLOCK,
    BLOCKS,
    BlockSection,
    check_encodable,
    checked_encoding,
    decode,
    decode_by_piece,
    encode,
    stored_bytes,
    stored_dtype,
    stored_name,
)
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec, described_by

LARGEST = np.finfo(np.float32).max


def spec_of(*dtypes):
    """An accumulator with an array of each dtype."""
    described = described_by({str(number): (dtype, ()) for number, dtype in enumerate(dtypes)})
    return AccumulatorSpec.of_tree(*described, reduction_type="SUM")


def encoded(values, encoding):
    (section,) = encode(Gradient((Section(np.asarray(values, np.float32)),)), encoding, spec_of("float32")).sections
    return section


def reference(values):
    """What int8 blocks should hold, one block at a time, and with no regard for speed."""
    found = []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = np.float32(np.abs(block).max() / np.float32(127))
        if scale < np.finfo(np.float32).tiny:
            found += [np.float32(0)] * len(block)
            continue
        while np.isinf(np.float32(127) * scale):
            scale = np.nextafter(scale, np.float32(0))
        found += [np.float32(np.rint(x * (np.float32(1) / scale))) * scale for x in block]
    return np.array(found, np.float32)


FINITE = st.floats(-float(LARGEST), float(LARGEST), width=32)
VECTORS = hnp.arrays(np.float32, st.integers(BLOCK, 3 * BLOCK + 5), elements=FINITE, fill=FINITE)


# docs/guides/gradient-compression.md: the error of an element, as a fraction of the largest magnitude in its block.
BOUND = (1 + Fraction(1, 2**14)) / 254


def assert_bound(values, found):
    """Compares without rounding. A block whose scale would be subnormal is zero."""
    for start in range(0, len(values), BLOCK):
        block = [Fraction(float(value)) for value in values[start : start + BLOCK]]
        largest = max(map(abs, block))
        if float(np.float32(float(largest)) / np.float32(127)) < np.finfo(np.float32).tiny:
            assert not found[start : start + BLOCK].any()
            continue
        error = max(abs(Fraction(float(b)) - a) for a, b in zip(block, found[start : start + BLOCK], strict=True))
        assert error <= BOUND * largest


@settings(max_examples=60)
@given(VECTORS)
def test_blocks_are_the_references(values):
    with np.errstate(all="ignore"):
        expected = reference(values)
    found = encoded(values, "int8").values
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()
    assert_bound(values, found)


def halves(largest, away):
    """A block whose elements are halfway between two steps, but for `away` numbers of float32: the worst there is."""
    steps = np.append(np.arange(-127, 127) + 0.5, [127, 127]) * (float(largest) / 127)
    values = (steps.astype(np.float32).view(np.int32) + np.int32(away)).view(np.float32)
    values[-2:] = largest
    return np.clip(values, -largest, largest)


@settings(max_examples=60)
@given(
    st.floats(float(np.float32(1.6e-36)), float(LARGEST), width=32),
    st.integers(-4, 4),
)
def test_the_error_of_blocks_has_the_bound_that_the_page_says(largest, away):
    values = halves(np.float32(largest), away)
    assert_bound(values, encoded(values, "int8").values)


@settings(max_examples=60)
@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_bfloat16_rounds_to_nearest_even_and_keeps_what_is_not_finite(values):
    found = encoded(values, "bfloat16").values.astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)) << np.uint64(16)
    expected = rounded.astype(np.uint32).view(np.float32)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    assert np.isnan(found[~numbers]).all()


@every_row("value", [np.nan, np.inf, -np.inf])
@every_row("size", [1, BLOCK, 70_000])
def test_int8_refuses_what_is_not_finite(value, size):
    values = np.ones(size, np.float32)
    values[-1] = value
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^grad at '0' must be finite.*{value}"):
        encoded(values, "int8")
    with pytest.raises(redisacc.InvalidArgumentError, match="grad at '0' must be finite"):
        check_encodable(Gradient((Section(values),)), "int8", spec_of("float32"))


def test_extremes():
    values = np.zeros(3 * BLOCK, np.float32)
    values[0], values[1] = LARGEST, -LARGEST
    values[BLOCK] = np.finfo(np.float32).smallest_subnormal
    # A 127th of these is a subnormal number.
    values[2 * BLOCK :] = np.linspace(1e-40, 1e-36, BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = encoded(values, "int8").values
    # The largest number has no multiple of 127 above it, so it loses a little.
    assert 0.999999 * LARGEST < found[0] <= LARGEST
    assert found[1] == -found[0]
    assert not found[2:].any()


def test_small_sections_and_other_dtypes_stay_as_they_are():
    small, wide = Section(np.ones(BLOCK - 1, np.float32)), Section(np.ones(BLOCK, np.float64))
    spec = spec_of("float32", "float64")
    gradient = encode(Gradient((small, wide)), "int8", spec)
    assert gradient.sections == (small, wide)
    rounded, same = encode(Gradient((small, wide)), "bfloat16", spec).sections
    assert rounded.dtype == ml_dtypes.bfloat16
    assert same is wide


def test_rows_keep_their_indices_and_shape():
    rows = np.arange(4 * 96, dtype=np.float32).reshape(4, 2, 48)
    section = Section(rows, np.arange(4))
    (found,) = encode(Gradient((section,), 1), "int8", spec_of("float32")).sections
    assert isinstance(found, BlockSection)
    assert found.shape == found.values.shape == (4, 2, 48)
    assert (found.indices is section.indices, found.size, found.nbytes) == (True, 384, 32 + 2 * 260)


def test_several_arrays_and_any_layout_are_one_section():
    one, two = np.arange(300, dtype=np.float32), np.arange(50, dtype=np.float32)[::-1]
    together = encoded(np.concatenate([one, two]), "int8").values
    for encoding, expected in (("int8", together), ("bfloat16", np.concatenate([one, two]).astype(ml_dtypes.bfloat16))):
        (found,) = encode(Gradient((Section([one, two]),)), encoding, spec_of("float32")).sections
        np.testing.assert_array_equal(found.values, expected)
    grid = np.arange(600, dtype=np.float32).reshape(20, 30).T
    np.testing.assert_array_equal(encoded(grid, "int8").values, encoded(grid.copy(), "int8").values)


def test_the_memory_is_its_own():
    values = np.ones(BLOCK, np.float32)
    found = [encoded(values, encoding) for encoding in ("bfloat16", "int8")]
    values[:] = 7
    assert all((section.values == 1).all() for section in found)


@every_row("scale", [-1.0, -1e-40, np.nan, np.inf, 2.7e36])
def test_scales_that_are_not_ours(scale):
    blocks = encoded(np.ones(70_000, np.float32), "int8").arrays[0]
    blocks["scale"][-2] = scale
    for read in (decode, lambda *given: list(decode_by_piece(*given))):
        with pytest.raises(redisacc.CorruptDataError, match=r"^part 3: a block of int8 has the scale .*from 0 to 2\.6"):
            read(blocks, 70_000, "part 3")


def test_pieces_are_the_whole():
    values = np.linspace(-1, 1, 200_001).astype(np.float32)
    blocks = encoded(values, "int8").arrays[0]
    whole = decode(blocks, len(values), "")
    pieces = [(first, elements.copy()) for first, elements in decode_by_piece(blocks, len(values), "")]
    assert [first for first, _ in pieces] == [0, 65536, 131072, 196608]
    np.testing.assert_array_equal(np.concatenate([elements for _, elements in pieces]), whole)


def test_names_in_headers():
    of = dtypes.TABLE["float32"]
    for name, stored, size in (("float32", "<f4", 4), ("bfloat16", ml_dtypes.bfloat16, 2), ("int8", BLOCKS, 260)):
        assert stored_dtype(of, name) == np.dtype(stored)
        assert stored_name(stored_dtype(of, name)) == name
        assert stored_bytes(stored_dtype(of, name), 1) == size
    assert stored_bytes(BLOCKS, 0) == 0
    assert stored_bytes(BLOCKS, BLOCK + 1) == 520
    # An int8 is no block in an accumulator of int8.
    assert stored_dtype(dtypes.TABLE["int8"], "int8") == np.int8
    for dtype, name in (("float32", "int4"), ("float64", "bfloat16"), ("float16", "int8"), ("float32", ["int8"])):
        with pytest.raises(ValueError, match=r"it stores elements as .*, and this version of redisacc reads"):
            stored_dtype(dtypes.TABLE[dtype], name)


@every_row("dtype", [name for name in dtypes.TABLE if name != "float32"])
def test_only_float32_is_encoded(dtype):
    own = [dtypes.TABLE[dtype]]
    assert checked_encoding(None, own) == checked_encoding(dtype, own) == "float32"
    for encoding in {"float32", "bfloat16", "int8"} - {dtype}:
        with pytest.raises(
            redisacc.InvalidArgumentError, match=f"encoding must be None.*this accumulator are {dtype}$"
        ):
            checked_encoding(encoding, own)
    assert checked_encoding("int8", [*own, dtypes.TABLE["float32"]]) == "int8"
