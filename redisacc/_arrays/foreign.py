"""Arrays of other libraries: PyTorch, JAX, TensorFlow and scipy.sparse.

None of these libraries is imported: a program that has one of their arrays has imported it. An array is recognized by
the names of its classes, or by the attributes that its protocol asks for. Numbers that are in host memory are not
copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from redisacc._arrays.elements import Rows, rows_of_elements
from redisacc._interrupts import interrupt_in
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


class _Sparse(NamedTuple):
    """How a sparse array of another library is read.

    Attributes:
        rows: returns its rows, given the array and its name in errors; None means it is dense.
        densify: how to make it dense, for messages.
    """

    rows: Callable[[Any, str], Rows | None]
    densify: str


_SYMBOL = (
    "has no values inside of a function that is being traced or transformed (jit, vmap, tf.function): apply what the "
    "function returns"
)
_META = "is on torch's meta device and has no values: create it on another device"
_NESTED = "is nested: call to_padded_tensor() first"
_RAGGED = "is ragged: call to_tensor() first"
_MASKED = "is masked, and its mask would be lost: call to_tensor() first, with a number for what is masked"
_QUANTISED = "is quantised, and its scale would be lost: pass its dequantize(), or its int_repr() if the scale is known"
_DISTRIBUTED = (
    "is spread over several processes: pass its full_tensor(), or its to_local() to an accumulator of that shard"
)

# What numpy reads without our help. A named tuple may be a sparse gradient: TensorFlow 1 returns them.
_PLAIN = frozenset((np.ndarray, list, tuple, bool, int, float, complex, str, bytes))

# The attributes of IndexedSlices, the rarest first: the values of a pandas table, for one, are made when asked for.
_SLICES = ("dense_shape", "indices", "values")


def host_array(value: object, what: str) -> object:
    """Returns an array of another library as something that numpy reads, and every other value as it is.

    A dense torch tensor becomes a numpy array, which shares its memory if the tensor is in host memory and is neither
    conjugated nor negated lazily. Tensors of other devices are copied to host memory. A tensor that requires gradients
    is detached. bfloat16 and the 8-bit floating-point types become the dtypes of ml_dtypes. A variable of TensorFlow
    becomes the tensor it holds.

    Args:
        value: anything.
        what: the argument's name in errors.

    Raises:
        InvalidArgumentError: the array is sparse or ragged, has no values here (a tracer, a symbolic tensor, the meta
            device), is quantised, or its library cannot hand its numbers to numpy.
    """
    if type(value) in _PLAIN or isinstance(value, (np.ndarray, np.generic)):
        return value
    form = _form(value)
    if form is None:
        return value
    if isinstance(form, str):
        raise _refusal(value, what, form)
    array: Any = value
    if form is _TORCH and not _is_sparse_tensor(array):
        return _torch_array(array, what)
    if form is _VARIABLE:
        with _reading(array, what):
            held = array.read_value()
        return host_array(held, what)
    raise InvalidArgumentError(
        f"{what} must be dense, not a sparse {type(value).__name__}: make it dense with {form.densify}, or apply it "
        "to a SparseConditionalAccumulator with apply_indexed_slices_grad()"
    )


def rows_of(value: object, what: str) -> Rows | None:
    """Returns the rows of a sparse array of any library, or None if the value is no sparse array.

    ======================================================  ===========================================================
    sparse array                                            rows
    ======================================================  ===========================================================
    has ``.indices``, ``.values`` and ``.dense_shape``      what these attributes hold
    torch COO with one sparse dimension; BCOO likewise      the entries, as they are: unsorted, repeated
    any other of torch, JAX (BCOO, BCSR), scipy.sparse,     those that have an entry, each made dense
    TensorFlow's SparseTensor
    ======================================================  ===========================================================

    The rows are not checked: indices may be out of range, for example. Entries of a BCOO whose coordinates are beyond
    the shape are left out, because JAX pads with them.

    Args:
        value: anything.
        what: the argument's name in errors.

    Raises:
        InvalidArgumentError: the sparse array cannot be read, or not as rows.
    """
    form = _form(value)
    return form.rows(value, what) if isinstance(form, _Sparse) else None


def is_rows(value: object) -> bool:
    """Returns whether ``rows_of`` may make rows of a value: whether it is a sparse array of any library."""
    if type(value) in _PLAIN:
        return False
    form = _form(value)
    # One class of torch has dense and sparse tensors.
    return _is_sparse_tensor(value) if form is _TORCH else isinstance(form, _Sparse) and form is not _VARIABLE


def _form(value: object) -> _Sparse | str | None:
    """Returns how a value is read, why it cannot be, or None if numpy knows better."""
    for base in type(value).__mro__:
        if base.__name__ in _NAMES:
            form = _CLASSES.get((str(base.__module__).partition(".")[0], base.__name__))
            if form is not None:
                return form
    try:
        if all(hasattr(value, attribute) for attribute in _SLICES):
            return _WITH_SLICES
        if callable(getattr(value, "tocoo", None)):
            return _COO
    except Exception as error:  # somebody else's attributes may raise anything
        if interrupt_in(error) is not None:
            raise
        # Whoever reads one that a class declares raises this again, and says what happened.
        declared = all(hasattr(type(value), attribute) for attribute in _SLICES)
        return _WITH_SLICES if declared else None
    return None


def _is_sparse_tensor(tensor: Any) -> bool:
    layout = tensor.layout
    return layout is not sys.modules["torch"].strided and "sparse" in str(layout)


def _torch_array(tensor: Any, what: str) -> npt.NDArray[Any]:
    """Returns a dense torch tensor in numpy."""
    if tensor.is_meta:
        raise _refusal(tensor, what, _META)
    if tensor.is_nested:
        raise _refusal(tensor, what, _NESTED)
    if tensor.is_quantized:
        raise _refusal(tensor, what, _QUANTISED)
    if _is_torch_symbol(tensor):
        raise _refusal(tensor, what, _SYMBOL)
    as_bits = _torch_bits().get(tensor.dtype)
    with _reading(tensor, what):
        # force: detached, in host memory, and without pending conjugation or negation.
        if as_bits is None:
            array: npt.NDArray[Any] = tensor.numpy(force=True)
            return array
        # numpy has no such type, and torch does not know the one in ml_dtypes.
        bits, dtype = as_bits
        array = tensor.resolve_neg().view(bits).numpy(force=True)
        return array.view(dtype)


def _is_torch_symbol(tensor: Any) -> bool:
    """Returns whether a tensor is an argument that torch.func passes to a function, as vmap and grad do.

    It has the type of every other tensor, and torch itself asks this way. Inside of functionalize, numpy() does not
    refuse, but reads memory that is not the tensor's.
    """
    torch = sys.modules["torch"]
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    return is_wrapped is not None and bool(is_wrapped(tensor))


@cache
def _torch_bits() -> dict[Any, tuple[Any, np.dtype[Any]]]:
    """Returns torch's floating-point dtypes that numpy lacks → torch's integer dtype of that size, ml_dtypes' dtype."""
    torch = sys.modules["torch"]
    names = [name for name in dir(ml_dtypes) if name.startswith(("bfloat16", "float8_")) and hasattr(torch, name)]
    dtypes = {name: np.dtype(getattr(ml_dtypes, name)) for name in names}
    return {
        getattr(torch, name): (torch.int16 if dtype.itemsize == 2 else torch.uint8, dtype)
        for name, dtype in dtypes.items()
    }


@contextmanager
def _reading(value: object, what: str) -> Iterator[None]:
    """Turns whatever another library raises while its array is read into our error."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except Exception as error:
        if interrupt_in(error) is not None:
            raise
        raise InvalidArgumentError(
            f"{what} must be an array that numpy can read, but {type(value).__module__}.{type(value).__name__} says: "
            f"{shown(str(error))}"
        ) from error


def _refusal(value: object, what: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} must be a plain array, but {shown(value)} {why}")


# Sparse arrays, read as rows.


def _slices_rows(slices: Any, what: str) -> Rows:
    with _reading(slices, what):
        return Rows(slices.indices, slices.values, slices.dense_shape)


def _torch_rows(tensor: Any, what: str) -> Rows | None:
    """Returns the rows of a torch tensor of any sparse layout, or None for a dense one."""
    if not _is_sparse_tensor(tensor):
        return None
    with _reading(tensor, what):
        if tensor.layout is not sys.modules["torch"].sparse_coo:
            tensor = tensor.to_sparse_coo()
        # indices() and values() refuse repeated entries, which coalesce() would add up with few digits.
        coordinates, values = tensor._indices(), tensor._values()
    return _rows(coordinates, values, tensor.shape, what)


def _coo_rows(array: Any, what: str) -> Rows:
    with _reading(array, what):
        coo = array.tocoo()
        # .coords is new in scipy 1.13.
        coordinates = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
        values, shape = coo.data, coo.shape
    return _rows(coordinates, values, shape, what)


def _sparse_tensor_rows(tensor: Any, what: str) -> Rows:
    shape = _numpy(tensor.dense_shape, what)
    return _rows(_numpy(tensor.indices, what).T, tensor.values, shape, what)


def _bcsr_rows(array: Any, what: str) -> Rows:
    with _reading(array, what):
        bcoo = array.to_bcoo()
    return _bcoo_rows(bcoo, what)


def _bcoo_rows(array: Any, what: str) -> Rows:
    with _reading(array, what):
        n_batch, n_sparse, shape = array.n_batch, array.n_sparse, array.shape
    if n_batch:
        raise InvalidArgumentError(
            f"{what} must have no batch dimensions, but has {n_batch}: call update_layout(n_batch=0) first"
        )
    coordinates, values = _numpy(array.indices, what), _numpy(array.data, what)
    # JAX pads with entries beyond the shape, so that a function always returns equally many.
    is_inside = (coordinates < np.array(shape[:n_sparse], np.int64)).all(axis=1)
    if not is_inside.all():
        coordinates, values = coordinates[is_inside], values[is_inside]
    return _rows(coordinates.T, values, shape, what)


def _unread_rows(array: object, what: str) -> Rows:
    raise InvalidArgumentError(
        f"{what} must not be JAX's {type(array).__name__}: pass a BCOO, which jax.experimental.sparse.BCOO.fromdense() "
        "makes"
    )


def _rows(coordinates: Any, values: object, shape: Any, what: str) -> Rows:
    """Returns rows from a vector of coordinates for each sparse dimension, and the entries."""
    vectors = [_numpy(vector, what) for vector in coordinates]
    return rows_of_elements(vectors, _numpy(values, what), [int(dim) for dim in shape], what)


def _numpy(value: object, what: str) -> npt.NDArray[Any]:
    """Returns a part of a sparse array in numpy."""
    with _reading(value, what):
        return np.asarray(host_array(value, what))


# torch.Tensor, dense or sparse.
_TORCH = _Sparse(_torch_rows, "to_dense()")
# A variable of TensorFlow, which is dense.
_VARIABLE = _Sparse(lambda *_: None, "")
# Has .indices, .values and .dense_shape, like IndexedSlices.
_WITH_SLICES = _Sparse(_slices_rows, "to_dense() or tf.convert_to_tensor()")
# TensorFlow's SparseTensor: the same attributes, but each entry is an element.
_SPARSE_TENSOR = _Sparse(_sparse_tensor_rows, "tf.sparse.to_dense()")
# scipy.sparse, in every format: has tocoo().
_COO = _Sparse(_coo_rows, "toarray()")

# The first component of a class's module, and its name → how it is read, or why it cannot be.
_CLASSES: dict[tuple[str, str], _Sparse | str] = {
    ("torch", "Tensor"): _TORCH,
    ("torch", "FakeTensor"): _SYMBOL,
    ("torch", "Proxy"): _SYMBOL,
    ("torch", "MaskedTensor"): _MASKED,
    ("torch", "DTensor"): _DISTRIBUTED,
    ("jax", "Tracer"): _SYMBOL,
    ("jax", "BCOO"): _Sparse(_bcoo_rows, "todense()"),
    ("jax", "BCSR"): _Sparse(_bcsr_rows, "todense()"),
    ("jax", "JAXSparse"): _Sparse(_unread_rows, "todense()"),
    ("tensorflow", "SymbolicTensor"): _SYMBOL,
    ("tensorflow", "SparseTensor"): _SPARSE_TENSOR,
    ("tensorflow", "SparseTensorValue"): _SPARSE_TENSOR,
    ("tensorflow", "RaggedTensor"): _RAGGED,
    ("tensorflow", "BaseResourceVariable"): _VARIABLE,
    ("keras", "KerasTensor"): _SYMBOL,
}
_NAMES = frozenset(name for _, name in _CLASSES)
