"""The commands `checkpoint` and `restore`."""

import os

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.fixture
def weights(client):
    with redisacc.Parameters("w", redis=client) as parameters:
        yield parameters
        parameters.delete()


@pytest.fixture
def save(cli, client):
    """Writes a checkpoint of `w`, of which nothing is published afterwards."""

    def write(path, step, tree, state=None):
        with redisacc.Parameters("w", redis=client) as parameters:
            parameters.publish(tree, step, state=state)
            assert cli("checkpoint", "w", path).exit_code == 0
            parameters.delete()

    return write


def test_there_and_back(cli, cli_json, client, weights, tmp_path):
    path = tmp_path / "w.safetensors"
    weights.publish({"w": np.ones(3)}, 7, state=[np.zeros(2)])
    said = cli_json("checkpoint", "w", path)
    assert (said["file"], said["step"], said["bytes"]) == (str(path), 7, path.stat().st_size)
    found = cli("checkpoint", "w", path)
    assert (found.exit_code, "wrote step 7 of w to" in " ".join(found.stdout.split())) == (0, True)
    weights.delete()
    assert cli_json("restore", "w", path) == {"before": None, "step": 7}
    with redisacc.Parameters("w", redis=client) as restored:
        step, tree = restored.latest()
        assert (step, tree["w"].tolist(), restored.latest_state()[1][0].tolist()) == (7, [1, 1, 1], [0, 0])
        restored.delete()


def test_it_does_not_go_back(cli, cli_json, client, save, tmp_path):
    old, new, other = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "other"))
    for path, step in ((old, 3), (new, 9)):
        save(path, step, {"w": np.full(2, step)}, {"m": np.full(1, step)})
    save(other, 9, {"w": np.full(2, 10)})
    assert cli_json("restore", "w", old) == {"before": None, "step": 3}
    assert cli_json("restore", "w", new) == {"before": 3, "step": 9}
    # The same again changes nothing.
    assert cli_json("restore", "w", new) == {"before": 9, "step": 9}
    found = cli("restore", "w", old)
    assert (found.exit_code, found.stdout) == (1, "")
    said = " ".join(found.stderr.split())
    assert "step 9 is published, which is later than step 3" in said
    assert "To go back, give --force, which deletes the run first" in said
    found = cli("restore", "w", other)
    assert (found.exit_code, "is published already" in found.stderr.replace("\n", " ")) == (1, True)
    assert cli_json("restore", "w", old, "--force") == {"before": 9, "step": 3}
    with redisacc.Parameters("w", redis=client) as parameters:
        step, tree = parameters.latest()
        assert (step, tree["w"].tolist(), parameters.latest_state()[1]["m"].tolist()) == (3, [3, 3], [3])
        parameters.delete()


def test_a_chief_runs(cli, client, save, tmp_path):
    path = tmp_path / "w.safetensors"
    save(path, 3, {"w": np.ones(2)})
    with redisacc.Chief("w", {"w": np.zeros(2)}, workers=1, redis=client) as chief:
        for options in ((), ("--force",)):
            found = cli("restore", "w", path, *options)
            assert (found.exit_code, "is the chief of w: stop it first" in " ".join(found.stderr.split())) == (1, True)
        assert chief.step == 0
    assert cli("restore", "w", path).exit_code == 0
    # No lease is left, so a chief begins at once.
    with redisacc.Chief("w", {"w": np.zeros(2)}, workers=1, redis=client) as chief:
        assert (chief.step, chief.parameters["w"].tolist()) == (3, [1, 1])
        chief.delete()


def test_what_cannot_be_done(cli, tmp_path):
    found = cli("checkpoint", "w", tmp_path / "w")
    assert found.exit_code == 3
    assert "nothing has been published under the name w" in " ".join(found.stderr.split())
    (tmp_path / "w").write_text("no checkpoint")
    found = cli("restore", "w", tmp_path / "w")
    assert (found.exit_code, "is damaged, or no file of safetensors" in " ".join(found.stderr.split())) == (1, True)
    assert cli("restore", "w", tmp_path / "missing").exit_code == 1
    assert cli("checkpoint", "w", "").exit_code == 2


def test_a_pipe_is_not_replaced(cli, client, weights, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    weights.publish({"w": np.ones(3)}, 7)
    found = cli("checkpoint", "w", path)
    assert (found.exit_code, "is no regular file" in " ".join(found.stderr.split()), path.is_fifo()) == (1, True, True)
