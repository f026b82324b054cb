"""Contexts of spans as text."""

from hypothesis import given
from hypothesis import strategies as st
from support.rows import every_row

from redisacc._telemetry.traceparent import TRACEPARENT_BYTES, TraceParent, parse_traceparent

# The example of the W3C's recommendation.
EXAMPLE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_example_of_the_recommendation():
    found = parse_traceparent(EXAMPLE)
    assert found == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
    assert str(found).encode() == EXAMPLE


@given(st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255)))
def test_what_is_written_is_read(context):
    text = str(context).encode()
    assert len(text) == TRACEPARENT_BYTES
    assert parse_traceparent(text) == context


@every_row(
    "text",
    [
        b"",
        EXAMPLE[:-1],
        EXAMPLE + b"\n",
        EXAMPLE + b"-01",
        b" " + EXAMPLE,
        EXAMPLE.upper(),
        b"01" + EXAMPLE[2:],
        b"ff" + EXAMPLE[2:],
        EXAMPLE.replace(b"-", b"_"),
        EXAMPLE.replace(b"4bf92f3577b34da6a3ce929d0e0e4736", b"0" * 32),
        EXAMPLE.replace(b"00f067aa0ba902b7", b"0" * 16),
        EXAMPLE.replace(b"b7", "७".encode()),
    ],
)
def test_anything_else_is_no_context(text):
    assert parse_traceparent(text) is None


@given(st.binary(max_size=60) | st.from_regex(rb"00-[0-9a-fA-F]{31,33}-[0-9a-f]{15,17}-[0-9a-f]{1,3}", fullmatch=True))
def test_no_text_is_read_as_another_one(text):
    found = parse_traceparent(text)
    assert found is None or str(found).encode() == text
