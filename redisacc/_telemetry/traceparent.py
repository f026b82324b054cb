"""The context of a span as text, with which a span of another process links it.

The text is a ``traceparent`` of the W3C's recommendation "Trace Context", level 1: version, id of the trace, id of the
span, and flags, in lower-case hexadecimal digits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """The context of a span.

    Attributes:
        trace_id: the trace, from 1 to 2**128 - 1.
        span_id: the span, from 1 to 2**64 - 1.
        flags: from 0 to 255. Bit 0 says that the span was sampled.
    """

    trace_id: int
    span_id: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def parse_traceparent(text: bytes) -> TraceParent | None:
    """Returns the context that a text means, or None if it is anything but a valid traceparent of version 00."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    found = TraceParent(*[int(digits, 16) for digits in match.groups()])
    # Zero is the id of nothing.
    return found if found.trace_id and found.span_id else None
