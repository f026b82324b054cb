"""What the dense and the sparse accumulator share: gradients of one array."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np

from redisacc._data import dtypes, validation
from redisacc._data.spec import ArraySpec
from redisacc._data.validation import Shape
from redisacc._handles.base import ConditionalAccumulatorBase

# The result of a take: an array, or IndexedSlices.
G = TypeVar("G")


class ArrayAccumulatorBase(ConditionalAccumulatorBase[G]):
    """A handle on a dense or a sparse accumulator.

    Args:
        dtype: the element type: float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, complex64,
            complex128, qint8, quint8, qint16, quint16 or qint32; as a name, a numpy dtype, or TensorFlow's.
        shape: the declared shape; see the two kinds.
        shared_name: see ``ConditionalAccumulatorBase``, as for the arguments that are not listed here.
        name: labels log records.
        reduction_type: "MEAN" (or None) or "SUM".
        sparse_mean: see ``SparseConditionalAccumulator``.
        options: the other arguments of ``ConditionalAccumulatorBase``.
    """

    _kind: Literal["dense", "sparse"]
    _spec: ArraySpec

    def __init__(
        self,
        dtype: object,
        shape: object,
        shared_name: str | None,
        name: str,
        *,
        reduction_type: str | None,
        sparse_mean: object = "index",
        **options: Any,
    ) -> None:
        spec = ArraySpec.of(
            self._kind,
            dtypes.find_dtype(dtype),
            validation.shape(shape),
            reduction_type=validation.reduction_type(reduction_type),
            sparse_mean=validation.sparse_mean(sparse_mean),
        )
        super().__init__(spec, shared_name, name, **options)

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
