"""What the dense and the sparse accumulator share: gradients of one array."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np

from redisacc._data import dtypes, validation
from redisacc._data.spec import ArraySpec
from redisacc._data.validation import Shape
from redisacc._handles.accumulator import Accumulator
from redisacc._handles.options import checked_mean

# The gradient of a round: an array, or IndexedSlices.
G = TypeVar("G")
# The form in which take_grad returns it.
Taken = TypeVar("Taken")


class ArrayAccumulator(Accumulator[G, Taken]):
    """A handle on a dense or a sparse accumulator."""

    _spec: ArraySpec

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements. For TensorFlow's quantised types, the structured dtype that TensorFlow has."""
        return self._spec.dtype.public

    @property
    def shape(self) -> Shape:
        """The declared shape: None if the rank is unknown, with None for each unknown dimension."""
        return self._spec.shape

    @property
    def _description(self) -> str:
        return f"{self._spec.dtype.name}, shape={validation.shape_text(self._spec.shape)}"


def array_spec(
    kind: Literal["dense", "sparse"],
    dtype: object,
    shape: object,
    reduction_type: object,
    mean: object,
) -> ArraySpec:
    """Returns the specification that a caller's arguments describe.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    rows = checked_mean(mean, rows="index" if kind == "sparse" else None).rows
    return ArraySpec.of(
        kind,
        dtypes.find_dtype(dtype),
        validation.shape(shape),
        reduction_type=validation.reduction_type(reduction_type),
        sparse_mean=rows or "index",
    )
