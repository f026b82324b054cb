"""Replies are read as hiredis reads them, except for those that claim more than their commands can be answered with."""

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import every_row

from redisacc._wire import replies as reply_reader
from redisacc._wire.faults import BrokenError, ReplyError
from redisacc._wire.replies import MAX_ELEMENTS, ReplyReader

# Strings that hold what looks like a head, also after the end of a line.
HEADS = st.lists(st.sampled_from([b"\r\n", b"\n", b"*99999999", b">12345678901234567890123", b"~1", b"|", b"$5", b"x"]))
STRINGS = st.one_of(st.binary(max_size=8), HEADS.map(b"".join))
VALUES = st.recursive(
    st.one_of(STRINGS, st.integers(-(2**62), 2**62), st.none()), lambda values: st.lists(values, max_size=4)
)


def packed(value):
    """Returns a reply in RESP, by an independent writer."""
    match value:
        case None:
            return b"$-1\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case int():
            return b":%d\r\n" % value
        case list():
            return b"*%d\r\n%b" % (len(value), b"".join(map(packed, value)))
    raise AssertionError(value)


@settings(max_examples=50)
@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(st.integers(1, 30), max_size=40))
def test_replies_are_the_same_however_they_are_cut(values, cuts):
    data, found, reader = b"".join(map(packed, values)), [], ReplyReader()
    reader.commands = [("EVALSHA",)] * len(values)
    for cut in cuts:
        found += reader.read(data[:cut])
        data = data[cut:]
    found += reader.read(data)
    assert found == values


@every_row("piece", [1, 3, 10**6])
@every_row("kind", [b"*", b">", b"~", b"|"])
@every_row("before", [b"", b"*2\r\n$13\r\n\n*99999999\r\nx\r\n", b"+OK\r\n"])
@every_row("number", [b"1000100", b"999999999999999999999999"])
def test_arrays_that_claim_too_much_are_refused(piece, kind, before, number):
    data, reader = before + kind + number + b"\r\n", ReplyReader()
    reader.commands = [("HGET", "k", "f"), ("EVALSHA",)]

    def read():
        for start in range(0, len(data), piece):
            reader.read(data[start : start + piece])

    with pytest.raises(BrokenError, match=r"array of 1000100 elements in reply to HGET, EVALSHA|array of 99999"):
        read()


def test_arrays_in_arrays_count_together():
    reader = ReplyReader()
    with pytest.raises(BrokenError, match="array of 9999"):
        reader.read(b"*9999\r\n" * (MAX_ELEMENTS // 9999 + 1))


def test_a_command_of_many_arguments_may_be_answered_by_as_many():
    reader, number = ReplyReader(), MAX_ELEMENTS + 5
    reader.commands = [("HMGET", "k", *["f"] * number)]
    assert reader.read(b"*%d\r\n" % number + b"_\r\n" * number) == [[None] * number]


@every_row("command, most", [("EVALSHA", 2000), ("HMGET", 2020), ("HSCAN", 5000), ("GET", 5000)])
def test_a_reply_may_have_as_many_bytes_as_its_command_allows(command, most, monkeypatch):
    for name, value in {"BYTES": 2000, "FIELD_BYTES": 10, "SCAN_BYTES": 5000, "STRING_BYTES": 5000}.items():
        monkeypatch.setattr(reply_reader, f"MAX_{name}", value)
    reader = ReplyReader()
    for size in (most, most + 1):
        reader.commands, reader.received = [(command, "k")], 0
        reply = b"$%d\r\n%b\r\n"
        body = bytes(size - len(reply % (size, b"")))
        reply %= (len(body), body)
        assert len(reply) == size
        if size == most:
            assert reader.read(reply) == [body]
            continue
        with pytest.raises(BrokenError, match=f"{size} bytes in reply to {command}"):
            reader.read(reply)


def test_errors_and_pushes_are_told_apart():
    error, pushed = ReplyReader().read(b"-NOSCRIPT no\r\n>1\r\n+x\r\n")
    assert isinstance(error, ReplyError)
    assert error.code == "NOSCRIPT"
    assert type(pushed) is hiredis.PushNotification
    with pytest.raises(BrokenError):
        ReplyReader().read(b"HTTP/1.1\r\n")
