"""Files and folders of checkpoints: what they hold, what survives a crash, a full disk and damage, and what is kept."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.rows import every_row

import redisacc
from redisacc._checkpoints.file import ABANDONED, Checkpoint, check_file, read_file, write_file
from redisacc._checkpoints.folder import Folder
from redisacc._protocol.leases.process_identity import own_identity

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


def folder_in(path, *, keep, keep_every=None, name="train"):
    return Folder(path, name, keep=keep, keep_every=keep_every)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_holds_everything(tmp_path):
    path = tmp_path / "one.safetensors"
    size = write_file(path, Checkpoint("train", -7, TREE, [TREE["half"]]))
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


@every_row("place", [0, 8, "sha256", "format", "step", "dtype", "data_offsets", -9, -1])
@every_row("how", ["cut", "changed"])
def test_a_damaged_file_is_refused(tmp_path, place, how):
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
    for read in (read_file, check_file):
        with pytest.raises(redisacc.CorruptDataError) as failure:
            read(path)
        assert str(path) in str(failure.value)


def test_what_is_kept(tmp_path):
    folder = folder_in(tmp_path / "new" / "folder", keep=2, keep_every=10)
    for step in range(1, 34, 3):
        folder.write(of_step(step))
    steps = [one.step for one in folder.stored()]
    assert steps == [31, 28, 22, 10, 1]
    assert json.loads((folder.path / "manifest.json").read_text()) == {"name": "train"}
    assert names(folder.path) == ["manifest.json", *(f"step-{step:08d}.safetensors" for step in sorted(steps))]
    assert [one.step for one in folder.valid()] == steps


def test_damaged_checkpoints_are_skipped(tmp_path, caplog):
    folder = folder_in(tmp_path, keep=9)
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
    assert "its contents do not have the hash" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_ignored(tmp_path, caplog, text):
    folder = folder_in(tmp_path, keep=9)
    folder.write(of_step(1))
    (tmp_path / "manifest.json").write_text(text)
    assert [one.step for one in folder.valid()] == [1]
    folder.write(of_step(2))
    assert "manifest.json is ignored" in caplog.text
    assert [one.step for one in folder.valid()] == [2, 1]


# A child that is killed before or after one of the calls that change the disk.
KILLED = """
import os, signal, sys
import numpy as np
from redisacc._checkpoints.file import Checkpoint
from redisacc._checkpoints.folder import Folder
from pathlib import Path

where, last, number, when = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
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

os.replace, os.fsync, os.unlink = watched(os.replace), watched(os.fsync), watched(os.unlink)
folder.write(Checkpoint("train", last, {"w": np.full(2, 3)}, {"m": np.full(2, -3)}))
print(calls)
"""


def kill_at(folder, last, number, when):
    command = [sys.executable, "-c", KILLED, str(folder), str(last), str(number), when]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 2])
def test_a_process_that_is_killed_while_it_writes(tmp_path, caplog, last):
    """A new step, or one that it has written before."""
    undisturbed = kill_at(tmp_path / "all", last, 0, "never")
    assert undisturbed.returncode == 0, undisturbed.stderr
    number = int(undisturbed.stdout)
    # Two flushes, a rename, and the removal of a temporary file and of an old one.
    assert number == {3: 5, 2: 4}[last]
    for place in range(1, number + 1):
        when = "before" if place % 2 else "after"
        where = tmp_path / f"{place}"
        assert kill_at(where, last, place, when).returncode == -9
        folder = folder_in(where, keep=2)
        newest = next(folder.valid())
        found = newest.parameters["w"][0]
        assert newest.step in (2, last)
        assert found in ((2, 3) if last == 2 else (newest.step,))
        assert (newest.parameters["w"].tolist(), newest.state["m"].tolist()) == ([found] * 2, [-found] * 2)
        folder.write(of_step(4))
        # What the killed one left is gone.
        assert names(where) == ["manifest.json", *sorted(one.path.name for one in folder.stored())]
        assert folder.stored()[0].step == 4
    assert "skipped" not in caplog.text


# A child that the kernel kills in the middle of a file that becomes too large.
IN_THE_MIDDLE = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from redisacc._checkpoints.file import Checkpoint, write_file

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
write_file(Path(sys.argv[1]), Checkpoint("train", 9, {"w": np.full(99999, 9)}, None))
"""


def temporaries(folder):
    return [name for name in names(folder) if name.endswith(".tmp")]


@pytest.mark.slow(keep="other")
@pytest.mark.parametrize("file", ["step-00000009.safetensors", "other", "a long name " * 20])
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path, file):
    """The next one may be of another training, or `redisacc checkpoint` with another file in this folder."""
    command = [sys.executable, "-c", IN_THE_MIDDLE, str(tmp_path / file)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGXFSZ
    (left,) = tmp_path.iterdir()
    assert temporaries(tmp_path) == [left.name]
    assert left.stat().st_size == 100_000
    write_file(tmp_path / "another", of_step(3))
    assert names(tmp_path) == ["another"]


@pytest.mark.parametrize("identity", ["", "0123456789abcdef.1.1", "0123456789abcdef0123456789abcdef"])
def test_the_file_of_a_writer_that_may_live_is_not_removed(tmp_path, identity):
    """On another machine, nobody can see whether it lives. A file that has not changed for long is garbage there."""
    identity = identity or own_identity()
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
    assert temporary.exists() is (identity == own_identity())
    assert of_somebody_else.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        folder_in(tmp_path, keep=1).write(of_step(1))
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "manifest.json": mode,
        "step-00000001.safetensors": mode,
    }


def damage(path, how="its data"):
    data = bytearray(path.read_bytes())
    if how == "its data":
        data[-1] ^= 1
    elif how == "its header":
        data[8] ^= 1
    path.write_bytes(b"" if how == "all of it" else data)


@pytest.mark.parametrize("how", ["its data", "its header", "all of it"])
@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_damaged_file_is_not_the_latest(tmp_path, how, is_new_process):
    folder = folder_in(tmp_path, keep=2)
    written = folder.write(of_step(9))
    damage(written, how)
    if is_new_process:
        folder = folder_in(tmp_path, keep=2)
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
    folder = folder_in(tmp_path, keep=1)
    for step in (3, 4):
        folder.write(of_step(step))
    assert {name: (tmp_path / name).read_bytes() for name in unknown} == unknown
    assert names(tmp_path) == ["manifest.json", *unknown, "step-00000004.safetensors"]


def test_only_whole_files_count_as_the_first_of_an_interval(tmp_path):
    folder = folder_in(tmp_path, keep=1, keep_every=10)
    folder.write(of_step(10))
    damage(folder.write(of_step(20)), "its data")
    for step in (23, 26, 30):
        folder.write(of_step(step))
    # Step 10 is the only one of its interval.
    assert [one.step for one in folder.valid()] == [30, 23, 10]


def test_what_was_written_is_there_although_later_ones_are(tmp_path):
    for step in (7, 8, 9):
        folder_in(tmp_path, keep=9).write(of_step(step))
    folder = folder_in(tmp_path, keep=2)
    assert folder.write(of_step(5)).exists()
    assert [one.step for one in folder.valid()] == [9, 8, 5]
    folder.write(of_step(6))
    assert [one.step for one in folder.valid()] == [9, 8, 6]


def test_nothing_is_removed_if_nobody_knows_what_is_whole(tmp_path, monkeypatch, caplog):
    for step in (7, 8, 9):
        folder_in(tmp_path, keep=9).write(of_step(step))

    def broken(file, _):
        raise OSError(errno.EIO, "no answer", file.name)

    folder = folder_in(tmp_path, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", broken)
        folder.write(of_step(10))
    assert "earlier files cannot be removed" in caplog.text
    assert [one.step for one in folder.valid()] == [10, 9, 8, 7]
    folder.write(of_step(11))
    assert [one.step for one in folder.valid()] == [11, 10]


def test_files_are_read_once_if_at_all(tmp_path, monkeypatch):
    read, digest = [], hashlib.file_digest

    def noted(file, name):
        read.append(os.path.basename(file.name))
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    folder = folder_in(tmp_path, keep=2, keep_every=10)
    for step in range(1, 50, 3):
        folder.write(of_step(step))
    assert read == []
    folder = folder_in(tmp_path, keep=3, keep_every=10)
    folder.write(of_step(50))
    assert read == []
    folder.write(of_step(51))
    # The latest three are 51, 50 and 49: the last of them was not written by this process. 40 was alone.
    assert read == ["step-00000049.safetensors", "step-00000040.safetensors"]
    folder.write(of_step(52))
    assert len(read) == 2


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_trainings_that_claim_a_folder_at_once(tmp_path, monkeypatch):
    """The other one claims it after this one has found it free, at the last moment."""
    first, second = (folder_in(tmp_path, keep=1, name=name) for name in ("train", "other"))
    link = os.link

    def late(source, target):
        monkeypatch.setattr(os, "link", link)
        second.write(of_step(1, "other"))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(redisacc.InvalidArgumentError, match="to the run 'other'"):
        first.write(of_step(1))
    assert [one.name for one in second.valid()] == ["other"]
    assert names(tmp_path) == ["manifest.json", "step-00000001.safetensors"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    folder = folder_in(tmp_path, keep=1)
    folder.write(of_step(1))
    assert [one.step for one in folder.valid()] == [1]


def test_a_file_of_another_training_that_comes_later(tmp_path, caplog):
    folder = folder_in(tmp_path, keep=1)
    folder.write(of_step(1))
    write_file(tmp_path / "step-00000009.safetensors", of_step(9, "other"))
    assert [one.step for one in folder.valid()] == [1]
    assert "is skipped: it holds step 9 of the run 'other'" in caplog.text
    others = (tmp_path / "step-00000009.safetensors").read_bytes()
    for step in (2, 3):
        folder.write(of_step(step))
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"its step-00000009\.safetensors belongs to the run 'other'"
    ):
        folder.write(of_step(9))
    assert [one.step for one in folder.valid()] == [3]
    assert (tmp_path / "step-00000009.safetensors").read_bytes() == others
