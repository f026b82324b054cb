"""The recording of a terminal in the documentation, and the program that makes it."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.is_dir():
    pytest.skip("the documentation is not part of an installed package", allow_module_level=True)

PROGRAM = r"""
import time
print("\033[1;31mred\033[0m <b> & " + "x" * 80)
time.sleep(0.2)
for number in range(30):
    print("line", number)
"""


def texts(svg):
    return ["".join(found.itertext()) for found in ElementTree.fromstring(svg).iter() if found.tag.endswith("}text")]


def record(out, *program):
    command = [sys.executable, str(DOCS / "record.py"), str(out), "--", *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_recording_plays_the_lines_of_a_terminal(tmp_path):
    out = tmp_path / "out.svg"
    said = record(out, sys.executable, "-c", PROGRAM)
    assert said.returncode == 0, said.stderr
    svg = out.read_text()
    # The first is the command. A line that is too long goes on in the next.
    assert texts(svg)[1:4] == ["red <b> & " + "x" * 70, "x" * 10, "line 0"]
    assert texts(svg)[-1] == "line 29"
    assert re.search(r'<tspan style="fill:#\w{6};font-weight:bold">red</tspan>', svg)
    moves = [float(share) for share in re.findall(r"([\d.]+)%\{", svg.partition("@keyframes uncover")[0])]
    assert moves == sorted(moves)
    assert len(moves) == 1 + 32 - 24


def test_a_program_that_fails_is_not_recorded(tmp_path):
    out = tmp_path / "out.svg"
    assert record(out, sys.executable, "-c", "print(1); raise SystemExit(3)").returncode
    assert not out.exists()


def test_the_recording_of_the_demo_is_of_a_run_that_succeeded():
    svg = (DOCS / "images" / "demo.svg").read_text()
    found = texts(svg)
    assert found[0] == "$ redisacc demo"
    assert found[-1] == "The results agree, and the loss fell."
    assert any("was killed by SIGKILL" in line for line in found)
    # It loads nothing, and runs nothing.
    assert not re.search(r"(?:href|src|url)\W*https?:|<script|@import|@font-face", svg)
