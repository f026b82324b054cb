"""How the leases of several reducers are read as one, and which channels partitions have."""

from redisacc._format.entries import parse_leases
from redisacc._format.keys import Keys


def test_several_leases_count_as_the_slowest():
    one, other = [b"a:1", b"7", b"2"], [b"b:1", b"5", b"3"]
    info = parse_leases([one, other, one])
    assert info is not None
    assert (info.who, info.stored, info.late, info.missing) == ("a:1, b:1", 5, 3, 0)
    assert info.keeps_up
    info = parse_leases([one, [None] * 3])
    assert info is not None
    assert (info.who, info.missing, info.keeps_up) == ("a:1", 1, False)
    assert parse_leases([[None] * 3]) is None


def test_the_channel_of_a_partition_is_that_of_no_accumulator():
    channels = [Keys("m", (0, 1)).wake_of(position) for position in (0, 1)]
    others = Keys("m/0", (0, 1))
    assert not set(channels) & {others.wake, others.events, others.calls, *map(others.wake_of, (0, 1))}
