"""The base of every peer of the step benchmark: it loads a model, and checks the weights after each job.

A job is a number of steps. Only their total time counts. A check would take the processor from processes that
are not done, so the weights are compared when the next job is prepared.
"""

import json
from pathlib import Path

import common
import numpy as np


class StepActor(common.Actor):
    """A worker or the chief of a training of one model."""

    def __init__(self, settings):
        super().__init__(settings)
        self.folder = Path(settings["arrays"]) / settings["model"]
        self.model = json.loads((self.folder / "model.json").read_text())
        self.leaves = self.model["leaves"]
        self.dense = [leaf["name"] for leaf in self.leaves if not leaf["rows"]]
        self.sparse = [leaf["name"] for leaf in self.leaves if leaf["rows"]]
        self.rate = self.model["learning_rate"]
        self.initial = self.load("weights")
        self._means = [self.load(f"mean-{variant}") for variant in range(2)]
        # The step of the weights that this process has.
        self.step = 0

    def load(self, name):
        """Returns the arrays of a file by name."""
        with np.load(self.folder / f"{name}.npz") as file:
            return {key: file[key] for key in file.files}

    def gradient(self, variant):
        """Returns this worker's gradient: the values of each leaf, or a pair of indices and values."""
        arrays = self.load(f"gradient-{self.settings['number']}-{variant}")
        return {
            leaf["name"]: (arrays[f"{leaf['name']} indices"], arrays[leaf["name"]])
            if leaf["rows"]
            else arrays[leaf["name"]]
            for leaf in self.leaves
        }

    def expected(self, name):
        """Returns a leaf of the weights of the current step."""
        total = self.initial[name].astype(np.float64)
        for variant, mean in enumerate(self._means):
            total -= self.rate * ((self.step + 1 - variant) // 2) * mean[name].astype(np.float64)
        return total.astype(np.float32)

    def weights(self):
        """Returns the weights that this process has: each leaf, or a pair of indices and their rows."""
        raise NotImplementedError

    def ready(self, job):
        """Prepares a job, and checks the weights after the one before."""
        super().ready(job)
        if not self.step:
            return
        for name, found in self.weights().items():
            wanted = self.expected(name)
            values = found
            if isinstance(found, tuple):
                indices, values = found
                wanted = wanted[indices]
            common.compare(
                {"step": self.step, "leaf": name}, (None, values), (None, wanted), self.settings.get("tolerance", 0)
            )


class FlatActor(StepActor):
    """An actor that has all dense arrays in one piece of memory, ``own``."""

    def __init__(self, settings):
        super().__init__(settings)
        self.own = self.packed(self.initial)

    def packed(self, arrays):
        """Returns the dense arrays in one piece."""
        return np.concatenate([arrays[name].ravel() for name in self.dense])

    def weights(self):
        """Returns the dense weights that this process has."""
        found, start = {}, 0
        for name in self.dense:
            stop = start + self.initial[name].size
            found[name] = self.own[start:stop].reshape(self.initial[name].shape)
            start = stop
        return found

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"numpy": np.__version__}
