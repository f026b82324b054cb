"""Checkpoints at addresses, which fsspec reads and writes; torch brings it along."""

from __future__ import annotations

import json
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from test_restarts import environment

import redisacc

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def folder():
    """A folder in the memory of this process."""
    yield "memory://bucket/saved"
    fsspec.filesystem("memory").store.clear()


def train(client, until, folder, name="train", **options):
    given = redisacc.Checkpoints(folder, every=1, **options)
    optimizer = redisacc.optim.AdamW(0.1)
    with redisacc.Training(
        name, {"w": np.zeros(2)}, optimizer=optimizer, workers=1, redis=client, checkpoint=given
    ) as one:
        seen = []
        for step, weights in one.steps(until=until):
            one.apply({"w": weights["w"] - 3})
            seen.append(step)
        return seen, one.latest()[1]["w"].tolist()


def files(folder):
    return sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls(folder, detail=False))


def test_a_training_continues_with_the_newest_whole_checkpoint(real_client, folder, caplog):
    expected = train(real_client, 9, "memory://elsewhere")
    real_client.flushall()
    assert train(real_client, 5, folder, keep=2)[0] == [0, 1, 2, 3, 4]
    there = files(folder)
    assert (there[0], there[-1], len(there)) == ("manifest.json", "step-00000005.safetensors", 3)
    real_client.flushall()
    assert train(real_client, 9, folder) == ([5, 6, 7, 8], expected[1])
    real_client.flushall()
    fsspec.filesystem("memory").pipe(f"{folder}/step-00000009.safetensors", b"x" * 100)
    seen, found = train(real_client, 9, folder, keep=9)
    assert (seen[0] < 9, found) == (True, expected[1])
    assert "step-00000009.safetensors is skipped" in caplog.text


def test_the_commands_write_and_read_addresses(real_client, real_server, tmp_path):
    def command(*arguments):
        line = [sys.executable, "-m", "redisacc", *arguments, "--redis", real_server.url]
        return subprocess.run(line, check=False, capture_output=True, text=True, env=environment())

    file = f"file://{tmp_path}/new.safetensors"
    expected = train(real_client, 5, f"file://{tmp_path}/folder")[1]
    done = command("checkpoint", "train", file, "--json")
    assert (done.returncode, json.loads(done.stdout)["file"]) == (0, file)
    for address in (file, f"file://{tmp_path}/folder/step-00000005.safetensors"):
        real_client.flushall()
        assert command("restore", "train", address).returncode == 0
        assert train(real_client, 5, "memory://none")[1] == expected
    for name, code, text in (("file:///missing", 1, "No such file"), ("nothing://x", 2, "needs fsspec")):
        done = command("restore", "train", name, "--force")
        assert (done.returncode, text in " ".join(done.stderr.split()), "Traceback" in done.stderr) == (
            code,
            True,
            False,
        )


def test_what_is_refused(real_client, folder, monkeypatch):
    train(real_client, 1, folder)
    for name, where, text in (
        ("other", folder, "the folder memory:///bucket/saved cannot hold the checkpoints of the run 'other'"),
        ("new", "nothing://x", "the address 'nothing://x' needs fsspec and its package for this protocol.*nothing"),
    ):
        with pytest.raises(redisacc.InvalidArgumentError, match=text):
            train(real_client, 1, where, name)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(redisacc.InvalidArgumentError, match="'s3://bucket' needs fsspec"):
        train(real_client, 1, "s3://bucket", "new")
