"""What a process writes, cut into lines."""

from support.rows import every_row

from redisacc.tools.launch.lines import INTERVAL, LIMIT, Lines


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def cut(*chunks):
    lines = Lines(Clock())
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.end()


CASES = [
    (b"a\nbc\n", [b"a", b"bc"]),
    (b"a\n\n\nb", [b"a", b"", b"", b"b"]),
    (b"a\r\nb\r\n", [b"a", b"b"]),
    (b"\xff\xfe\0\x1b[2J\n", [b"\xff\xfe\0\x1b[2J"]),
    (b"no end", [b"no end"]),
    (b"", []),
    # The first state of a line, and then its last one.
    (b"\r 1%\r 2%\r 3%\ndone\n", [b" 1%", b" 3%", b"done"]),
    (b"1%\r2%\r3%\r\n", [b"1%", b"3%"]),
    (b"1%\r2%\r3%\r\r\n", [b"1%", b"3%"]),
    (b"1%\r2%\r3%", [b"1%", b"3%"]),
    (b"1%\r2%\r3%\r", [b"1%", b"3%"]),
    (b"1%\r2%\r\r", [b"1%", b"2%"]),
]


@every_row("data, expected", CASES)
def test_lines(data, expected):
    assert cut(data) == expected


@every_row("data, expected", CASES)
def test_how_the_bytes_arrive_plays_no_role(data, expected):
    assert cut(*(data[i : i + 1] for i in range(len(data)))) == expected


def test_a_line_that_is_rewritten_is_shown_now_and_then():
    clock = Clock()
    lines = Lines(clock)
    shown = []
    for percent in range(100):
        clock.now = percent * INTERVAL / 10
        shown += lines.feed(b"\r%d%%" % percent)
    shown += lines.feed(b"\n")
    # A state is complete when the next one begins.
    assert shown == [b"%d%%" % percent for percent in range(0, 100, 10)] + [b"99%"]


@every_row("size", [1, 1000, 3 * LIMIT])
def test_a_long_line_becomes_several(size):
    data = b"x" * (3 * LIMIT + 5)
    found = cut(*(data[i : i + size] for i in range(0, len(data), size)))
    assert b"".join(found) == data
    assert {len(line) for line in found} == {LIMIT, 5}


def test_a_long_line_is_not_kept():
    lines = Lines()
    for _ in range(100):
        lines.feed(b"x" * LIMIT)
        assert len(lines._pending) <= LIMIT


def test_a_long_line_that_ends_is_cut_as_well():
    found = cut(b"x" * 10, b"y" * LIMIT + b"\n")
    assert [len(line) for line in found] == [LIMIT, 10]
    assert [len(line) for line in cut(b"y" * (LIMIT + 1) + b"\r")] == [LIMIT, 1]


def test_characters_are_not_cut():
    text = ("x" + "€" * LIMIT).encode()
    found = cut(text)
    assert b"".join(found) == text
    assert len(found) == 4
    for line in found:
        line.decode()
    # Bytes that only look like the middle of a character are cut anywhere.
    assert [len(line) for line in cut(b"\x80" * (LIMIT + 1))] == [LIMIT, 1]


def test_after_the_end_nothing_is_left():
    lines = Lines(Clock())
    lines.feed(b"1\r2\rabc")
    assert lines.end() == [b"abc"]
    assert lines.end() == []
    assert lines.feed(b"new\n") == [b"new"]
