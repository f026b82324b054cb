"""Gradients as named arrays, which is how files hold them.

A dense gradient is the array ``gradient``. A sparse one is ``indices``, ``values`` and ``shape``. Of a tree, a dense
leaf is the array of its path, and a sparse leaf is three arrays: ``PATH/indices``, ``PATH/values`` and ``PATH/shape``.
A leaf without a gradient is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any

import click
import numpy as np

from redisacc._data.results import ApplyResult
from redisacc._data.spec import described_by
from redisacc._data.validation import Array
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.dense import ConditionalAccumulator
from redisacc._handles.sparse import SparseConditionalAccumulator
from redisacc._handles.tree import TreeAccumulator
from redisacc._text import shown
from redisacc.cli.shared.failures import USAGE, fail

_PIECES = ("indices", "values", "shape")


class GradientArrays(ABC):
    """Converts gradients of one accumulator to arrays with names, and applies such arrays.

    Attributes:
        names: the names that the arrays of a gradient may have.
        single: the name of the only array; None if a gradient consists of several.
        description: the form of a gradient, for messages.
    """

    names: Container[str]
    single: str | None = None
    description: str

    @abstractmethod
    def pack(self, gradient: Any) -> dict[str, Array]:
        """Returns the arrays of a gradient from a take, by name."""

    @abstractmethod
    def apply(self, arrays: dict[str, Array], file: str, local_step: int, **options: Any) -> ApplyResult:
        """Applies a gradient, given the arrays of a file.

        Args:
            arrays: the arrays by name.
            file: the name of the file, for messages.
            local_step: the step that the gradient was computed for.
            options: further arguments of ``apply_grad``: ``weight``, ``metrics``, ``once_per_worker`` and ``encoding``.

        Raises:
            Failure: the arrays are incomplete.
        """


def arrays_of(accumulator: ConditionalAccumulatorBase[Any]) -> GradientArrays:
    """Returns what converts the gradients of an accumulator.

    Raises:
        click.UsageError: no file can hold its gradients.
    """
    if isinstance(accumulator, TreeAccumulator):
        return _TreeArrays(accumulator)
    if isinstance(accumulator, SparseConditionalAccumulator):
        return _SparseArrays(accumulator)
    assert isinstance(accumulator, ConditionalAccumulator)
    return _DenseArrays(accumulator)


class _DenseArrays(GradientArrays):
    names = ("gradient",)
    single = "gradient"
    description = "a dense gradient"

    def __init__(self, accumulator: ConditionalAccumulator) -> None:
        self._accumulator = accumulator

    def pack(self, gradient: Any) -> dict[str, Array]:
        return {"gradient": gradient}

    def apply(self, arrays: dict[str, Array], file: str, local_step: int, **options: Any) -> ApplyResult:
        if not arrays:
            fail(f"{file} must hold gradient; it holds nothing", USAGE)
        return self._accumulator.apply_grad(arrays["gradient"], local_step, **options)


class _SparseArrays(GradientArrays):
    names = _PIECES
    description = "a sparse gradient, which is three arrays"

    def __init__(self, accumulator: SparseConditionalAccumulator) -> None:
        self._accumulator = accumulator

    def pack(self, gradient: Any) -> dict[str, Array]:
        return _rows(gradient)

    def apply(self, arrays: dict[str, Array], file: str, local_step: int, **options: Any) -> ApplyResult:
        if not {"indices", "values"} <= arrays.keys():
            fail(f"{file} must hold indices, values and may hold shape; it holds "
                 f"{', '.join(sorted(arrays)) or 'nothing'}", USAGE)  # fmt: skip
        shape = arrays.get("shape")
        # `take` writes -1 for an unknown dimension 0, and such a shape cannot be checked.
        whole = None if shape is None or (shape.size and shape.flat[0] == -1) else shape
        return self._accumulator.apply_grad(arrays["indices"], arrays["values"], whole, local_step, **options)


class _TreeArrays(GradientArrays):
    description = "a tree, which is several arrays"

    def __init__(self, accumulator: TreeAccumulator) -> None:
        self._accumulator = accumulator
        self._structure, described = described_by(accumulator.spec)
        self._leaves = [(path, leaf[0]) for path, leaf in zip(self._structure.paths, described, strict=True)]
        owners: dict[str, str] = {}
        for path, is_sparse in self._leaves:
            for name in [f"{path}/{piece}" for piece in _PIECES] if is_sparse else [path]:
                # numpy.load cannot tell the array "a.npy" from the file of the array "a".
                for taken in (name, f"{name}.npy", name.removesuffix(".npy")):
                    if taken in owners:
                        raise click.UsageError(
                            f"a file cannot hold this tree, because the names of the arrays of its leaves "
                            f"{shown(owners[taken])} and {shown(path)} would be confused; use Python instead"
                        )
                owners[name] = path
        self.names = owners.keys()

    def pack(self, gradient: Any) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        leaves = self._structure.leaves_of(gradient, "the gradient")
        for (path, is_sparse), leaf in zip(self._leaves, leaves, strict=True):
            if leaf is not None and is_sparse:
                arrays.update((f"{path}/{piece}", array) for piece, array in _rows(leaf).items())
            elif leaf is not None:
                arrays[path] = leaf
        return arrays

    def apply(self, arrays: dict[str, Array], file: str, local_step: int, **options: Any) -> ApplyResult:
        leaves: list[Any] = []
        for path, is_sparse in self._leaves:
            if not is_sparse:
                leaves.append(arrays.get(path))
                continue
            indices, values, shape = (arrays.get(f"{path}/{piece}") for piece in _PIECES)
            if (indices is None) != (values is None) or (indices is None and shape is not None):
                fail(f"{file} must hold both the indices and the values of the sparse leaf {shown(path)}, or nothing "
                     "of it", USAGE)  # fmt: skip
            leaves.append(None if indices is None else (indices, values, shape))
        gradient = self._structure.build(leaves)
        return self._accumulator.apply_grad(gradient, local_step, **options)


def _rows(gradient: Any) -> dict[str, Array]:
    """Returns the arrays of ``IndexedSlices``."""
    pieces = (gradient.indices, gradient.values, gradient.dense_shape)
    return {piece: np.asarray(array) for piece, array in zip(_PIECES, pieces, strict=True)}
