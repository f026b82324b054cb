"""The expected behaviour of an accumulator, in plain numpy: the oracle that the library is compared with.

Written from the documents (the semantics and the table of number types), not from the library's code, and with
no regard for speed: integers are Python's own, rows are held in a dict, and operations run one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

STEP_MIN, STEP_MAX = -(2**63), 2**63 - 1

QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}
FLOATS = ("float16", "bfloat16", "float32", "float64")
SMALL_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32", *QUANTIZED)
INTEGERS = (*SMALL_INTEGERS, "int64", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX)


class Refused(Exception):
    """The library has to raise InvalidArgumentError, and nothing may change."""


class Overflowing(Exception):
    """The library has to raise a RedisAccError about the largest int64, and nothing may change."""


class Insufficient(Exception):
    """The take has to wait."""


@dataclass
class Outcome:
    outcome: str
    global_step: int
    num_accumulated: int


@dataclass
class ModelRound:
    gradient: Any  # an array, or (indices, values, shape); of a tree: path -> one of these, or None
    global_step: int
    num_accumulated: int
    workers: dict[str, int]
    # How far another order of addition may move a result. Only rounds that mix both ways of storage have one.
    magnitude: Any = None
    staleness: dict[int, int] = field(default_factory=dict)
    total_weight: float = 0.0


def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype that gradients and results of an accumulator's dtype have."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(QUANTIZED.get(name, name))


def is_integer(name: str) -> bool:
    return name in INTEGERS


def wrap(value: int, dtype: np.dtype[Any]) -> int:
    """A Python integer after a cast to dtype."""
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    if dtype.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    return value


def truncated_quotient(total: int, count: int) -> int:
    return -(-total // count) if total < 0 else total // count


class Sum:
    """One array under accumulation: wide enough, added to in order of arrival, rounded once."""

    def __init__(self, dtype: str, first: np.ndarray, weight: float = 1.0) -> None:
        self.dtype = dtype
        self.storage = storage_dtype(dtype)
        self.value = self._widened(first)
        self.magnitude = self._magnitude(first)
        self.scale(weight)

    def scale(self, weight: float) -> None:
        """Multiplies by a weight, which is rounded to the type of the sum first."""
        if weight == 1:
            return
        real = self.value.real.dtype.type
        with np.errstate(all="ignore"):
            if self.value.dtype.kind == "c":
                product = np.empty_like(self.value)
                product.real, product.imag = self.value.real * real(weight), self.value.imag * real(weight)
                self._set(product)
            else:
                self._set(self.value * real(weight))
            self.magnitude = self.magnitude * weight

    def _widened(self, array: np.ndarray) -> np.ndarray:
        if is_integer(self.dtype):
            return array.astype(object)
        if self.dtype in ("float16", "bfloat16"):
            return array.astype(np.float32)
        return array.copy()

    def _magnitude(self, array: np.ndarray) -> np.ndarray:
        if is_integer(self.dtype):
            return np.zeros(array.shape)
        wide = array.astype(np.complex128 if self.storage.kind == "c" else np.float64)
        with np.errstate(all="ignore"):
            return np.abs(wide)

    def _set(self, value: Any) -> None:
        # numpy turns arrays of rank 0 into plain numbers.
        self.value = np.asarray(value, self.value.dtype)

    def add(self, array: np.ndarray, weight: float = 1.0) -> None:
        self.add_sum(Sum(self.dtype, array, weight))

    def add_sum(self, other: Sum) -> None:
        with np.errstate(all="ignore"):
            self._set(self.value + other.value)
            self.magnitude = self.magnitude + other.magnitude

    def result(self, divisor: float, reduction: str) -> np.ndarray:
        if is_integer(self.dtype):
            wide = np.dtype(np.int64) if self.dtype in SMALL_INTEGERS else self.storage
            out = np.empty(self.value.shape, self.storage)
            for position in np.ndindex(self.value.shape):
                total = wrap(int(self.value[position]), wide)
                if reduction == "MEAN":
                    total = truncated_quotient(total, int(divisor))
                out[position] = wrap(total, self.storage)
            return out
        with np.errstate(all="ignore"):
            value = self.value
            if reduction == "MEAN" and value.dtype.kind == "c":
                # One true division for each part, because numpy's complex division rounds twice.
                real, divided = value.real.dtype.type(divisor), np.empty_like(value)
                divided.real, divided.imag = value.real / real, value.imag / real
                value = divided
            elif reduction == "MEAN":
                value = value / value.dtype.type(divisor)
            return np.asarray(value).astype(self.storage)


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random elements: small and large ones, and sometimes an infinity, a NaN or a negative zero."""
    storage = storage_dtype(dtype)
    if storage.kind in "iu":
        bounds = np.iinfo(storage)
        if rng.random() < 0.5:
            return rng.integers(0 if storage.kind == "u" else -9, 10, shape).astype(storage)
        return rng.integers(bounds.min, bounds.max, shape, dtype=storage, endpoint=True)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    if storage.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    values = values.astype(storage)
    if rng.random() < 0.1 and values.size:
        values.reshape(-1)[0] = rng.choice(np.array([np.inf, -np.inf, np.nan, -0.0]))
    return values


def converted(grad: Any, dtype: str) -> np.ndarray:
    array = np.asarray(grad)
    storage = storage_dtype(dtype)
    if array.dtype.kind in "OSUVMm" and array.dtype != storage:
        raise Refused(f"{array.dtype} isn't numeric")
    if not np.can_cast(array.dtype, storage, "same_kind"):
        raise Refused(f"{array.dtype} can't be cast to {storage}")
    with np.errstate(all="ignore"):
        return array.astype(storage)


def checked_step(step: Any) -> int:
    array = np.asarray(step)
    if isinstance(step, bool | str | bytes) or array.shape != () or array.dtype.kind not in "iuO":
        raise Refused(f"{step!r} is no integer scalar")
    if array.dtype.kind == "O" and not isinstance(step, int):
        raise Refused(f"{step!r} is no integer scalar")
    step = int(step)
    if not STEP_MIN <= step <= STEP_MAX:
        raise Refused(f"{step} is no int64")
    return step


@dataclass
class Accumulator:
    """The common part of all kinds. Subclasses hold one round's sums."""

    dtype: str
    shape: tuple[int | None, ...] | None
    reduction: str = "MEAN"
    step: int = 0
    count: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    round_shape: tuple[int, ...] | None = None
    applied: int = 0
    stale: int = 0
    repeated: int = 0
    takes: int = 0
    max_staleness: int = 0
    # How many gradients of the round were how many steps late.
    staleness: dict[int, int] = field(default_factory=dict)
    # "constant", "inverse_sqrt", or a factor for each staleness.
    staleness_weight: str | tuple[float, ...] = "constant"
    normalize: str = "weights"
    total_weight: float = 0.0
    # What a take waits for that does not say so itself.
    quorum: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("least", "most", "grace")))

    kind = ""

    def __post_init__(self) -> None:
        if self.shape is not None:
            self.shape = tuple(None if dim in (None, -1) else int(dim) for dim in self.shape)

    @property
    def schema(self) -> tuple[Any, ...]:
        return self.kind, self.dtype, self.shape, self.reduction, *self._options

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.max_staleness, self.staleness_weight, self.normalize

    @property
    def dtypes(self) -> set[str]:
        return {self.dtype}

    @property
    def storage(self) -> np.dtype[Any]:
        return storage_dtype(self.dtype)

    def _admit(
        self, local_step: Any, shape: tuple[int, ...], worker: str, once: bool, weight: float
    ) -> Outcome | float:
        """Returns "stale" or "repeated", or what it weighs; raises if it, or the round, refuses it. Call it last."""
        step = checked_step(local_step)
        if weight != 1 and not self.dtypes.isdisjoint(INTEGERS):
            raise Refused(f"weight {weight} for integers")
        if step < self.step - self.max_staleness:
            self.stale += 1
            return Outcome("stale", self.step, self.count)
        if once and worker in self.workers:
            self.repeated += 1
            return Outcome("repeated", self.step, self.count)
        if self.count and shape != self.round_shape:
            raise Refused(f"the round holds {self.round_shape}, not {shape}")
        self.round_shape = shape
        self.count += 1
        self.applied += 1
        self.workers[worker] = self.workers.get(worker, 0) + 1
        late = max(self.step - step, 0)
        self.staleness[late] = self.staleness.get(late, 0) + 1
        if self.staleness_weight == "inverse_sqrt":
            weight *= 1 / math.sqrt(1 + late)
        elif not isinstance(self.staleness_weight, str):
            weight *= self.staleness_weight[late]
        self.total_weight += weight
        return weight

    @property
    def divisor(self) -> float:
        return self.count if self.normalize == "count" else self.total_weight

    def set_global_step(self, step: Any) -> None:
        self.step = checked_step(step)

    def set_quorum(self, **change: Any) -> None:
        found = {**self.quorum, **change}
        number, most, grace = found.values()
        if number is None and (most, grace) != (None, None):
            raise Refused(f"{found} say no number")
        if most is not None and (grace is None or most < number):
            raise Refused(f"no take accepts {found}")
        self.quorum = found

    def take(
        self,
        num_required: int | None,
        most: int | None = None,
        grace: float | None = None,
        min_weight: float | None = None,
    ) -> ModelRound:
        """Takes at a moment when no grace has ended that is longer than 0."""
        if num_required is None:
            set_number = self.quorum["least"]
            if (most, grace) != (None, None) or (set_number is None and min_weight is None):
                raise Refused("nobody says how many")
            num_required, most, grace = self.quorum.values() if set_number is not None else (1, None, None)
        if num_required < 1:
            raise Refused(f"num_required = {num_required}")
        if most is not None and (grace is None or most < num_required):
            raise Refused(f"most = {most} for {num_required} and a grace of {grace}")
        too_light = min_weight is not None and self.total_weight < min_weight * (1 - 1e-9)
        if too_light or self.count < num_required or (grace and (most is None or self.count < most)):
            raise Insufficient
        if self.step == STEP_MAX:
            raise Overflowing
        taken = self.peek()
        self.step += 1
        self.takes += 1
        self.count = 0
        self.workers = {}
        self.staleness = {}
        self.total_weight = 0.0
        self.round_shape = None
        self._clear()
        return taken

    def peek(self) -> ModelRound:
        gradient, magnitude = self._reduced() if self.count else (None, None)
        found = gradient, self.step, self.count, dict(self.workers), magnitude, dict(self.staleness)
        return ModelRound(*found, self.total_weight)

    def _reduced(self) -> tuple[Any, Any]:
        raise NotImplementedError

    def _clear(self) -> None:
        raise NotImplementedError


class Dense(Accumulator):
    kind = "dense"
    sum: Sum | None = None

    def apply(self, grad: Any, local_step: Any, worker: str, once: bool = False, weight: float = 1.0) -> Outcome:
        array = converted(grad, self.dtype)
        checked_step(local_step)
        if self.shape is not None and (
            len(self.shape) != array.ndim
            or any(dim not in (None, have) for dim, have in zip(self.shape, array.shape, strict=True))
        ):
            raise Refused(f"shape {array.shape} for {self.shape}")
        admitted = self._admit(local_step, array.shape, worker, once, weight)
        if isinstance(admitted, Outcome):
            return admitted
        if self.count == 1:
            self.sum = Sum(self.dtype, array, admitted)
        else:
            assert self.sum is not None
            self.sum.add(array, admitted)
        return Outcome("applied", self.step, self.count)

    def _reduced(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.sum is not None
        magnitude = self.sum.magnitude / (self.divisor if self.reduction == "MEAN" else 1)
        return self.sum.result(self.divisor, self.reduction), magnitude

    def _clear(self) -> None:
        self.sum = None


class Sparse(Accumulator):
    kind = "sparse"
    # What the sum of a row is divided by; None: the number, or the weights, of the gradients that held its index.
    row_divisor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows: dict[int, Sum] = {}
        self.row_counts: dict[int, float] = {}

    def apply(
        self,
        indices: Any,
        values: Any,
        grad_shape: Any,
        local_step: Any,
        worker: str,
        once: bool = False,
        weight: float = 1.0,
    ) -> Outcome:
        index_array = np.asarray(indices)
        if index_array.size == 0 and not isinstance(indices, np.ndarray):
            index_array = index_array.astype(np.int64)  # an empty list has no dtype of its own
        array = converted(values, self.dtype)
        checked_step(local_step)
        if index_array.dtype.kind not in "iu":
            raise Refused(f"indices of dtype {index_array.dtype}")
        if index_array.ndim != 1:
            raise Refused(f"indices of rank {index_array.ndim}")
        if array.ndim < 1 or len(index_array) != len(array):
            raise Refused(f"{len(index_array)} indices, values of shape {array.shape}")
        if grad_shape is not None:
            self._check_grad_shape(grad_shape)
        declared = self.shape or ()
        if array.ndim < len(declared):
            raise Refused(f"values of rank {array.ndim} for {self.shape}")
        row_shape = array.shape[1:]
        if any(dim not in (None, have) for dim, have in zip(declared[1:], row_shape, strict=False)):
            raise Refused(f"rows of shape {row_shape} for {self.shape}")
        limit = declared[0] if declared and declared[0] is not None else 2**63
        places = [int(index) for index in index_array]
        if any(not 0 <= place < limit for place in places):
            raise Refused(f"an index outside of [0, {limit})")

        # Repeated rows of one gradient are summed first, and count once.
        own: dict[int, Sum] = {}
        for place, row in zip(places, array, strict=True):
            row_array = np.asarray(row, dtype=array.dtype)
            if place in own:
                own[place].add(row_array)
            else:
                own[place] = Sum(self.dtype, row_array)
        admitted = self._admit(local_step, row_shape, worker, once, weight)
        if isinstance(admitted, Outcome):
            return admitted
        for place, row_sum in own.items():
            row_sum.scale(admitted)
            if place in self.rows:
                self.rows[place].add_sum(row_sum)
            else:
                self.rows[place] = row_sum
            self.row_counts[place] = self.row_counts.get(place, 0) + (1 if self.normalize == "count" else admitted)
        return Outcome("applied", self.step, self.count)

    def _check_grad_shape(self, grad_shape: Any) -> None:
        dims = [int(dim) for dim in grad_shape]
        if self.shape is None or self.shape == ():
            return
        if len(dims) < len(self.shape):
            raise Refused(f"grad_shape {dims} for {self.shape}")
        for have, dim in zip(dims, self.shape, strict=False):
            if dim not in (None, have):
                raise Refused(f"grad_shape {dims} for {self.shape}")

    def _reduced(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        assert self.round_shape is not None
        places = sorted(self.rows)
        values = np.zeros((len(places), *self.round_shape), storage_dtype(self.dtype))
        magnitude = np.zeros(values.shape)
        for position, place in enumerate(places):
            count = self.row_counts[place] if self.row_divisor is None else self.row_divisor
            values[position] = self.rows[place].result(count, self.reduction)
            magnitude[position] = self.rows[place].magnitude / (count if self.reduction == "MEAN" else 1)
        first = self.shape[0] if self.shape else None
        shape = np.array([-1 if first is None else first, *self.round_shape], dtype=np.int64)
        return (np.array(places, dtype=np.int64), values, shape), magnitude

    def _clear(self) -> None:
        self.rows = {}
        self.row_counts = {}


@dataclass
class Tree(Accumulator):
    """The leaves are accumulators of their own, whose steps and workers play no role."""

    # path -> kind, dtype and shape
    leaves: dict[str, tuple[str, str, tuple[int | None, ...]]] = field(default_factory=dict)
    missing: str = "zero"
    sparse_mean: str = "round"

    kind = "tree"

    def __post_init__(self) -> None:
        self._clear()

    @classmethod
    def of(
        cls,
        leaves: dict[str, tuple[str, str, tuple[int | None, ...]]],
        reduction: str = "MEAN",
        missing: str = "zero",
        sparse_mean: str = "round",
    ) -> Tree:
        dtypes = ",".join(dict.fromkeys(dtype for _, dtype, _ in leaves.values()))
        return cls(dtypes, None, reduction, leaves=leaves, missing=missing, sparse_mean=sparse_mean)

    @property
    def schema(self) -> tuple[Any, ...]:
        leaves = tuple(self.leaves.items())
        return self.kind, self.dtype, self.reduction, leaves, self.missing, self.sparse_mean, *self._options

    @property
    def dtypes(self) -> set[str]:
        return {dtype for _, dtype, _ in self.leaves.values()}

    def _leaf(self, path: str) -> Dense | Sparse:
        kind, dtype, shape = self.leaves[path]
        leaf_kind = Dense if kind == "dense" else Sparse
        return leaf_kind(dtype, shape, self.reduction, normalize=self.normalize)

    def apply(
        self, grad: dict[str, Any], local_step: Any, worker: str, once: bool = False, weight: float = 1.0
    ) -> Outcome:
        """Applies a gradient: path -> an array, a pair of indices and rows, or None."""
        if grad.keys() != self.leaves.keys():
            raise Refused(f"{set(grad)} for {set(self.leaves)}")
        for path, leaf in grad.items():
            self._apply_leaf(self._leaf(path), leaf, 1.0)
        admitted = self._admit(local_step, (), worker, once, weight)
        if isinstance(admitted, Outcome):
            return admitted
        for path, leaf in grad.items():
            self._apply_leaf(self._sums[path], leaf, admitted)
            if leaf is not None:
                self._holders[path] += 1 if self.normalize == "count" else admitted
        return Outcome("applied", self.step, self.count)

    @staticmethod
    def _apply_leaf(leaf: Dense | Sparse, grad: Any, weight: float) -> None:
        if isinstance(leaf, Dense):
            # A leaf that is missing counts as zeros.
            leaf.apply(np.zeros(leaf.shape, leaf.storage) if grad is None else grad, 0, "", weight=weight)
            return
        indices, values = ([], np.zeros((0, *leaf.shape[1:]), leaf.storage)) if grad is None else grad
        # Unlike in a sparse accumulator, rows cannot have more dimensions than declared.
        if np.shape(values)[1:] != tuple(leaf.shape[1:]):
            raise Refused(f"rows of shape {np.shape(values)[1:]} for {leaf.shape}")
        leaf.apply(indices, values, None, 0, "", weight=weight)

    def _reduced(self) -> tuple[dict[str, Any], dict[str, Any]]:
        gradients: dict[str, Any] = {}
        magnitudes: dict[str, Any] = {}
        for path, leaf in self._sums.items():
            holders = self._holders[path] if self.missing == "skip" else self.divisor
            gradients[path] = magnitudes[path] = None
            if holders == 0:
                continue
            if isinstance(leaf, Sparse):
                leaf.row_divisor = holders if self.sparse_mean == "round" else None
                gradients[path], magnitudes[path] = leaf._reduced()
            else:
                assert leaf.sum is not None
                gradients[path] = leaf.sum.result(holders, self.reduction)
                magnitudes[path] = leaf.sum.magnitude
        return gradients, magnitudes

    def _clear(self) -> None:
        self._sums = {path: self._leaf(path) for path in self.leaves}
        self._holders: dict[str, float] = dict.fromkeys(self.leaves, 0)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Path -> leaf, in the order of sorted keys. Everything but dicts, lists and tuples is a leaf."""
    if isinstance(tree, dict):
        pairs = sorted(tree.items())
    elif isinstance(tree, list | tuple):
        pairs = [(str(place), child) for place, child in enumerate(tree)]
    else:
        return {path or ".": tree}
    return {key: leaf for name, child in pairs for key, leaf in flat(child, f"{path}/{name}".lstrip("/")).items()}


def nested(by_path: dict[str, Any]) -> Any:
    """The tree of leaves by path: the opposite of `flat`. Where all keys are numbers, it has a list."""
    if "." in by_path:
        return by_path["."]
    children: dict[str, dict[str, Any]] = {}
    for path, leaf in by_path.items():
        key, _, rest = path.partition("/")
        children.setdefault(key, {})[rest or "."] = leaf
    trees = {key: nested(below) for key, below in children.items()}
    return [trees[key] for key in sorted(trees, key=int)] if all(map(str.isdigit, trees)) else trees


def assert_same(actual: Any, expected: np.ndarray) -> None:
    """Equal in dtype, shape and every bit, except that a NaN equals any NaN."""
    assert isinstance(actual, np.ndarray), type(actual)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    for a, e in zip(_parts(actual), _parts(expected), strict=True):
        equal = a == e
        if a.dtype.kind == "f":
            equal = equal & (np.signbit(a) == np.signbit(e)) | (np.isnan(a) & np.isnan(e))
        assert equal.all(), f"\n{actual!r}\nis not\n{expected!r}"


def assert_close(actual: Any, expected: np.ndarray, magnitude: np.ndarray, dtype: str) -> None:
    """Equal to the rounding that another order of addition may bring; magnitude is the sum of absolute values."""
    assert isinstance(actual, np.ndarray), type(actual)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if is_integer(dtype):
        assert np.array_equal(actual, expected), f"\n{actual!r}\nis not\n{expected!r}"
        return
    storage = storage_dtype(dtype)
    wide = np.float64 if storage.kind != "c" else np.complex128
    fine = 1e-6 if dtype in ("float16", "bfloat16", "float32", "complex64") else 1e-15
    coarse = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, fine)
    with np.errstate(all="ignore"):
        a, e = actual.astype(wide), expected.astype(wide)
        room = 32 * fine * magnitude + 2 * coarse * np.abs(e) + np.finfo(np.float16).tiny * (coarse > 1e-4)
        # Where sums can overflow, the order decides between a number, an infinity and a NaN.
        limit = float(ml_dtypes.finfo(storage).max) / 4 if storage.kind != "c" else float(np.finfo(storage).max) / 4
        fair = np.isfinite(magnitude) & (magnitude < limit)
        assert (~fair | (np.abs(a - e) <= room)).all(), f"\n{actual!r}\nis not close to\n{expected!r}"


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """The array in types whose signbit and isnan numpy knows."""
    if array.dtype.kind == "c":
        return [array.real, array.imag]
    if array.dtype == storage_dtype("bfloat16"):
        return [array.astype(np.float32)]
    return [array]
