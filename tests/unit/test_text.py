"""Foreign text becomes printable and bounded in one place, and no error escapes it."""

import copy
import datetime
import pickle

from support.rows import every_row

import redisacc
from redisacc._text import MESSAGE, QUOTED, age_text, listed, printable, seconds_text, shown
from redisacc.tools.monitoring.facts import bytes_text


@every_row(
    "foreign, expected",
    [
        ("plain ünï 日本 😀", "plain ünï 日本 😀"),
        ("ünï 😀".encode(), "ünï 😀"),
        ("\x1b]0;pwn\a", "\\x1b]0;pwn\\x07"),
        (b"\x9b31m\xff", "\\x9b31m\\xff"),
        ("a\r\nb\x9b\u202e\u200b\u2028\ud800", "a\\r\\nb\\x9b\\u202e\\u200b\\u2028\\ud800"),
        ("", ""),
    ],
)
def test_printable(foreign, expected):
    assert printable(foreign) == expected
    assert printable(expected) == expected


@every_row("foreign", ["x" * 10**6, b"\xff" * 10**6, "日" * 10**6, "日".encode() * 10**6])
def test_printable_is_bounded(foreign):
    found = printable(foreign, 50)
    assert len(found) == 50
    assert found.endswith("...")
    assert printable(found, 50) == found


def test_names_are_not_cut():
    longest = "日" * 170 + "xy"
    assert len(longest.encode()) == 512
    assert printable(longest) == longest


class Escaping:
    def __repr__(self):
        return "<\x1b]0;pwn\a>" + "x" * 1000


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@every_row(
    "value",
    [
        Escaping(),
        "\x1b" * 1000,
        b"\x1b" * 10**6,
        deep(10**5),
        [b"\x1b"] * 10**6,
        10**5000,
        {"\x1b": "\ud800"},
    ],
)
def test_any_value_can_be_quoted(value):
    found = shown(value)
    assert found.isprintable()
    assert 0 < len(found) <= QUOTED


@every_row("kind", [redisacc.CorruptDataError, redisacc.ServerUnavailableError])
def test_no_error_carries_raw_text(kind):
    error = kind("a\x1b]0;pwn\a: " + "x" * 10**5)
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(one).startswith("a\\x1b]0;pwn\\x07: xxx")
        assert len(str(one)) == MESSAGE


def test_texts_of_numbers_and_times():
    assert [bytes_text(n) for n in (0, 999, 1023, 2048, 10**6, 5 * 2**30, 2**60)] == [
        "0 B", "999 B", "0.999 KiB", "2 KiB", "977 KiB", "5 GiB", "1048576 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (-1, 0.04, 9.94, 9.96, 89, 90, 5400, 86400, 2e5)] == [
        "0.0 s", "0.0 s", "9.9 s", "10 s", "89 s", "2 min", "2 h", "24 h", "2 d",
    ]  # fmt: skip
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert age_text(start + datetime.timedelta(seconds=90), start) == "2 min"


def test_the_first_of_many_are_listed():
    assert (listed([], 2), listed(["a", "b"], 2)) == ("", "a, b")
    assert listed(range(5), 2, lambda n: f"<{n}>", "; ") == "<0>; <1> and 3 more"
