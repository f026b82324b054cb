"""A process of the version that is first on its path: it applies, takes, trains, or runs a command.

Usage: python versions_member.py OPERATION ARGUMENT…   with the server in REDISACC_URL.
"""

import json
import runpy
import sys

import numpy as np

import redisacc

# One of each way in which gradients are stored: in place, inline, and in parts.
SIZES = {"in-place": 4, "inline": 4_000, "parts": 200_000}
# Whether this version sends gradients leaf by leaf.
STREAMS = hasattr(redisacc.Training, "begin")


def accumulators():
    """Opens one accumulator of each kind and way of storing."""
    opened = {
        name: redisacc.ConditionalAccumulator(np.float32, shape=[size], shared_name=name)
        for name, size in SIZES.items()
    }
    opened["sparse"] = redisacc.SparseConditionalAccumulator(np.float32, shape=[50, 2], shared_name="sparse")
    begin = {"w": np.zeros(200_000, np.float32), "b": np.zeros(3, np.float32)}
    opened["tree"] = redisacc.TreeAccumulator.like(begin, shared_name="tree")
    return opened


def gradient(name, number):
    """Returns a gradient whose elements are this number."""
    if name == "sparse":
        return redisacc.IndexedSlices(np.full((2, 2), number, np.float32), np.array([3, 40]))
    if name == "tree":
        return {"w": np.full(200_000, number, np.float32), "b": np.full(3, number, np.float32)}
    return np.full(SIZES[name], number, np.float32)


def apply(number, step):
    """Applies this number to each accumulator."""
    for name, accumulator in accumulators().items():
        send = accumulator.apply_indexed_slices_grad if name == "sparse" else accumulator.apply_grad
        assert send(gradient(name, float(number)), local_step=int(step)), name


def take(required, expected):
    """Takes a round of each accumulator, and checks that all elements of the mean are as expected."""
    for name, accumulator in accumulators().items():
        taken = accumulator.take_grad(int(required), timeout=60)
        arrays = list(taken.values()) if name == "tree" else [taken[1] if name == "sparse" else taken]
        for array in arrays:
            assert (np.asarray(array) == np.float32(expected)).all(), name


def delete():
    """Deletes all accumulators."""
    for accumulator in accumulators().values():
        accumulator.delete()


def train(name, number, total):
    """Is a worker of a training. Prints each step that it begins, and in the end the parameters."""
    begin = {"w": np.zeros(140_000, np.float32), "b": np.zeros(3, np.float32)}
    optimizer = redisacc.optim.Adam(0.05)
    with redisacc.Training(name, begin, optimizer=optimizer, workers=2, number=int(number)) as training:
        for step, parameters in training.steps(until=int(total)):
            print(json.dumps({"step": step}), flush=True)
            noise = np.random.default_rng([step, training.number]).normal(size=140_000).astype(np.float32)
            result = {"w": parameters["w"] + noise, "b": parameters["b"] - np.float32(training.number)}
            if STREAMS:
                with training.begin() as upload:
                    for path, leaf in result.items():
                        upload.put(path, leaf)
                    upload.commit(metrics={"loss": 1.0})
            else:
                training.apply(result, metrics={"loss": 1.0})
        step, parameters = training.latest()
        print(json.dumps({"step": step, "end": [parameters["w"].tobytes().hex()[:4000], parameters["b"].tolist()]}))


def command(*arguments):
    """Runs the command `redisacc`."""
    sys.argv = ["redisacc", *arguments]
    runpy.run_module("redisacc", run_name="__main__")


if __name__ == "__main__":
    # The version, for the test to check.
    print(json.dumps({"file": redisacc.__file__, "version": redisacc.__version__}), flush=True)
    {"apply": apply, "take": take, "delete": delete, "train": train, "command": command}[sys.argv[1]](*sys.argv[2:])
