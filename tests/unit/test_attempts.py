"""Attempts to store something in partitions, and how blobs are cut into parts there."""

import pytest

from redisacc._format.attempts import MOST_PARTS, StoredAttempt, part_keys
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc.errors import CorruptDataError


def test_the_parts_of_an_attempt_are_listed_in_slices():
    """Somebody may have listed an attempt that claims very many of them."""
    keys = ParameterKeys("w", (0, 1, 2))
    attempts = [StoredAttempt("x-1", MOST_PARTS), StoredAttempt("x-2", 7)]
    slices = list(part_keys(keys, attempts))
    assert [len(some) for some in slices] == [10_000] * 10 + [7]
    expected = [keys.part("x-1", number) for number in range(MOST_PARTS)]
    expected += [keys.part("x-2", number) for number in range(7)]
    assert [key for some in slices for key in some] == expected
    with pytest.raises(CorruptDataError, match=f"x-1 {MOST_PARTS + 1}"):
        StoredAttempt.parse("key", f"x-1 {MOST_PARTS + 1}".encode())


def test_an_attempt_of_a_version_is_listed_like_that_of_a_gradient():
    blob = Blob("0123456789abcdef-999999999999999-state", 2**33)
    member = str(blob.attempt(ParameterKeys("w", tuple(range(1000)))))
    assert len(member) <= 72
    assert str(StoredAttempt.parse("key", member.encode())) == member
