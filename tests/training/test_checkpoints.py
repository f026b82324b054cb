"""Checkpoints of a training: when they are written, what a failure does, and where a chief continues."""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import tempfile

import numpy as np
import pytest
import safetensors
from click.testing import CliRunner

import redisacc
from redisacc.tools.cli import main


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(training, real_server, tmp_path):
    """Writes a checkpoint into the folder of the test, as `redisacc checkpoint` does."""

    def save(step, parameters, state=None, name="train"):
        with redisacc.Parameters(name, redis=training.client) as published:
            published.publish(parameters, step, state=state)
            file = str(tmp_path / f"step-{step:08d}.safetensors")
            done = CliRunner().invoke(main, ["checkpoint", name, file, "--redis", real_server.url])
            assert done.exit_code == 0, done.output
            published.delete()

    return save


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The manifest of another training.
OTHERS = json.dumps({"name": "other", "checkpoints": []})
OF_ANOTHER = (
    "cannot hold the checkpoints of the run 'train': its {} belongs to the run 'other'. Give each run its own folder"
)


@pytest.mark.parametrize("file", ["manifest.json", "step-00000009.safetensors"])
def test_the_folder_of_another_training_is_refused(training, tmp_path, saved, file):
    if file == "manifest.json":
        (tmp_path / file).write_text(OTHERS)
    else:
        saved(9, {"w": np.zeros(2)}, name="other")
    before, keys = contents(tmp_path), training.client.keys()
    with pytest.raises(redisacc.InvalidArgumentError) as failure:
        training.chief(checkpoint=tmp_path)
    assert OF_ANOTHER.format(file) in str(failure.value)
    assert str(tmp_path) in str(failure.value)
    assert contents(tmp_path) == before
    assert training.client.keys() == keys


def test_two_trainings_that_begin_with_the_same_folder(training, tmp_path, caplog, until):
    chief = training.chief(LARGE, checkpoint=tmp_path / "new", checkpoint_every=1)
    assert names(tmp_path / "new") == ["manifest.json"]
    (tmp_path / "new" / "manifest.json").write_text(OTHERS)
    before = contents(tmp_path / "new")
    for step in rounds_of(training, chief, 2):
        if step == 2:
            until(lambda: warnings_in(caplog))
    chief.close()
    assert contents(tmp_path / "new") == before
    assert [OF_ANOTHER.format("manifest.json") in record.getMessage() for record in warnings_in(caplog)] == [True] * 2


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


def test_what_is_published_is_newer(training, tmp_path, saved):
    saved(2, {"w": np.full(2, 9)})
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.publish({"w": np.full(2, 5)}, 2)
    chief = training.chief(checkpoint=str(tmp_path))
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [5, 5])


def test_the_server_is_older_than_the_checkpoint(training, tmp_path, saved, caplog):
    saved(4, {"w": np.full(2, 4)})
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
@pytest.mark.parametrize(("step", "expected"), [(2, (3, [3, 3], -1)), (3, (3, [30, 30], 7)), (4, (4, [30, 30], 7))])
@pytest.mark.loses_data
def test_the_newest_of_worker_and_checkpoint(training, background, tmp_path, saved, step, expected):
    saved(step, {"w": np.full(2, 30)}, {"m": np.array(7)})
    chief = training.chief()
    worker = training.worker()
    steps, rounds = worker.steps(), chief.rounds()
    for made in range(3):
        assert next(steps)[0] == made
        worker.apply({"w": [1, 1]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1})
    assert next(steps)[0] == 3
    rounds.close()
    chief.close()
    training.client.flushall()
    waiting = background(next, steps)
    again = training.chief(checkpoint=tmp_path, state={"m": np.array(-1)})
    assert (again.step, again.parameters["w"].tolist(), again.state["m"].item()) == expected
    rounds = again.rounds()
    if step != 4:
        # The worker has the step, or other parameters of it.
        if step == 3:
            assert waiting.result()[1]["w"].tolist() == [30, 30]
        worker.apply({"w": [1, 1]})
        assert next(rounds).gradient["w"].tolist() == [1, 1]
        again.publish(again.parameters)
    assert (waiting.result() if step != 3 else next(steps))[0] == 4


def one_process(client, name, folder):
    """Opens a training in which this process leads, and works."""
    return redisacc.Training(
        name,
        {"w": np.zeros(2)},
        update=lambda taken, weights, state: (weights, state),
        workers=1,
        checkpoint=redisacc.Checkpoints(folder, every=1),
        redis=client,
    )


def test_a_folder_that_cannot_be_made(training, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="folder"):
        training.chief(checkpoint=tmp_path / "file" / "folder")
    with pytest.raises(NotADirectoryError, match="folder"):
        one_process(training.client, "train", tmp_path / "file" / "folder")


def test_a_folder_is_resolved_created_and_claimed_when_a_training_opens(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_process(training.client, "train", "new/saved") as one:
        assert names(tmp_path / "new" / "saved") == ["manifest.json"]
        with pytest.raises(redisacc.InvalidArgumentError, match=r"to the run 'train'\. Give each"):
            one_process(training.client, "another", tmp_path / "new" / "saved")
        monkeypatch.chdir("/")
        for _, weights in one.steps(until=1):
            one.apply(weights)
    assert names(tmp_path / "new" / "saved") == ["manifest.json", "step-00000001.safetensors"]


def test_a_full_disk_at_the_beginning_is_a_warning(training, tmp_path, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with one_process(training.client, "train", tmp_path):
        assert "no checkpoint can be written to" in caplog.text
        assert "No space left on device" in caplog.text
    caplog.clear()


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
    read = hashlib.sha256

    def failing(*args, **options):
        monkeypatch.setattr(hashlib, "sha256", read)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(hashlib, "sha256", failing)
    chief = training.chief(LARGE, checkpoint=tmp_path, checkpoint_every=1)
    for step in rounds_of(training, chief, 2):
        if step == 2:
            until(lambda: warnings_in(caplog))
    chief.close()
    assert "RuntimeError: unforeseen" in warnings_in(caplog)[0].getMessage()
    assert warnings_in(caplog)[0].exc_info[0] is RuntimeError
    assert "step-00000002.safetensors" in names(tmp_path)


@contextlib.contextmanager
def blocked(folder):
    """In this block, whoever reads the manifest waits."""
    manifest = folder / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    yield
    end = os.open(manifest, os.O_WRONLY)
    manifest.unlink()
    os.close(end)


def test_a_checkpoint_that_takes_long_at_the_end(training, tmp_path, durations, caplog, until):
    durations(closing=0.0)
    chief = training.chief(LARGE, checkpoint=tmp_path)
    with blocked(tmp_path):
        for _ in rounds_of(training, chief, 1):
            pass
        chief.close()
        assert "a checkpoint is still being written to" in caplog.text
    until(lambda: "step-00000001.safetensors" in names(tmp_path))


def test_no_step_waits_for_a_checkpoint(training, tmp_path):
    chief = training.chief(checkpoint=tmp_path, checkpoint_every=1)
    with blocked(tmp_path):
        one = training.work()
        lead(chief, 10)
        one.join()
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
def test_a_step_that_follows_while_a_checkpoint_is_read(training, tmp_path, proxy, partitions):
    """However fast the steps follow, the checkpoint is of the step with which reading began."""
    parameters = redisacc.Parameters("train", redis=training.client, partitions=partitions)
    published = []

    def publish():
        step = len(published)
        parameters.publish({"w": np.full(9, float(step))}, step, state=np.full(9, float(step)))
        published.append(step)

    publish()
    # The state is read first, and then the parameters.
    proxy.after("GET", publish)
    done = CliRunner().invoke(main, ["checkpoint", "train", str(tmp_path / "file"), "--redis", proxy.url])
    assert (done.exit_code, published) == (0, [0, 1])
    with safetensors.safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.metadata()["step"] == "0"
        assert [values.tolist() for values in map(file.get_tensor, file.keys())] == [[0] * 9] * 2


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
