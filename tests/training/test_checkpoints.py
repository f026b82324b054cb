"""Checkpoints of a training: what they hold, what survives a crash, and where a chief continues."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import redisacc
from redisacc._checkpoints.file import Checkpoint, read_file, write_file
from redisacc._checkpoints.folder import Folder
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._redis.connect import connect
from redisacc._training.checkpointer import read_published

TREE = {
    "a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([1.5, np.nan], ml_dtypes.bfloat16),
    "layers": [np.float64(2.5), (np.array([True, False]), None)],
    "complex": np.array([1 + 2j, -3]),
    "quantised": np.zeros(2, [("qint8", np.int8)]),
    "empty": np.zeros((0, 3), np.int64),
    "turned": np.arange(6.0).reshape(2, 3).T,
}


def flat(tree):
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in sorted(tree.items())}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(flat, tree))
    return None if tree is None else (str(np.asarray(tree).dtype), np.shape(tree), np.asarray(tree).tobytes())


def of_step(step, name="train"):
    return Checkpoint(name, step, {"w": np.full(2, step)}, {"m": np.full(2, -step)})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_holds_everything(tmp_path):
    path = tmp_path / "one.safetensors"
    size, _ = write_file(path, Checkpoint("train", -7, TREE, [TREE["half"]]))
    assert (names(tmp_path), path.stat().st_size) == ([path.name], size)
    found = read_file(path)
    assert (found.name, found.step) == ("train", -7)
    assert flat(found.parameters) == flat(TREE)
    assert flat(found.state) == flat([TREE["half"]])
    # The arrays are the caller's own.
    found.parameters["a/b"][0, 0] = 9
    write_file(path, Checkpoint("train", 3, np.ones(2), None))
    assert (read_file(path).step, read_file(path).state) == (3, None)


def test_other_programs_can_read_it(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "one.safetensors"
    write_file(path, of_step(7))
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == ["parameters/w", "state/m"]
        assert file.get_tensor("parameters/w").tolist() == [7, 7]
        assert file.metadata()["step"] == "7"


@pytest.mark.parametrize("place", [0, 8, "format", "step", "dtype", "data_offsets", -9, -1])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_file_is_refused_or_read_right(tmp_path, place, how):
    path = tmp_path / "one.safetensors"
    write_file(path, of_step(7))
    data = bytearray(path.read_bytes())
    if isinstance(place, str):
        # The library writes the entries of the header in any order.
        place = data.index(f'"{place}"'.encode()) + 1
    if how == "cut":
        del data[place:]
    else:
        data[place] ^= 0x55
    path.write_bytes(data)
    # Only the hash in the manifest can tell that numbers have changed.
    if how == "changed" and place < 0:
        assert read_file(path).parameters["w"].shape == (2,)
        return
    with pytest.raises(redisacc.CorruptDataError) as failure:
        read_file(path)
    assert str(path) in str(failure.value)


def test_what_is_kept(tmp_path):
    folder = Folder(tmp_path / "new" / "folder", keep=2, keep_every=10)
    for step in range(1, 34, 3):
        folder.write(of_step(step))
    steps = [one.step for one in folder.stored()]
    assert steps == [31, 28, 22, 10, 1]
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert [entry["step"] for entry in manifest["checkpoints"]] == sorted(steps)
    assert names(folder.path) == ["manifest.json", *(entry["file"] for entry in manifest["checkpoints"])]
    assert all(entry["bytes"] == (folder.path / entry["file"]).stat().st_size for entry in manifest["checkpoints"])
    assert [one.step for one in folder.valid()] == steps


def test_damaged_checkpoints_are_skipped(tmp_path, caplog):
    folder = Folder(tmp_path, keep=9, keep_every=None)
    for step in range(5):
        folder.write(of_step(step))
    paths = {one.step: one.path for one in folder.stored()}
    data = bytearray(paths[4].read_bytes())
    data[-1] ^= 1
    paths[4].write_bytes(data)
    paths[3].write_bytes(b"")
    paths[2].replace(tmp_path / "step-00000009.safetensors")
    (tmp_path / "step-00000007.safetensors").mkdir()
    assert [one.step for one in folder.valid()] == [1, 0]
    for name in ("step-00000004", "step-00000003", "step-00000009", "step-00000007"):
        assert name in caplog.text
    assert "do not have the hash that manifest.json lists" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"checkpoints": 3}', '{"checkpoints": [7]}'])
def test_a_damaged_manifest_is_ignored(tmp_path, caplog, text):
    folder = Folder(tmp_path, keep=9, keep_every=None)
    folder.write(of_step(1))
    (tmp_path / "manifest.json").write_text(text)
    assert [one.step for one in folder.valid()] == [1]
    assert "manifest.json is ignored" in caplog.text
    folder.write(of_step(2))
    assert [one.step for one in folder.valid()] == [2, 1]


# A child that is killed before or after one of the calls that change the disk.
KILLED = """
import os, signal, sys
import numpy as np
from redisacc._checkpoints.file import Checkpoint
from redisacc._checkpoints.folder import Folder
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._redis.connect import connect
from redisacc._training.checkpointer import read_published
from pathlib import Path

where, number, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder = Folder(where, keep=2, keep_every=None)
for step in (1, 2):
    folder.write(Checkpoint("train", step, {"w": np.full(2, step)}, {"m": np.full(2, -step)}))
calls = 0

def watched(function):
    def call(*args, **options):
        global calls
        calls += 1
        if (calls, when) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if (calls, when) == (number, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

import safetensors.numpy
safetensors.numpy.save_file = watched(safetensors.numpy.save_file)
os.replace, os.fsync, os.unlink = watched(os.replace), watched(os.fsync), watched(os.unlink)
Path.write_text, Path.unlink = watched(Path.write_text), watched(Path.unlink)
folder.write(Checkpoint("train", 3, {"w": np.full(2, 3)}, {"m": np.full(2, -3)}))
print(calls)
"""


def kill_at(folder, number, when):
    command = [sys.executable, "-c", KILLED, str(folder), str(number), when]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_is_killed_while_it_writes(tmp_path, caplog, everything):
    undisturbed = kill_at(tmp_path / "all", 0, "never")
    assert undisturbed.returncode == 0, undisturbed.stderr
    number = int(undisturbed.stdout)
    # Two files with two flushes and a rename each, their contents, and the removal of an old one.
    assert number >= 9
    for place in range(1, number + 1, 1 if everything else 3):
        when = "before" if place % 2 else "after"
        where = tmp_path / f"{place}"
        assert kill_at(where, place, when).returncode == -9
        folder = Folder(where, keep=2, keep_every=None)
        newest = next(folder.valid())
        assert newest.step in (2, 3)
        assert (newest.parameters["w"].tolist(), newest.state["m"].tolist()) == ([newest.step] * 2, [-newest.step] * 2)
        folder.write(of_step(4))
        # What the killed one left is gone.
        assert names(where) == ["manifest.json", *sorted(one.path.name for one in folder.stored())]
        assert folder.stored()[0].step == 4
    assert "skipped" not in caplog.text


def lead(chief, until):
    for taken in chief.rounds(until=until):
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]}, state={"m": np.array(taken.global_step)})


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_chief_continues_from_a_checkpoint(training, tmp_path, caplog, wire):
    first = {"w": np.full(2, 1 / 3, np.float32)}
    options = {"checkpoint": tmp_path, "every": 2, "wire": wire}
    chief = training.chief(first, **options)
    one = training.work(gradient=lambda *_: {"w": np.full(2, 1 / 3, np.float32)})
    lead(chief, 5)
    chief.close()
    one.join()
    # Later ones may have been published before the thread had read those of steps 2 and 4.
    assert "step-00000005.safetensors" in names(tmp_path)
    training.client.flushall()
    again = training.chief(first, state={"m": np.array(-1)}, **options)
    assert (again.step, again.state["m"].item()) == (5, 4)
    assert again.parameters["w"].tobytes() == chief.parameters["w"].tobytes()
    assert "the server has nothing; continuing from the checkpoint of step 5" in caplog.text
    one = training.work(gradient=lambda *_: {"w": np.full(2, 1 / 3, np.float32)})
    lead(again, 7)
    one.join()
    assert again.step == 7


def test_what_is_published_is_newer(training, tmp_path):
    Folder(tmp_path, keep=3, keep_every=None).write(Checkpoint("train", 2, {"w": np.full(2, 9)}, None))
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.publish({"w": np.full(2, 5)}, 2)
    chief = training.chief(checkpoint=str(tmp_path))
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [5, 5])


def test_the_server_is_older_than_the_checkpoint(training, tmp_path, caplog):
    folder = Folder(tmp_path, keep=3, keep_every=None)
    folder.write(Checkpoint("other", 9, {"w": np.full(2, 9)}, None))
    folder.write(Checkpoint("train", 4, {"w": np.full(2, 4)}, None))
    first = training.chief()
    worker = training.worker()
    next(worker.steps())
    worker.apply({"w": [100, 100]})
    first.close()
    worker.close()
    chief = training.chief(checkpoint=tmp_path)
    assert (chief.step, chief.parameters["w"].tolist()) == (4, [4, 4])
    assert "the server has step 0, which is older; continuing from the checkpoint of step 4" in caplog.text
    assert "the checkpoint of step 9" in caplog.text
    assert "is skipped, because it is of the training 'other'" in caplog.text
    one = training.work(gradient=lambda *_: {"w": [1, 1]})
    lead(chief, 6)
    one.join()
    # The gradient of the earlier step was not used.
    assert chief.parameters["w"].tolist() == [6, 6]


@pytest.mark.usefixtures("time_runs")
@pytest.mark.parametrize(("saved", "expected"), [(2, (3, [3, 3], -1)), (3, (3, [30, 30], 7)), (4, (4, [30, 30], 7))])
@pytest.mark.loses_data
def test_the_newest_of_worker_and_checkpoint(training, background, tmp_path, saved, expected):
    chief = training.chief()
    worker = training.worker()
    steps, rounds = worker.steps(), chief.rounds()
    for step in range(3):
        assert next(steps)[0] == step
        worker.apply({"w": [1, 1]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1})
    assert next(steps)[0] == 3
    rounds.close()
    chief.close()
    training.client.flushall()
    state = {"m": np.array(7)}
    Folder(tmp_path, keep=3, keep_every=None).write(Checkpoint("train", saved, {"w": np.full(2, 30)}, state))
    waiting = background(next, steps)
    again = training.chief(checkpoint=tmp_path, state={"m": np.array(-1)})
    assert (again.step, again.parameters["w"].tolist(), again.state["m"].item()) == expected
    rounds = again.rounds()
    if saved != 4:
        # The worker has the step, or other parameters of it.
        if saved == 3:
            assert waiting.result()[1]["w"].tolist() == [30, 30]
        worker.apply({"w": [1, 1]})
        assert next(rounds).gradient["w"].tolist() == [1, 1]
        again.publish(again.parameters)
    step, _ = waiting.result() if saved != 3 else next(steps)
    assert step == 4


def test_a_disk_that_is_full(training, tmp_path, monkeypatch, caplog, until):
    (tmp_path / "file").write_text("")
    chief = training.chief(checkpoint=tmp_path / "file" / "folder", every=1)
    one = training.work()
    lead(chief, 3)
    one.join()
    chief.close()
    assert chief.step == 3
    assert "no checkpoint was written to" in caplog.text


def test_no_step_waits_for_a_checkpoint(training, tmp_path, monkeypatch, until):
    held = threading.Event()
    write = Folder.write

    def slow(self, checkpoint):
        held.wait(60)
        return write(self, checkpoint)

    monkeypatch.setattr(Folder, "write", slow)
    chief = training.chief(checkpoint=tmp_path, every=1)
    one = training.work()
    lead(chief, 10)
    one.join()
    held.set()
    chief.close()
    assert "step-00000010.safetensors" in names(tmp_path)


def test_checkpoints_after_some_time(training, tmp_path, until):
    chief = training.chief(checkpoint=tmp_path, every=datetime.timedelta(microseconds=1))
    one = training.work()
    rounds = chief.rounds()
    next(rounds)
    chief.publish(chief.parameters)
    until(lambda: tmp_path.exists() and "step-00000001.safetensors" in names(tmp_path))
    next(rounds)
    chief.publish(chief.parameters, finished=True)
    one.join()


@pytest.mark.parametrize("partitions", [None, 2])
def test_a_step_that_follows_while_a_checkpoint_is_read(training, monkeypatch, partitions):
    """However fast the steps follow, the checkpoint is of the step with which reading began."""
    parameters = redisacc.Parameters("train", redis=training.client, partitions=partitions)
    parameters.publish({"w": np.zeros(9)}, 0, state=np.zeros(9))
    values, published = ParameterReader.values, [0]

    def publish_first(reader, record, fetched=None):
        if len(published) > 5:
            pytest.fail("it reads again and again")
        step = published[-1] + 1
        parameters.publish({"w": np.full(9, float(step))}, step, state=np.full(9, float(step)))
        published.append(step)
        return values(reader, record, fetched)

    monkeypatch.setattr(ParameterReader, "values", publish_first)
    found = read_published(connect(training.client), "train")
    assert (found.step, published) == (0, [0, 1])
    assert (found.parameters["w"].tolist(), found.state.tolist()) == ([0] * 9, [0] * 9)
    parameters.delete()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": 3}, "checkpoint must be the path of a folder"),
        ({"checkpoint": ""}, "checkpoint must be the path of a folder"),
        ({"every": 0}, "every must be"),
        ({"every": "10min"}, r"every must be .*; or a datetime\.timedelta"),
        ({"every": datetime.timedelta(0)}, "every must be a positive time"),
        ({"keep": 0}, "keep must be"),
        ({"keep_every": 0}, "keep_every must be"),
    ],
)
def test_invalid_arguments(training, tmp_path, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief(**{"checkpoint": tmp_path, **options})
    assert training.client.keys() == []


def test_the_library_is_missing(training, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'redisacc\[checkpoint\]'"):
        training.chief(checkpoint=tmp_path)
    assert os.listdir(tmp_path) == []
