"""Attempts to store something in partitions, and how blobs are cut into parts there."""

import itertools

import pytest

from redisacc._format.attempts import MOST_PARTS, StoredAttempt, part_keys
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob, blob_lengths
from redisacc.errors import CorruptDataError


def test_every_partition_gets_equally_many_parts():
    sizes = (0, 1, 64 * 1024, 64 * 1024 + 1, 10**6, 3 * 2**21, 10**8 + 7)
    for partitions, nbytes in itertools.product((2, 3, 7, 1000), sizes):
        lengths = blob_lengths(nbytes, partitions)
        assert sum(lengths) == nbytes
        assert max(lengths, default=0) <= 2 * 2**20
        if nbytes <= 64 * 1024:
            assert len(lengths) == (nbytes > 0)
        else:
            of_each = [sum(lengths[place::partitions]) for place in range(partitions)]
            assert max(of_each) - min(of_each) <= max(lengths) * (1 if nbytes % partitions else 0)


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
