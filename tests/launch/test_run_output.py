"""What the processes of a run write."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

pytestmark = pytest.mark.servers("valkey")


def test_lines_are_whole_and_in_order(start):
    script = """
import os, sys
name = os.environ.get("REDISACC_WORKER_NUMBER", "c")
for line in range(300):
    for stream in (sys.stdout, sys.stderr):
        # In pieces, to give the others a chance to write in between.
        stream.write(f"{line}:")
        stream.write(name * 5000)
        stream.write(chr(10))
sys.stdout.write("the end")
"""
    run = start("--chief", "--workers", 2, script=script)
    assert run.code() == 0
    for text, last in ((run.out, ["the end"]), (run.err, [])):
        assert text.endswith("\n")
        found = defaultdict(list)
        for line in text.splitlines():
            name, content = re.fullmatch(r"(.{8}) \| (.*)", line).groups()
            found[name.rstrip()].append(content)
        assert {name: len(content) for name, content in found.items()} == {
            name: 300 + len(last) for name in ("chief", "worker 0", "worker 1")
        }
        for name, content in found.items():
            assert content == [f"{line}:" + name.removeprefix("worker ")[0] * 5000 for line in range(300)] + last


def test_names_of_different_length_are_aligned(start):
    run = start("--chief", "--workers", 11, script="print('here')")
    assert run.code() == 0
    assert {line.index("|") for line in run.out.splitlines()} == {len("worker 10 ")}


def test_last_words_of_a_killed_process_come_before_the_news_of_its_death(start):
    script = "import os, sys; sys.stderr.write('x' * 60000 + '|last words'); os.kill(os.getpid(), 9)"
    run = start("--chief", "--workers", 0, "--restarts", 0, script=script)
    assert run.code() == 137
    first, second = run.err.splitlines()
    assert first.endswith("|last words")
    assert second.startswith("redisacc | chief was killed by SIGKILL; the run ends with exit code 137.")
