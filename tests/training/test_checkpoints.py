"""Checkpoints of a training: what they hold, what survives a crash, and where a chief continues."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import signal
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import redisacc
from redisacc._checkpoints.file import ABANDONED, Checkpoint, hash_of, read_file, write_file
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
    "ä😀": np.ones(3, np.float16),
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
    folder = Folder(tmp_path / "new" / "folder", "train", keep=2, keep_every=10)
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
    folder = Folder(tmp_path, "train", keep=9, keep_every=None)
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
    folder = Folder(tmp_path, "train", keep=9, keep_every=None)
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
folder = Folder(where, "train", keep=2, keep_every=None)
for step in (1, 2):
    folder.write(Checkpoint("train", step, {"w": np.full(2, step)}, {"m": np.full(2, -step)}))
calls = 0

def watched(function):
    def call(*args, **options):
        global calls
        calls += 1
        if (calls, when) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*args, **options)
        finally:
            if (calls, when) == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
    return call

from redisacc._format.leaves import Leaf
Leaf.bytes_of = watched(Leaf.bytes_of)
os.replace, os.fsync, os.unlink = watched(os.replace), watched(os.fsync), watched(os.unlink)
folder.write(Checkpoint("train", 3, {"w": np.full(2, 3)}, {"m": np.full(2, -3)}))
print(calls)
"""


def kill_at(folder, number, when):
    command = [sys.executable, "-c", KILLED, str(folder), str(number), when]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(tmp_path, caplog, everything):
    undisturbed = kill_at(tmp_path / "all", 0, "never")
    assert undisturbed.returncode == 0, undisturbed.stderr
    number = int(undisturbed.stdout)
    # Two files with two flushes and a rename each, two arrays, and the removal of two temporary files and an old one.
    assert number == 11
    for place in range(1, number + 1, 1 if everything else 3):
        when = "before" if place % 2 else "after"
        where = tmp_path / f"{place}"
        assert kill_at(where, place, when).returncode == -9
        folder = Folder(where, "train", keep=2, keep_every=None)
        newest = next(folder.valid())
        assert newest.step in (2, 3)
        assert (newest.parameters["w"].tolist(), newest.state["m"].tolist()) == ([newest.step] * 2, [-newest.step] * 2)
        folder.write(of_step(4))
        # What the killed one left is gone.
        assert names(where) == ["manifest.json", *sorted(one.path.name for one in folder.stored())]
        assert folder.stored()[0].step == 4
    assert "skipped" not in caplog.text


# A child that writes step 9, and kills or stops itself after the first of the two arrays.
IN_THE_MIDDLE = """
import os, signal, sys
import numpy as np
from pathlib import Path
from redisacc._checkpoints.file import Checkpoint, write_file
from redisacc._format.leaves import Leaf

bytes_of = Leaf.bytes_of

def interrupted(leaf, values):
    if values[0] < 0:
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
    return bytes_of(leaf, values)

Leaf.bytes_of = interrupted
write_file(Path(sys.argv[1]), Checkpoint("train", 9, {"w": np.full(99999, 9)}, {"m": np.full(2, -9)}))
"""


def temporaries(folder):
    return [name for name in names(folder) if name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["step-00000009.safetensors", "other", "a long name " * 20])
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path, file):
    """The next one may be of another training, or `redisacc checkpoint` with another file in this folder."""
    command = [sys.executable, "-c", IN_THE_MIDDLE, str(tmp_path / file), "SIGKILL"]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    assert len(temporaries(tmp_path)) == len(names(tmp_path)) == 1
    write_file(tmp_path / "another", of_step(3))
    assert names(tmp_path) == ["another"]


def test_the_file_of_a_living_writer_is_not_removed(tmp_path, until):
    path = tmp_path / "step-00000009.safetensors"
    with subprocess.Popen([sys.executable, "-c", IN_THE_MIDDLE, str(path), "SIGSTOP"]) as child:
        try:
            until(lambda: os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
            (temporary,) = temporaries(tmp_path)
            os.utime(tmp_path / temporary, (0, 0))
            folder = Folder(tmp_path, "train", keep=1, keep_every=None)
            folder.write(of_step(7))
            folder.write(of_step(8))
            assert temporaries(tmp_path) == [temporary]
        finally:
            child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 0
    assert temporaries(tmp_path) == []
    assert [one.step for one in folder.valid()] == [9, 8]


@pytest.mark.parametrize("identity", ["0123456789abcdef.1.1", "0123456789abcdef0123456789abcdef"])
def test_a_writer_on_another_machine_may_be_alive(tmp_path, identity):
    """Nobody can see whether it lives. A file that has not changed for long is garbage."""
    temporary = tmp_path / f".step-00000009.safetensors.redisacc-{identity}-01234567.tmp"
    temporary.write_text("half")
    of_somebody_else = tmp_path / ".step-00000009.safetensors.1.tmp"
    of_somebody_else.write_text("")
    os.utime(of_somebody_else, (0, 0))
    write_file(tmp_path / "file", of_step(3))
    assert temporaries(tmp_path) == sorted([temporary.name, of_somebody_else.name])
    now = (tmp_path / "file").stat().st_mtime
    os.utime(temporary, (now, now - ABANDONED + 60))
    write_file(tmp_path / "file", of_step(3))
    assert temporary.exists()
    os.utime(temporary, (now, now - ABANDONED - 1))
    write_file(tmp_path / "file", of_step(3))
    assert temporaries(tmp_path) == [of_somebody_else.name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        Folder(tmp_path, "train", keep=1, keep_every=None).write(of_step(1))
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "manifest.json": mode,
        "step-00000001.safetensors": mode,
    }


# Runs on a file system of one megabyte.
FULL = """
import errno, os, sys
import numpy as np
from pathlib import Path
from redisacc._checkpoints.file import Checkpoint
from redisacc._checkpoints.folder import Folder

def of_step(step):
    return Checkpoint("train", step, {"w": np.full(40_000, step)}, None)

where = Path(sys.argv[1])
folder = Folder(where / "folder", "train", keep=1, keep_every=None)
folder.write(of_step(1))
folder.write(of_step(2))
filler = where / "filler"
with open(filler, "wb", buffering=0) as file:
    file.truncate(0)
    try:
        while file.write(bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
for step in (3, 4):
    try:
        folder.write(of_step(step))
        raise SystemExit("it was written")
    except OSError as error:
        assert error.errno == errno.ENOSPC and error.filename.endswith(f"step-0000000{step}.safetensors"), error
    assert sorted(os.listdir(folder.path)) == ["manifest.json", "step-00000002.safetensors"]
    assert [one.step for one in folder.valid()] == [2]
filler.unlink()
folder.write(of_step(5))
assert sorted(os.listdir(folder.path)) == ["manifest.json", "step-00000005.safetensors"]
print("done")
"""


def test_a_real_disk_that_is_full(tmp_path):
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    try:
        subprocess.run([*mounted, "true"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount a small file system: {error}")
    command = [*mounted, sys.executable, "-c", FULL, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "done\n", found.stderr


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "its data":
        data[-1] ^= 1
    elif how == "its header":
        data[8] ^= 1
    path.write_bytes(b"" if how == "all of it" else data)


@pytest.mark.parametrize("how", ["its data", "its header", "all of it"])
@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_damaged_file_is_not_the_latest(tmp_path, how, is_new_process):
    folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    written = folder.write(of_step(9))
    damage(written, how)
    if is_new_process:
        folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    for step in (5, 6, 7):
        assert folder.write(of_step(step)).exists()
    assert [one.step for one in folder.valid()] == [7, 6]
    # What is damaged may be of some use to somebody, as long as nothing later is there.
    assert written.exists()
    folder.write(of_step(9))
    assert [one.step for one in folder.valid()] == [9, 7]


def test_what_may_be_anybody_s_stays(tmp_path):
    """A file that does not say of which training it is, is not removed."""
    unknown = {f"step-0000000{step}.safetensors": data for step, data in ((1, b""), (2, b"other"))}
    for name, data in unknown.items():
        (tmp_path / name).write_bytes(data)
    folder = Folder(tmp_path, "train", keep=1, keep_every=None)
    for step in (3, 4):
        folder.write(of_step(step))
    assert {name: (tmp_path / name).read_bytes() for name in unknown} == unknown
    assert names(tmp_path) == ["manifest.json", *unknown, "step-00000004.safetensors"]


def test_only_whole_files_count_as_the_first_of_an_interval(tmp_path):
    folder = Folder(tmp_path, "train", keep=1, keep_every=10)
    folder.write(of_step(10))
    damage(folder.write(of_step(20)), "its data")
    for step in (23, 26, 30):
        folder.write(of_step(step))
    # Step 10 is the only one of its interval.
    assert [one.step for one in folder.valid()] == [30, 23, 10]


def test_what_was_written_is_there_although_later_ones_are(tmp_path):
    for step in (7, 8, 9):
        Folder(tmp_path, "train", keep=9, keep_every=None).write(of_step(step))
    folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    assert folder.write(of_step(5)).exists()
    assert [one.step for one in folder.valid()] == [9, 8, 5]
    folder.write(of_step(6))
    assert [one.step for one in folder.valid()] == [9, 8, 6]


def test_nothing_is_removed_if_nobody_knows_what_is_whole(tmp_path, monkeypatch, caplog):
    for step in (7, 8, 9):
        Folder(tmp_path, "train", keep=9, keep_every=None).write(of_step(step))

    def broken(path):
        raise OSError(errno.EIO, "no answer", str(path))

    folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    with monkeypatch.context() as patch:
        patch.setattr("redisacc._checkpoints.folder.hash_of", broken)
        folder.write(of_step(10))
    assert "earlier files are not up to date" in caplog.text
    assert [one.step for one in folder.valid()] == [10, 9, 8, 7]
    folder.write(of_step(11))
    assert [one.step for one in folder.valid()] == [11, 10]


def test_files_are_read_once_if_at_all(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("redisacc._checkpoints.folder.hash_of", lambda path: read.append(path.name) or hash_of(path))
    monkeypatch.setattr("redisacc._checkpoints.file.hash_of", None)
    folder = Folder(tmp_path, "train", keep=2, keep_every=10)
    for step in range(1, 50, 3):
        folder.write(of_step(step))
    assert read == []
    folder = Folder(tmp_path, "train", keep=3, keep_every=10)
    folder.write(of_step(50))
    assert read == []
    folder.write(of_step(51))
    # The latest three are 51, 50 and 49: the last of them was not written by this process. 40 was alone.
    assert read == ["step-00000049.safetensors", "step-00000040.safetensors"]
    folder.write(of_step(52))
    assert len(read) == 2


def test_a_full_disk_after_the_file_was_written(tmp_path, monkeypatch, caplog):
    """Old files make room nevertheless. The manifest lists the file with the next one."""
    folder = Folder(tmp_path, "train", keep=1, keep_every=None)
    folder.write(of_step(1))

    def full(self, entries, **options):
        raise OSError(errno.ENOSPC, "full", "manifest.json")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_write_manifest", full)
        folder.write(of_step(2))
    assert "step-00000002.safetensors was written, but manifest.json" in caplog.text
    assert names(tmp_path) == ["manifest.json", "step-00000002.safetensors"]
    folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    assert [one.step for one in folder.valid()] == [2]
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_write_manifest", full)
        folder.write(of_step(3))
    folder.write(of_step(4))
    assert all(one.sha256 for one in folder.stored())
    assert [one.step for one in folder.stored()] == [4, 3]


def test_a_step_that_is_written_again_before_a_crash(tmp_path, monkeypatch):
    """The manifest must not have the hash of the file that was replaced."""

    class Crash(BaseException):
        pass

    def crash(self, written):
        raise Crash

    folder = Folder(tmp_path, "train", keep=2, keep_every=None)
    folder.write(of_step(2))
    folder.write(of_step(3))
    monkeypatch.setattr(Folder, "_remove_all_but", crash)
    with pytest.raises(Crash):
        folder.write(Checkpoint("train", 3, {"w": np.full(2, 33)}, None))
    newest = next(Folder(tmp_path, "train", keep=2, keep_every=None).valid())
    assert (newest.step, newest.parameters["w"].tolist()) == (3, [33, 33])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


OF_ANOTHER = (
    "cannot have the checkpoints of the training 'train': its {} is of the training 'other'. "
    "Give each training a folder of its own"
)


@pytest.mark.parametrize("file", ["manifest.json", "step-00000009.safetensors"])
def test_the_folder_of_another_training_is_refused(training, tmp_path, file):
    Folder(tmp_path, "other", keep=1, keep_every=None).write(of_step(9, "other"))
    for path in tmp_path.iterdir():
        if path.name != file:
            path.unlink()
    before = contents(tmp_path)
    with pytest.raises(redisacc.InvalidArgumentError) as failure:
        training.chief(checkpoint=tmp_path)
    assert OF_ANOTHER.format(file) in str(failure.value)
    assert str(tmp_path) in str(failure.value)
    assert contents(tmp_path) == before
    assert training.client.keys() == []


def test_two_trainings_that_begin_with_the_same_folder(training, tmp_path, caplog, until):
    chief = training.chief(LARGE, checkpoint=tmp_path / "new", checkpoint_every=1)
    assert not (tmp_path / "new").exists()
    Folder(tmp_path / "new", "other", keep=1, keep_every=None).write(of_step(1, "other"))
    before = contents(tmp_path / "new")
    for step in rounds_of(training, chief, 2):
        if step == 2:
            until(lambda: warnings_in(caplog))
    chief.close()
    assert contents(tmp_path / "new") == before
    assert [OF_ANOTHER.format("manifest.json") in record.getMessage() for record in warnings_in(caplog)] == [True] * 2


def test_two_trainings_that_claim_a_folder_at_once(tmp_path, monkeypatch):
    """The other one claims it after this one has found it free, at the last moment."""
    first, second = (Folder(tmp_path, name, keep=1, keep_every=None) for name in ("train", "other"))
    link = os.link

    def late(source, target):
        monkeypatch.setattr(os, "link", link)
        second.write(of_step(1, "other"))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(redisacc.InvalidArgumentError, match="of the training 'other'"):
        first.write(of_step(1))
    assert [one.name for one in second.valid()] == ["other"]
    assert names(tmp_path) == ["manifest.json", "step-00000001.safetensors"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    folder = Folder(tmp_path, "train", keep=1, keep_every=None)
    folder.write(of_step(1))
    assert [one.step for one in folder.valid()] == [1]


def test_a_file_of_another_training_that_comes_later(tmp_path, caplog):
    folder = Folder(tmp_path, "train", keep=1, keep_every=None)
    folder.write(of_step(1))
    write_file(tmp_path / "step-00000009.safetensors", of_step(9, "other"))
    assert [one.step for one in folder.valid()] == [1]
    assert "is skipped: it is of the training 'other'" in caplog.text
    before = contents(tmp_path)
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"its step-00000009\.safetensors is of the training 'other'"
    ):
        folder.write(of_step(2))
    assert contents(tmp_path) == before


def lead(chief, until):
    for taken in chief.rounds(until=until):
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]}, state={"m": np.array(taken.global_step)})


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_a_chief_continues_from_a_checkpoint(training, tmp_path, caplog, encoding):
    first = {"w": np.full(2, 1 / 3, np.float32)}
    options = {"checkpoint": tmp_path, "checkpoint_every": 2, "encoding": encoding}
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
    Folder(tmp_path, "train", keep=3, keep_every=None).write(Checkpoint("train", 2, {"w": np.full(2, 9)}, None))
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.publish({"w": np.full(2, 5)}, 2)
    chief = training.chief(checkpoint=str(tmp_path))
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [5, 5])


def test_the_server_is_older_than_the_checkpoint(training, tmp_path, caplog):
    Folder(tmp_path, "train", keep=3, keep_every=None).write(Checkpoint("train", 4, {"w": np.full(2, 4)}, None))
    first = training.chief()
    worker = training.worker()
    next(worker.steps())
    worker.apply({"w": [100, 100]})
    first.close()
    worker.close()
    chief = training.chief(checkpoint=tmp_path)
    assert (chief.step, chief.parameters["w"].tolist()) == (4, [4, 4])
    assert "the server has step 0, which is older; continuing from the checkpoint of step 4" in caplog.text
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
    Folder(tmp_path, "train", keep=3, keep_every=None).write(Checkpoint("train", saved, {"w": np.full(2, 30)}, state))
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


def test_a_folder_that_cannot_be_made(training, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    chief = training.chief(checkpoint=tmp_path / "file" / "folder", checkpoint_every=1)
    one = training.work()
    lead(chief, 3)
    one.join()
    chief.close()
    assert chief.step == 3
    assert "no checkpoint was written to" in caplog.text


LARGE = {"w": np.zeros(1 << 16, np.float32)}


def warnings_in(caplog):
    return [record for record in caplog.records if "no checkpoint was written" in record.getMessage()]


def rounds_of(training, chief, last):
    """Yields before each step, and publishes the step after that."""
    one = training.work(gradient=lambda *_: LARGE)
    for taken in chief.rounds(until=last):
        yield taken.global_step + 1
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
    one.join()


def test_a_full_disk_is_a_warning_in_each_interval(training, tmp_path, full_disk, caplog, until):
    chief = training.chief(LARGE, checkpoint=tmp_path, checkpoint_every=1)
    with contextlib.ExitStack() as full:
        full.enter_context(full_disk())
        for step in rounds_of(training, chief, 5):
            if step <= 3:
                until(lambda step=step: len(warnings_in(caplog)) == step - 1)
            elif step == 4:
                until(lambda: len(warnings_in(caplog)) == 3)
                full.close()
            else:
                until(lambda: "step-00000004.safetensors" in names(tmp_path))
    chief.close()
    assert len(warnings_in(caplog)) == 3
    for record in warnings_in(caplog):
        assert "File too large" in record.getMessage()
        assert "trying again when the next one is due" in record.getMessage()
        assert record.exc_info in (None, False)
    assert names(tmp_path) == ["manifest.json", "step-00000004.safetensors", "step-00000005.safetensors"]


@pytest.mark.parametrize("is_full", [True, False])
def test_the_last_checkpoint_is_tried_once_more_at_the_end(training, tmp_path, full_disk, caplog, until, is_full):
    chief = training.chief(LARGE, checkpoint=tmp_path, checkpoint_every=100)
    with full_disk():
        for _ in rounds_of(training, chief, 2):
            pass
        until(lambda: warnings_in(caplog))
        if is_full:
            chief.close()
    chief.close()
    assert ("step-00000002.safetensors" in names(tmp_path)) == (not is_full)
    said = [record.getMessage() for record in warnings_in(caplog)]
    assert "trying again when the next one is due, or at the end" in said[0]
    if is_full:
        assert "File too large" in said[1]
        assert "this was the last try; `redisacc checkpoint train FILE` writes what is published" in said[1]
        # The folder belongs to this training, and holds nothing else.
        assert names(tmp_path) == ["manifest.json"]
    assert len(said) == 1 + is_full


def test_an_error_that_nobody_expects_ends_no_thread(training, tmp_path, monkeypatch, caplog, until):
    write = Folder.write

    def failing(self, checkpoint):
        if checkpoint.step == 1:
            raise RuntimeError("unforeseen")
        return write(self, checkpoint)

    monkeypatch.setattr(Folder, "write", failing)
    chief = training.chief(LARGE, checkpoint=tmp_path, checkpoint_every=1)
    for step in rounds_of(training, chief, 2):
        if step == 2:
            until(lambda: warnings_in(caplog))
    chief.close()
    assert "RuntimeError: unforeseen" in warnings_in(caplog)[0].getMessage()
    assert warnings_in(caplog)[0].exc_info[0] is RuntimeError
    assert "step-00000002.safetensors" in names(tmp_path)


def test_a_checkpoint_that_takes_long_at_the_end(training, tmp_path, monkeypatch, caplog):
    held = threading.Event()
    monkeypatch.setattr(Folder, "write", lambda *_: held.wait(60))
    monkeypatch.setattr("redisacc._training.checkpointer.CLOSING", 0.0)
    chief = training.chief(LARGE, checkpoint=tmp_path)
    for _ in rounds_of(training, chief, 1):
        pass
    chief.close()
    assert "a checkpoint is still being written to" in caplog.text
    held.set()
    chief._checkpointer._thread.join()


def test_no_step_waits_for_a_checkpoint(training, tmp_path, monkeypatch, until):
    held = threading.Event()
    write = Folder.write

    def slow(self, checkpoint):
        held.wait(60)
        return write(self, checkpoint)

    monkeypatch.setattr(Folder, "write", slow)
    chief = training.chief(checkpoint=tmp_path, checkpoint_every=1)
    one = training.work()
    lead(chief, 10)
    one.join()
    held.set()
    chief.close()
    assert "step-00000010.safetensors" in names(tmp_path)


def test_checkpoints_after_some_time(training, tmp_path, until):
    chief = training.chief(checkpoint=tmp_path, checkpoint_every=datetime.timedelta(microseconds=1))
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
        ({"checkpoint_every": 0}, "checkpoint.every must be"),
        ({"checkpoint_every": "10min"}, r"checkpoint.every must be .*; or a datetime\.timedelta"),
        ({"checkpoint_every": datetime.timedelta(0)}, "checkpoint.every must be a positive time"),
        ({"checkpoint_keep": 0}, "checkpoint.keep must be"),
        ({"checkpoint_keep_every": 0}, "checkpoint.keep_every must be"),
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
