"""Processes of an earlier version and of this one share accumulators and a training: see docs/guides/upgrade.md.

The earlier version is a commit of this repository, so these tests are left out where its history is not available.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import redisacc

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("versions_member.py")
# The last commit of version 0.1.0.
EARLIER = "49f987cf9756f9a515490215e4a05b426eae10c0"
PACKAGE = ("redisacc", "lua", "_redisacc_command.py")
STEPS = 30

pytestmark = [pytest.mark.thorough, pytest.mark.servers("valkey", "redis62"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The folder of each version's package: "old" and "new"."""
    archive = subprocess.run(["git", "archive", EARLIER, *PACKAGE], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("needs the history of the repository")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return {"old": folder, "new": Path(redisacc.__file__).parents[1]}


class Member:
    """A process of one of the versions."""

    def __init__(self, tree, url, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, *arguments],
            env={**os.environ, "PYTHONPATH": str(tree), "REDISACC_URL": url},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert Path(self.line()["file"]).parents[1] == tree

    def line(self):
        """Returns what it says next."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text, f"ended with {self._process.wait()}"
        return json.loads(text)

    def reach(self, step):
        """Waits until it has begun this step."""
        while self.line().get("step", 0) < step:
            pass

    def result(self):
        """Waits for its end; returns the parameters that it has ended with."""
        while "end" not in (said := self.line()):
            pass
        self.end()
        return said["end"]

    def kill(self):
        """Kills it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def end(self):
        """Waits until it has ended well."""
        assert self._process.wait(60) == 0
        self._process.communicate()

    @property
    def is_alive(self):
        """Whether it runs."""
        return self._process.poll() is None


Start = Callable[..., Member]


@pytest.fixture
def start(trees, real_server):
    """Starts processes. Those that are left at the end are killed."""
    members = []

    def starts(version, *arguments):
        members.append(Member(trees[version], real_server.url, *arguments))
        return members[-1]

    yield starts
    for member in members:
        if member.is_alive:
            member.kill()


@pytest.mark.parametrize("creator", ["old", "new"])
@pytest.mark.parametrize("taker", ["old", "new"])
def test_gradients_of_both_versions_are_in_one_mean(start, creator, taker):
    other = "new" if creator == "old" else "old"
    start(creator, "apply", "1", "0").end()
    start(other, "apply", "3", "0").end()
    start(taker, "take", "2", "2").end()
    start(other, "apply", "5", "1").end()
    start(taker, "take", "1", "5").end()
    start(taker, "delete").end()


def trained(start, name, versions, changes=()):
    """Trains with two workers of these versions; returns the parameters, which both agree on.

    Args:
        changes: which worker is killed next, and the version that takes its place.
    """
    workers = [start(version, "train", name, str(number), str(STEPS)) for number, version in enumerate(versions)]
    for reached, (number, version) in enumerate(changes, start=1):
        workers[number].reach(5 * reached)
        workers[number].kill()
        workers[number] = start(version, "train", name, str(number), str(STEPS))
    ends = [worker.result() for worker in workers]
    assert ends[0] == ends[1]
    return ends[0]


@pytest.mark.parametrize(
    ("versions", "changes"),
    [
        (("old", "old"), ((0, "new"), (1, "new"))),
        (("new", "new"), ((1, "old"), (0, "old"))),
        (("old", "new"), ((0, "old"), (1, "new"), (0, "new"))),
    ],
    ids=["upgrade", "downgrade", "mixed"],
)
def test_a_training_whose_versions_change_gives_the_same_bits(start, versions, changes):
    assert trained(start, "changed", versions, changes) == trained(start, "undisturbed", ("new", "new"))


@pytest.mark.parametrize(("writer", "reader"), [("old", "new"), ("new", "old")])
def test_a_checkpoint_of_one_version_is_published_by_the_other(start, tmp_path, writer, reader):
    trained(start, "saved", (writer, writer))
    file = str(tmp_path / "saved.safetensors")
    for version, operation, name in ((writer, "checkpoint", "saved"), (reader, "restore", "restored")):
        start(version, "command", operation, name, file).end()
    # The training continues from what was restored, and computes nothing, because it is finished.
    assert trained(start, "restored", (reader, reader)) == trained(start, "saved", (writer, writer))
