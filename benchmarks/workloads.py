"""Makes the gradients that are applied, and computes the expected results with numpy.

The peers read the arrays from files, because numpy versions differ between environments, and so may their random
numbers. Every element is a small multiple of 1/64, so sums are exact in float32 in any order, and a gradient that was
lost, counted twice or mixed with another round's is noticed.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Rounds alternate between two sets of arrays. With one set, leftovers of an earlier round would go unnoticed.
VARIANTS = 2

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Workload:
    """One accumulator and its gradients, which are float32 and reduced to their MEAN.

    Attributes:
        name: name of the workload and of the accumulator.
        kind: "dense" or "sparse".
        shape: shape of the accumulator; if sparse, ``(number of rows, elements of a row)``.
        rows: number of rows of a sparse gradient.
        indices: indices of sparse gradients: "random" (drawn for each gradient), "identical" or "disjoint".
        in_place_limit: limit given to redisacc; None: the library's default.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: int = 0
    indices: str = "random"
    in_place_limit: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements of one gradient."""
        return self.rows * self.shape[1] if self.kind == "sparse" else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes of one gradient: its values, and its int64 indices."""
        return self.elements * 4 + self.rows * 8

    def to_json(self) -> dict[str, Any]:
        """Returns the workload as the peers get it."""
        return asdict(self)

    def _random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng([zlib.crc32(self.name.encode()), *what])

    def gradient(self, worker: int, variant: int) -> tuple[Array | None, Array]:
        """Returns indices (None if dense) and values of a worker's gradient."""
        random = self._random(1, worker, variant)
        if self.kind == "dense":
            return None, _values(random, self.shape)
        size = self.shape[0]
        if self.indices == "identical":
            chosen = self._random(2, variant).choice(size, self.rows, replace=False)
        elif self.indices == "disjoint":
            if (worker + 1) * self.rows > size:
                raise ValueError(
                    f"{self.name}: {size} rows are too few for {self.rows} disjoint rows of worker {worker}"
                )
            shuffled = self._random(3, variant).permutation(size)
            chosen = shuffled[worker * self.rows : (worker + 1) * self.rows]
        else:
            chosen = random.choice(size, self.rows, replace=False)
        return np.sort(chosen).astype(np.int64), _values(random, (self.rows, self.shape[1]))

    def expected(self, gradients: list[tuple[Array | None, Array]]) -> tuple[Array, Array, Array]:
        """Returns indices (empty if dense), mean, and the number of gradients that held each index, all by numpy."""
        if self.kind == "dense":
            total = np.sum([values for _, values in gradients], axis=0, dtype=np.float64)
            return np.empty(0, np.int64), (total / len(gradients)).astype(np.float32), np.array([len(gradients)])
        # As simple as possible on purpose, because everything else is checked against it.
        total = np.zeros(self.shape, np.float64)
        counts = np.zeros(self.shape[0], np.int64)
        for indices, values in gradients:
            assert indices is not None
            total[indices] += values
            counts[indices] += 1
        held = np.flatnonzero(counts)
        return held, (total[held] / counts[held, np.newaxis]).astype(np.float32), counts[held]


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (random.integers(-1024, 1024, shape, dtype=np.int16) / np.float32(64)).astype(np.float32)


def write(directory: Path, workloads: list[Workload], crews: list[int]) -> None:
    """Writes the gradients of all workers, and the expected result for each size of crew."""
    for workload in workloads:
        folder = directory / workload.name
        folder.mkdir(parents=True)
        for variant in range(VARIANTS):
            gradients = [workload.gradient(worker, variant) for worker in range(max(crews))]
            for worker, (indices, values) in enumerate(gradients):
                np.save(folder / f"values-{worker}-{variant}.npy", values)
                if indices is not None:
                    np.save(folder / f"indices-{worker}-{variant}.npy", indices)
            for crew in crews:
                held, mean, counts = workload.expected(gradients[:crew])
                np.savez(folder / f"expected-{crew}-{variant}.npz", indices=held, mean=mean, counts=counts)


# The rows of the first table of benchmarks/results. Each has two ratios to TensorFlow, for a server that writes nothing
# to disk: the goal, which the project aims for, and the bar, which is the least that it sets itself. Where the goal is
# None, it is what bare sockets reach.
SIX_ROWS: dict[Workload, tuple[float | None, float]] = {
    Workload("sparse-10x16-of-1000", "sparse", (1000, 16), 10): (5.0, 4.5),
    Workload("sparse-100x64-of-10000", "sparse", (10_000, 64), 100): (5.0, 3.5),
    Workload("sparse-1000x64-of-10000", "sparse", (10_000, 64), 1000): (3.5, 3.0),
    Workload("sparse-10000x64-of-100000", "sparse", (100_000, 64), 10_000): (2.2, 1.9),
    Workload("dense-4MB", "dense", (1000, 1000)): (None, 1.3),
    Workload("dense-32MB", "dense", (4000, 2000)): (None, 1.2),
}

# The bars of the same rows for the embedded server with its default settings.
EMBEDDED_BARS = {
    "sparse-10x16-of-1000": 2.5,
    "sparse-100x64-of-10000": 2.5,
    "sparse-1000x64-of-10000": 2.0,
    "sparse-10000x64-of-100000": 1.3,
    "dense-4MB": 1.0,
    "dense-32MB": 0.9,
}

# The same for bfloat16 on the wire: the bars for a server that writes nothing to disk, and for the embedded one.
BFLOAT16_BARS = {
    "dense-4MB": {"redisacc-memory": 1.8, "redisacc": 1.5},
    "dense-32MB": {"redisacc-memory": 1.6, "redisacc": 1.3},
}

# The rows of a smoke test.
TINY = [Workload("tiny-sparse", "sparse", (20, 4), 3), Workload("tiny-dense", "dense", (5, 3))]
