"""Contexts of spans as text."""

from support.rows import every_row

from redisacc._telemetry.traceparent import TraceParent, parse_traceparent

# The example of the W3C's recommendation.
EXAMPLE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_example_of_the_recommendation():
    found = parse_traceparent(EXAMPLE)
    assert found == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
    assert str(found).encode() == EXAMPLE


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
