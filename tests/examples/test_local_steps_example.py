"""Runs the example of local steps, kills a worker in the middle, and compares the loss and the traffic with a training
that sends every gradient."""

import importlib
import math
import re
import sys
from pathlib import Path

import pytest
from running import EXAMPLES, Programs, kill_one_of, output_of, until_step

import redisacc
from redisacc.embedded import Server

TESTS = Path(__file__).parents[1]


def printed_by(text):
    """Returns the loss that a program printed, and its kilobytes for each step."""
    found = re.search(r"test loss ([\d.]+), accuracy [\d.]+; ([\d.]+) kB", text)
    assert found is not None, text
    return float(found[1]), float(found[2])


def compute_loss_of_every_step(example):
    """Returns the loss of the training that sends every gradient, made in this process, bit by bit the same."""
    from support.local_updates import LocalTraining

    x, test_x, y, test_y = example.images()
    batches = redisacc.data.Batches(len(x), example.BATCH)

    def tree(flat):
        return {layer: {"w": flat[f"{layer}/w"], "b": flat[f"{layer}/b"]} for layer in ("hidden", "out")}

    def gradient(number, step, flat):
        mine = batches.indices(step, number, 2)
        found = example.gradient_of(number, step, tree(flat), x[mine], y[mine])[1]
        return {path: found[path.split("/")[0]][path.split("/")[1]] for path in flat}

    start = {f"{layer}/{name}": values for layer, of in example.begin().items() for name, values in of.items()}
    trained = LocalTraining(example.INNER, start, weights=(1.0, 1.0), gradient=gradient).train(example.STEPS)
    return float(example.loss_and_gradient(tree(trained.parameters), test_x, test_y)[0])


@pytest.mark.timeout(600)
def test_local_steps():
    with Server() as server, Programs(server.url) as programs:
        run = programs.run(2, "local_steps.py")
        if sys.platform == "linux":
            # Version 2 is step 1000.
            until_step(2, "local-steps", server.url, run)
            kill_one_of(run, "worker")
        printed = output_of(run, 250)
        if sys.platform == "linux":
            assert printed.count("was killed by SIGKILL; it restarts") == 1
        loss, kb = printed_by(printed)
        # In a process of its own, which has one thread for a matrix, as those of the example.
        loss_of_every_step = float(output_of(programs.start(__file__, PYTHONPATH=str(TESTS)), 250))
    with Server() as server, Programs(server.url) as programs:
        _, kb_of_every_step = printed_by(
            output_of(programs.run(2, "local_steps.py", arguments=["--every-step", "--steps", "40"]), 100)
        )
    # Besides gradients and weights, there are leases to renew, and a beginning of some hundred kilobytes.
    assert kb_of_every_step / kb > 0.75 * 500
    # The paper compares perplexities. Without a kill, this one is 0.2% lower.
    assert math.exp(loss - loss_of_every_step) < 1.02


if __name__ == "__main__":
    # At the end: one of the examples has the name of a module of Python.
    sys.path.append(str(EXAMPLES))
    print(compute_loss_of_every_step(importlib.import_module("local_steps")))
