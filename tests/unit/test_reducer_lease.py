"""What the lease of a reducer says about its sums, which anybody may have written."""

from support.rows import every_row

from redisacc._format.entries import parse_leases, parse_sums, sums_text
from redisacc._format.keys import Keys

KEYS = Keys("w")
ONE, OTHER = "0123456789abcdef" * 2, "f" * 32


def test_what_is_written_is_read():
    text = sums_text({ONE: 2, OTHER: 1}).encode()
    assert parse_sums(KEYS, [text]) == [KEYS.sum(ONE, 0), KEYS.sum(ONE, 1), KEYS.sum(OTHER, 0)]
    assert parse_sums(KEYS, [sums_text({}).encode()]) == parse_sums(KEYS, [None]) == []


def test_each_partition_has_the_parts_whose_turn_it_is():
    keys = Keys("w", (4, 7))
    one, other = sums_text({ONE: 2}).encode(), sums_text({ONE: 1}).encode()
    assert parse_sums(keys, [one, other]) == [keys.sum(ONE, 0), keys.sum(ONE, 2), keys.sum(ONE, 1)]
    assert keys.sum(ONE, 2) == f"redisacc:{{w/00004}}:partition:sum:{ONE}:2"


def test_several_leases_count_as_the_slowest():
    one, other = [b"a:1", b"1000", b"7", b"2"], [b"b:1", b"3000", b"5", b"3"]
    info = parse_leases([one, other, one])
    assert info is not None
    assert (info.who, info.since.timestamp(), info.stored, info.late, info.missing) == ("a:1, b:1", 3, 5, 3, 0)
    assert info.keeps_up
    info = parse_leases([one, [None] * 4])
    assert info is not None
    assert (info.who, info.missing, info.keeps_up) == ("a:1", 1, False)
    assert parse_leases([[None] * 4]) is None


@every_row(
    "text",
    [
        b"x",
        b"*:1",
        ONE.encode(),
        ONE.encode() + b":0",
        ONE.encode() + b":-1",
        ONE.encode() + b":1\n",
        b"\xff:1",
    ],
)
def test_anything_else_is_no_sum(text):
    assert parse_sums(KEYS, [text]) == []


def test_the_number_of_keys_is_bounded():
    forged = b" ".join([ONE.encode() + b":99999"] * 100)
    assert len(parse_sums(KEYS, [forged])) == 8 * 1000
    keys = Keys("w", tuple(range(100)))
    assert len(parse_sums(keys, [forged] * 100)) == 50_000


def test_the_channel_of_a_partition_is_that_of_no_accumulator():
    channels = [Keys("m", (0, 1)).wake_of(position) for position in (0, 1)]
    others = Keys("m/0", (0, 1))
    assert not set(channels) & {others.wake, others.events, others.calls, *map(others.wake_of, (0, 1))}
