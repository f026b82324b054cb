"""Runs the example of a chief and workers on two machines, and kills each of them in the middle of the training."""

import importlib

import numpy as np
import pytest
from running import EXAMPLES, Programs, output_of, until_step

import redisacc
from redisacc.embedded import Server

NAME = "two-machines"
FOLDER = EXAMPLES / "two_machines"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("model")


def trained_alone(model):
    """The parameters after training in this process, on both workers' shares."""
    parameters, velocity = model.begin()
    for step in range(model.STEPS):
        first, second = (model.gradient(parameters, *model.batch(step, number)) for number in range(2))
        mean = {name: (first[name] + second[name]) / 2 for name in first}
        parameters, velocity = model.update(parameters, velocity, mean)
    return parameters


@pytest.mark.thorough
def test_training_survives_kills_and_equals_training_alone_to_the_last_bit(model):
    with Server() as server, Programs(server.url) as programs:

        def start_worker(number):
            place = {"REDISACC_WORKER_NUMBER": number, "REDISACC_RUN_ID": f"worker-{number}"}
            return programs.start("two_machines/worker.py", **place)

        # A process with the run id of its predecessor does not wait for its lease to run out.
        starts = {
            "chief": lambda: programs.start("two_machines/chief.py", REDISACC_RUN_ID="the-chief"),
            "worker 0": lambda: start_worker("0"),
            "worker 1": lambda: start_worker("1"),
        }
        processes = {who: start() for who, start in starts.items()}
        for step, who in ((50, "worker 0"), (120, "chief"), (190, "worker 1"), (260, "chief")):
            until_step(step, NAME, server.url, processes["chief"])
            processes[who].kill()
            assert processes[who].wait() == -9
            processes[who] = starts[who]()
        printed = output_of(processes["chief"])
        assert f"step {model.STEPS}: accuracy 0.99" in printed
        for number in range(2):
            output_of(processes[f"worker {number}"])
        with redisacc.Parameters(NAME, redis=server.url) as parameters:
            latest = parameters.latest()
            assert latest is not None
            step, trained = latest
    alone = trained_alone(model)
    assert step == model.STEPS
    assert sorted(trained) == sorted(alone)
    for name in alone:
        np.testing.assert_array_equal(trained[name], alone[name], name)


@pytest.mark.parametrize(("program", "lines"), [("chief.py", 15), ("worker.py", 10)])
def test_programs_are_as_short_as_they_are_said_to_be(program, lines):
    assert len((FOLDER / program).read_text().splitlines()) <= lines
