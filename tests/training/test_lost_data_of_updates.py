"""A server that loses the data of a training with an optimizer: what continues, from what, and with which state."""

import logging

import numpy as np
import pytest

import redisacc

pytestmark = [pytest.mark.loses_data, pytest.mark.servers("valkey"), pytest.mark.usefixtures("time_runs")]

BEGIN = {
    "w": np.linspace(-1, 1, 12).astype(np.float32),
    "b": np.ones(3, np.float32),
    "table": np.linspace(-1, 1, 120).astype(np.float32).reshape(40, 3),
}
OPTIONS = {"optimizer": redisacc.optim.SGD(0.1, momentum=0.9), "reduction_type": "MEAN", "sparse": ["table"]}


def gradient(number, step, parameters):
    found = {path: np.float32(step + 1) * np.sin(leaf) for path, leaf in parameters.items()}
    rows = np.unique([step % 40, 3 * step % 40, 5])
    return {**found, "table": redisacc.IndexedSlices(found["table"][rows], rows)}


def run(training, until, **options):
    """Trains, and returns the step, the parameters and the state, as bytes."""
    chief = training.chief(BEGIN, **OPTIONS, **options)
    for _ in chief.updates(until=until):
        pass
    return found(chief)


def found(chief):
    step, tree = chief.latest()
    _, state = chief.latest_state()
    arrays = {**tree, **{f"momentum/{path}": leaf for path, leaf in state["momentum_buffer"].items()}}
    return step, int(state["updates"]), {path: leaf.tobytes() for path, leaf in arrays.items()}


@pytest.fixture
def undisturbed(training, client):
    training.work(gradient=gradient)
    expected = run(training, 12)
    training.close()
    client.flushall()
    return expected


@pytest.mark.parametrize("encoding", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_a_living_chief_restores_weights_and_state(training, client, caplog, encoding):
    training.work(gradient=gradient)
    chief = training.chief(BEGIN, **OPTIONS, encoding=encoding)
    for step in chief.updates(until=12):
        if step == 5:
            before = found(chief)
            client.flushall()
        if step == 6:
            assert found(chief)[:2] == (6, 6)
            assert before[:2] == (5, 5)
    disturbed = found(chief)
    assert any("has lost this training" in record.getMessage() for record in caplog.records)
    training.close()
    client.flushall()
    training.work(gradient=gradient)
    assert run(training, 12, encoding=encoding) == disturbed


def test_a_chief_continues_with_the_state_of_a_checkpoint(training, client, tmp_path, caplog, undisturbed):
    pytest.importorskip("safetensors")
    training.work(gradient=gradient)
    assert run(training, 6, checkpoint=tmp_path, checkpoint_every=1)[:2] == (6, 6)
    training.close()
    client.flushall()
    training.work(gradient=gradient)
    with caplog.at_level(logging.WARNING, "redisacc"):
        assert run(training, 12, checkpoint=tmp_path, checkpoint_every=1) == undisturbed
    assert any("from the checkpoint of step 6" in record.getMessage() for record in caplog.records)
    assert not any("begins with a new state" in record.getMessage() for record in caplog.records)
