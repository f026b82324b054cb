"""Runs each example that trains a model, and kills two of its processes in the middle."""

import importlib.util
import re
import sys

import pytest
from running import Programs, kill_one_of, output_of, until_step

from redisacc.embedded import Server

# Name → what it imports, its workers, the options of the run, the step before the second kill, and whom that hits.
# The digits and the embeddings compare their weights with those of a training in one process.
EXAMPLES = {
    "federated": (["sklearn"], 8, ["--chief"], 20, "chief"),
    "jax_mlp": (["jax", "sklearn"], 2, [], 60, "worker"),
    "digits": (["sklearn"], 2, [], 60, "worker"),
    "torch_embeddings": (["torch"], 2, [], 60, "worker"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "example", [name for name, (needed, *_) in EXAMPLES.items() if all(map(importlib.util.find_spec, needed))]
)
def test_an_example_outlives_its_processes(example, tmp_path):
    _, workers, options, step, victim = EXAMPLES[example]
    picture, of = tmp_path / "digits.png", example.replace("_", "-")
    arguments = ["--plot", str(picture)] if example == "digits" else []
    with Server() as server, Programs(server.url) as programs:
        run = programs.run(workers, f"{example}.py", *options, arguments=arguments)
        if sys.platform == "linux":
            until_step(5, of, server.url, run)
            kill_one_of(run, "worker")
            until_step(step, of, server.url, run)
            kill_one_of(run, victim)
        printed = output_of(run, 250)
    if sys.platform == "linux":
        assert printed.count("was killed by SIGKILL; it restarts") == 2
    assert float(re.findall(r"accuracy ([\d.]+)", printed)[-1]) > 0.9
    assert ("; of worker" in printed) >= (example == "federated")
    assert not arguments or picture.read_bytes().startswith(b"\x89PNG")
