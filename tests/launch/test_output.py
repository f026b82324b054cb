"""Lines of many processes in one file, pipe or terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from redisacc._launch.output import Output

XTERM = {"TERM": "xterm"}


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for end in (reader, writer):
            with contextlib.suppress(OSError):
                os.close(end)


def on_a_terminal(line: bytes, **environment: str) -> str:
    main, other = pty.openpty()
    try:
        output = Output(other, environment)
        output.put("w |", "36", line)
        output.flush()
        return os.read(main, 10_000).decode().removesuffix("\r\n")
    finally:
        os.close(main)
        os.close(other)


def test_into_a_pipe_bytes_are_written_as_they_are():
    line = bytes(set(range(256)) - {10})
    with pipe() as (reader, writer):
        output = Output(writer, XTERM)
        output.put("w |", "36", line)
        output.put("w |", "36", b"")
        output.flush()
        assert os.read(reader, 1000) == b"w | " + line + b"\nw |\n"
        assert output.empty


def test_into_a_file(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        output = Output(file.fileno(), XTERM)
        for number in range(1000):
            output.put("w |", "36", b"%d" % number * 100)
        output.flush()
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert lines == [b"w | " + b"%d" % number * 100 for number in range(1000)]


PREFIX = "\x1b[36mw |\x1b[0m "


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 1: ä 漢 👩\u200d🔬\tx".encode(), "step 1: ä 漢 👩\u200d🔬\tx"),
        (b"\x1b[1;31mred", "\x1b[1;31mred\x1b[0m"),
        (b"\x1b[38;5;1mred\x1b[m", "\x1b[38;5;1mred\x1b[m\x1b[0m"),
        (b"\x1b[2J\x1b[1A\x1b]0;title\a\b\x7f", r"\x1b[2J\x1b[1A\x1b]0;title\x07\x08\x7f"),
        (b"\xff\xc3(", r"\xff\xc3("),
        ("\x9b2J\u202ex\u2028y".encode(), r"\x9b2J\u202ex\u2028y"),
    ],
)
def test_on_a_terminal_only_colours_control_it(line, shown):
    assert on_a_terminal(line, TERM="xterm") == PREFIX + shown


@pytest.mark.parametrize("environment", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_terminals_without_colours(environment):
    assert on_a_terminal(b"a \x1b[31mred\x1b[0m\x1b[K", **environment) == r"w | a red\x1b[K"


def test_an_empty_NO_COLOR_is_none():
    assert on_a_terminal(b"x", TERM="xterm", NO_COLOR="") == PREFIX + "x"


def test_nothing_blocks_and_nothing_is_lost_while_nobody_reads():
    line = b"x" * 100_000
    with pipe() as (reader, writer):
        output = Output(writer, XTERM)
        count = 0
        while not output.full:
            output.put("w |", "36", line)
            output.flush()
            count += 1
            assert count < 100
        received = bytearray()

        def read() -> None:
            while chunk := os.read(reader, 65536):
                received.extend(chunk)

        thread = threading.Thread(target=read)
        thread.start()
        while not output.empty:
            output.flush()
        os.close(writer)
        thread.join(20)
    assert bytes(received) == (b"w | " + line + b"\n") * count
    assert not output.full


@pytest.mark.parametrize(("stderr", "one"), [(subprocess.STDOUT, "True"), (subprocess.DEVNULL, "False")])
def test_one_file_is_one_output(stderr, one):
    code = "from redisacc._launch.output import outputs; out, err = outputs({}); print(out is err)"
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    assert found.stdout == f"{one}\n"


def test_nobody_reads_any_more():
    with pipe() as (reader, writer):
        output = Output(writer, XTERM)
        os.close(reader)
        output.put("w |", "36", b"x")
        with pytest.raises(BrokenPipeError):
            output.flush()
        output.discard()
        assert output.empty
        output.flush()
