"""What the lease of a reducer says about its sums, which anybody may have written."""

from __future__ import annotations

import pytest

from redisacc._format.keys import Keys
from redisacc._format.reducer_lease import parse_sums, sums_text

KEYS = Keys("w")
ONE, OTHER = "0123456789abcdef" * 2, "f" * 32


def test_what_is_written_is_read() -> None:
    text = sums_text({ONE: 2, OTHER: 1}).encode()
    assert parse_sums(KEYS, text) == [KEYS.sum(ONE, 0), KEYS.sum(ONE, 1), KEYS.sum(OTHER, 0)]
    assert parse_sums(KEYS, sums_text({}).encode()) == parse_sums(KEYS, None) == []


@pytest.mark.parametrize(
    "text", [b"x", b"*:1", ONE.encode(), ONE.encode() + b":0", ONE.encode() + b":-1", ONE.encode() + b":1\n", b"\xff:1"]
)
def test_anything_else_is_no_sum(text: bytes) -> None:
    assert parse_sums(KEYS, text) == []


def test_the_number_of_keys_is_bounded() -> None:
    forged = b" ".join([ONE.encode() + b":99999"] * 100)
    assert len(parse_sums(KEYS, forged)) == 8 * 1000
