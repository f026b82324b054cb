"""Makes the weights and gradients of a model of many arrays, for the benchmark of a training step.

As in ``workloads``, every element is a small multiple of a power of 2, and so is the learning rate. A step's mean is
divided by the number of workers, a power of 2. Weights are then exact in float32, in whatever order they are added.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import VARIANTS, Array

LEARNING_RATE = 2.0**-6


@dataclass(frozen=True)
class Leaf:
    """One array of a model. All are float32.

    Attributes:
        name: its name.
        shape: its shape.
        rows: how many of its rows a gradient holds; 0: the gradient is dense.
    """

    name: str
    shape: tuple[int, ...]
    rows: int = 0

    @property
    def gradient_bytes(self) -> int:
        """Number of bytes of its gradient: its values, and their int64 indices if it is sparse."""
        return self.rows * (4 * self.shape[1] + 8) if self.rows else 4 * math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: its name in the report, and of its parameters and gradients on the server.
        leaves: its arrays.
    """

    name: str
    leaves: tuple[Leaf, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes of one gradient."""
        return sum(leaf.gradient_bytes for leaf in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """Returns the model as the peers get it."""
        leaves = [{"name": leaf.name, "shape": leaf.shape, "rows": leaf.rows} for leaf in self.leaves]
        return {"name": self.name, "leaves": leaves, "learning_rate": LEARNING_RATE}

    def _random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng([zlib.crc32(self.name.encode()), *what])

    def weights(self) -> dict[str, Array]:
        """Returns the weights that a training begins with."""
        random = self._random(0)
        return {leaf.name: _values(random, leaf.shape) for leaf in self.leaves}

    def gradient(self, worker: int, variant: int) -> dict[str, Array]:
        """Returns a worker's gradient: the values of each leaf, and for a sparse one also "NAME indices"."""
        random = self._random(1, worker, variant)
        arrays = {}
        for leaf in self.leaves:
            if leaf.rows:
                chosen = random.choice(leaf.shape[0], leaf.rows, replace=False)
                arrays[f"{leaf.name} indices"] = np.sort(chosen).astype(np.int64)
            arrays[leaf.name] = _values(random, (leaf.rows, *leaf.shape[1:]) if leaf.rows else leaf.shape)
        return arrays

    def mean(self, gradients: list[dict[str, Array]]) -> dict[str, Array]:
        """Returns the mean of gradients as dense arrays: a row counts as zero in a gradient that does not hold it."""
        means = {}
        for leaf in self.leaves:
            # As simple as possible on purpose, because everything else is checked against it.
            total = np.zeros(leaf.shape, np.float64)
            for gradient in gradients:
                if leaf.rows:
                    total[gradient[f"{leaf.name} indices"]] += gradient[leaf.name]
                else:
                    total += gradient[leaf.name]
            means[leaf.name] = (total / len(gradients)).astype(np.float32)
        return means


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (random.integers(-64, 64, shape, dtype=np.int16) / np.float32(16)).astype(np.float32)


def write(directory: Path, models: list[Model], workers: int) -> None:
    """Writes the models, their weights, the gradients of all workers, and the mean of each variant."""
    for model in models:
        folder = directory / model.name
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(model.to_json()))
        np.savez(folder / "weights.npz", **model.weights())
        for variant in range(VARIANTS):
            gradients = [model.gradient(worker, variant) for worker in range(workers)]
            for worker, gradient in enumerate(gradients):
                np.savez(folder / f"gradient-{worker}-{variant}.npz", **gradient)
            np.savez(folder / f"mean-{variant}.npz", **model.mean(gradients))


def mixed() -> Model:
    """Returns 100 arrays, as a model has them: matrices, vectors, and two tables. A step touches some rows of these."""
    leaves = [Leaf(f"matrix{number:02}", (128, 128)) for number in range(40)]
    leaves += [Leaf(f"vector{number:02}", (128,)) for number in range(40)]
    leaves += [Leaf(f"narrow{number:02}", (256, 64)) for number in range(18)]
    leaves += [Leaf(f"table{number}", (20_000, 32), 500) for number in range(2)]
    return Model("100-arrays", tuple(leaves))


def dense(name: str, widen: int = 1) -> Model:
    """Returns 100 arrays without tables, of about 4 MB; each has ``widen`` times as many columns."""
    leaves = [Leaf(f"matrix{number:02}", (128, 128 * widen)) for number in range(40)]
    leaves += [Leaf(f"vector{number:02}", (128 * widen,)) for number in range(40)]
    leaves += [Leaf(f"narrow{number:02}", (256, 64 * widen)) for number in range(20)]
    return Model(name, tuple(leaves))


def even(number: int, elements: int) -> Model:
    """Returns a number of equal vectors of about as many elements in total."""
    return Model(f"even-{number}", tuple(Leaf(f"a{leaf:04}", (elements // number,)) for leaf in range(number)))


def tiny() -> Model:
    """Returns a model for a smoke test."""
    return Model("tiny-model", (Leaf("w", (3, 2)), Leaf("b", (2,)), Leaf("table", (9, 2), 3)))
