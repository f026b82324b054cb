"""The expected behaviour of an accumulator, in plain numpy: the oracle that the library is compared with.

Written from the documents (the semantics and the table of number types), not from the library's code, and with
no regard for speed: integers are Python's own, rows are held in a dict, and operations run one after the other.
"""

import copy
import dataclasses
import functools
import math
import operator
from collections import Counter
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


class NotFinite(Refused):
    """The library has to raise NotFiniteError, and nothing may change."""


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
    metrics: dict[str, float] = field(default_factory=dict)


def storage_dtype(name):
    """The numpy dtype that gradients and results of an accumulator's dtype have."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(QUANTIZED.get(name, name))


def is_integer(name):
    return name in INTEGERS


def wrap(value, dtype):
    """A Python integer after a cast to dtype."""
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    if dtype.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    return value


def truncated_quotient(total, count):
    return -(-total // count) if total < 0 else total // count


class Sum:
    """One array under accumulation: wide enough, added to in order of arrival, rounded once."""

    def __init__(self, dtype, first, weight=1.0):
        self.dtype = dtype
        self.storage = storage_dtype(dtype)
        self.value = self._widened(first)
        self.magnitude = self._magnitude(first)
        self.scale(weight)

    def scale(self, weight):
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

    def _widened(self, array):
        if is_integer(self.dtype):
            return array.astype(object)
        if self.dtype in ("float16", "bfloat16"):
            return array.astype(np.float32)
        return array.copy()

    def _magnitude(self, array):
        if is_integer(self.dtype):
            return np.zeros(array.shape)
        wide = array.astype(np.complex128 if self.storage.kind == "c" else np.float64)
        with np.errstate(all="ignore"):
            return np.abs(wide)

    def _set(self, value):
        # numpy turns arrays of rank 0 into plain numbers.
        self.value = np.asarray(value, self.value.dtype)

    def add(self, array, weight=1.0):
        self.add_sum(Sum(self.dtype, array, weight))

    def add_sum(self, other):
        with np.errstate(all="ignore"):
            self._set(self.value + other.value)
            self.magnitude = self.magnitude + other.magnitude

    def result(self, divisor, reduction):
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


def numbers(rng, dtype, shape):
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
        limits = ml_dtypes.finfo(values.real.dtype)
        odd = [np.inf, -np.inf, np.nan, -0.0, float(limits.max), float(limits.smallest_subnormal)]
        values.reshape(-1)[0] = rng.choice(np.array(odd))
    return values


# So many elements share a scale in int8. A section of fewer stays float32.
BLOCK = 256


def encoded(values, encoding):
    """What arrives of an array, of which elements of float32 are encoded."""
    if values.dtype != np.float32 or encoding == "float32" or (encoding == "int8" and values.size < BLOCK):
        return values
    if encoding == "bfloat16":
        with np.errstate(all="ignore"):
            return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    flat = np.pad(values.reshape(-1), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(flat).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore"):
        # The largest number must not become infinite.
        scales = np.where(np.isinf(scales * np.float32(127)), np.nextafter(scales, np.float32(0)), scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return (np.rint(flat * inverse).astype(np.int8) * scales).reshape(-1)[: values.size].reshape(values.shape)


def is_finite(values, dtype, encoding):
    """Whether all elements are finite, and remain so if they are rounded to bfloat16."""
    if is_integer(dtype):
        return True
    rounds = dtype == "float32" and encoding == "bfloat16"
    return bool(np.isfinite(encoded(values, encoding) if rounds else values).all())


def number_of(worker):
    """The number of a worker that is called "worker N"."""
    word, _, number = worker.partition(" ")
    return int(number) if word == "worker" and number.isdigit() else None


def converted(grad, dtype):
    array = np.asarray(grad)
    storage = storage_dtype(dtype)
    if array.dtype.kind in "OSUVMm" and array.dtype != storage:
        raise Refused(f"{array.dtype} isn't numeric")
    if not np.can_cast(array.dtype, storage, "same_kind"):
        raise Refused(f"{array.dtype} can't be cast to {storage}")
    with np.errstate(all="ignore"):
        return array.astype(storage)


def checked_step(step):
    array = np.asarray(step)
    if isinstance(step, bool | str | bytes) or array.shape != () or array.dtype.kind not in "iuO":
        raise Refused(f"{step!r} is no integer scalar")
    if array.dtype.kind == "O" and not isinstance(step, int):
        raise Refused(f"{step!r} is no integer scalar")
    step = int(step)
    if not STEP_MIN <= step <= STEP_MAX:
        raise Refused(f"{step} is no int64")
    return step


@dataclass(frozen=True)
class How:
    """How a gradient is applied: the arguments of the call and of its handle that decide whether and as what it counts.

    Attributes:
        weight: the factor of its caller.
        encoding: how its elements of float32 travel, if they are ``encoded`` at all: those of gradients that are added
            in place are not.
        finite: whether one that is not finite is refused.
        metrics: numbers that travel with it.
    """

    weight: float = 1.0
    encoding: str = "float32"
    encoded: bool = False
    finite: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Contribution:
    """A gradient in a round."""

    content: Any  # dense: an array; sparse: index -> Sum; of a tree: path -> one of these, or None
    worker: str
    weight: float
    late: int
    how: How


def total(numbers):
    """Adds numbers one after the other, as ``sum`` no longer does for floats since Python 3.12."""
    return functools.reduce(operator.add, numbers, 0.0)


@dataclass
class Accumulator:
    """The common part of all kinds: which gradients are in the round. Subclasses add them up."""

    dtype: str
    shape: tuple[int | None, ...] | None
    reduction: str = "MEAN"
    step: int = 0
    round: list[Contribution] = field(default_factory=list)
    round_shape: tuple[int, ...] | None = None
    applied: int = 0
    stale: int = 0
    repeated: int = 0
    takes: int = 0
    # What its creator decides.
    max_staleness: int = 0
    # "constant" or "inverse_sqrt".
    staleness_weight: str = "constant"
    normalize: str = "weights"
    once_per_worker: bool = False
    order: str = "arrival"
    partitions: int = 1
    buffer: int | None = None
    # What a take waits for that does not say so itself.
    quorum: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("least", "most", "grace")))
    # The time, the number and the weight with which the grace of the latest take that had one begins, and when it did.
    now: float = 0.0
    grace_for: tuple[int, float] | None = None
    grace_began: float | None = None

    kind = ""

    def __post_init__(self):
        if self.shape is not None:
            self.shape = tuple(None if dim in (None, -1) else int(dim) for dim in self.shape)

    @property
    def schema(self):
        """What every handle says of it."""
        return self.kind, self.dtype, self.shape, self.reduction

    @property
    def options(self):
        """What a handle may leave out, and then finds. The limit of the buffer is refused only where it differs."""
        return {
            "staleness": (self.max_staleness, self.staleness_weight),
            "mean": self.normalize,
            "once_per_worker": self.once_per_worker,
            "order": self.order,
            "partitions": self.partitions,
            "buffer": self.buffer,
        }

    @property
    def dtypes(self):
        return {self.dtype}

    @property
    def storage(self):
        return storage_dtype(self.dtype)

    # What a round holds

    @property
    def count(self):
        return len(self.round)

    @property
    def workers(self):
        return dict(Counter(one.worker for one in self.round))

    @property
    def staleness(self):
        """How many gradients of the round were how many steps late."""
        return dict(Counter(one.late for one in self.round))

    @property
    def ordered(self):
        """The gradients of the round in the order in which they are added."""
        return sorted(self.round, key=lambda one: number_of(one.worker)) if self.order == "worker" else self.round

    @property
    def total_weight(self):
        return total(one.weight for one in self.ordered)

    @property
    def divisor(self):
        return self.count if self.normalize == "count" else self.total_weight

    @property
    def metrics(self):
        """The mean of each metric, by the weights that were given with the gradients that have it."""
        names = {name for one in self.round for name in one.how.metrics}
        having = {name: [one.how for one in self.round if name in one.how.metrics] for name in names}
        return {
            name: total(how.metrics[name] * how.weight for how in hows) / total(how.weight for how in hows)
            for name, hows in having.items()
        }

    # Applying

    def _apply(self, content, shape, local_step, worker, how):
        """Counts a gradient whose form is valid; raises if something else of it, or the round, refuses it."""
        step = checked_step(local_step)
        if how.weight != 1 and not self.dtypes.isdisjoint(INTEGERS):
            raise Refused(f"weight {how.weight} for integers")
        if how.finite and not all(is_finite(array, dtype, how.encoding) for dtype, array in self._arrays(content)):
            raise NotFinite
        if self.order == "worker" and number_of(worker) is None:
            raise Refused(f"{worker!r} has no number")
        floats = [array for dtype, array in self._arrays(content) if dtype == "float32"]
        if how.encoding == "int8" and not all(np.isfinite(array).all() for array in floats):
            raise Refused("int8 has no infinities")
        if step < self.step - self.max_staleness:
            self.stale += 1
            return Outcome("stale", self.step, self.count)
        if self.once_per_worker and worker in self.workers:
            self.repeated += 1
            return Outcome("repeated", self.step, self.count)
        if self.count and shape != self.round_shape:
            raise Refused(f"the round holds {self.round_shape}, not {shape}")
        if how.encoded:
            content = self._encoded(content, how.encoding)
        late = max(self.step - step, 0)
        had_enough = self._begins_grace()
        self.round_shape = shape
        self.round.append(Contribution(content, worker, how.weight * self._factor(late), late, how))
        self.applied += 1
        if self._begins_grace() and not had_enough:
            self.grace_began = self.now
        return Outcome("applied", self.step, self.count)

    def _factor(self, late):
        return 1 / math.sqrt(1 + late) if self.staleness_weight == "inverse_sqrt" else 1.0

    def _arrays(self, content):
        """The elements of a gradient, each array with its dtype's name."""
        raise NotImplementedError

    def _encoded(self, content, encoding):
        raise NotImplementedError

    # Steps and takes

    def set_global_step(self, step):
        self.step = checked_step(step)

    def set_quorum(self, **change):
        found = {**self.quorum, **change}
        number, most, grace = found.values()
        if number is None and (most, grace) != (None, None):
            raise Refused(f"{found} say no number")
        if most is not None and (grace is None or most < number):
            raise Refused(f"no take accepts {found}")
        self.quorum = found

    def _weighs(self, weight):
        return self.total_weight >= weight * (1 - 1e-9)

    def _begins_grace(self):
        """Whether there is enough for the grace of the latest take that had one."""
        return self.grace_for is not None and self.count >= self.grace_for[0] and self._weighs(self.grace_for[1])

    def take(
        self,
        num_required,
        most=None,
        grace=None,
        min_weight=None,
    ):
        """Takes now, or raises because the take would have to wait."""
        if num_required is None:
            set_number = self.quorum["least"]
            if (most, grace) != (None, None) or (set_number is None and min_weight is None):
                raise Refused("nobody says how many")
            num_required, most, grace = self.quorum.values() if set_number is not None else (1, None, None)
        if num_required < 1:
            raise Refused(f"num_required = {num_required}")
        if most is not None and (grace is None or most < num_required):
            raise Refused(f"most = {most} for {num_required} and a grace of {grace}")
        wanted = num_required, min_weight or 0.0
        is_enough = self.count >= wanted[0] and self._weighs(wanted[1])
        if grace and most != num_required and not (is_enough and most is not None and self.count >= most):
            is_enough = self._grace_is_over(wanted, is_enough, grace)
        if not is_enough:
            raise Insufficient
        if self.step == STEP_MAX:
            raise Overflowing
        taken = self.peek()
        self.step += 1
        self.takes += 1
        self.round = []
        self.round_shape = self.grace_began = None
        return taken

    def _grace_is_over(self, wanted, is_enough, grace):
        """Whether the grace has passed. It began when the round had enough, if a take had asked for as much by then."""
        known = self.grace_for is not None and self.grace_for[0] >= wanted[0] and self.grace_for[1] >= wanted[1]
        began = None
        if is_enough:
            began = self.grace_began if known and self.grace_began is not None else self.now
            if began + grace <= self.now:
                return True
        self.grace_for, self.grace_began = wanted, began
        return False

    def peek(self):
        gradient, magnitude = self._reduced() if self.count else (None, None)
        found = gradient, self.step, self.count, self.workers, magnitude, self.staleness
        return ModelRound(*found, self.total_weight, self.metrics)

    def _reduced(self):
        raise NotImplementedError


class Dense(Accumulator):
    kind = "dense"

    def apply(self, grad, local_step, worker, **how):
        array = self.checked(grad)
        return self._apply(array, array.shape, local_step, worker, How(**how))

    def checked(self, grad):
        array = converted(grad, self.dtype)
        if self.shape is not None and (
            len(self.shape) != array.ndim
            or any(dim not in (None, have) for dim, have in zip(self.shape, array.shape, strict=True))
        ):
            raise Refused(f"shape {array.shape} for {self.shape}")
        return array

    def _arrays(self, content):
        return [(self.dtype, content)]

    def _encoded(self, content, encoding):
        return encoded(content, encoding)

    def _reduced(self):
        first, *others = (Sum(self.dtype, one.content, one.weight) for one in self.ordered)
        for other in others:
            first.add_sum(other)
        magnitude = first.magnitude / (self.divisor if self.reduction == "MEAN" else 1)
        return first.result(self.divisor, self.reduction), magnitude


@dataclass
class Sparse(Accumulator):
    # What the sum of a row is divided by: the number, or the weights, of the gradients that held its "index", or of
    # all gradients of the "round".
    sparse_mean: str = "index"
    # That of all rows, if it is another one.
    row_divisor: float | None = None

    kind = "sparse"

    @property
    def schema(self):
        return *super().schema, self.sparse_mean

    def apply(self, indices, values, grad_shape, local_step, worker, **how):
        rows, row_shape = self.checked(indices, values, grad_shape)
        return self._apply(rows, row_shape, local_step, worker, How(**how))

    def checked(self, indices, values, grad_shape=None):
        """Returns index -> row, and the shape of a row. Repeated rows of one gradient are summed first."""
        index_array = np.asarray(indices)
        if index_array.size == 0 and not isinstance(indices, np.ndarray):
            index_array = index_array.astype(np.int64)  # an empty list has no dtype of its own
        array = converted(values, self.dtype)
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
        own = {}
        for place, row in zip(places, array, strict=True):
            row_sum = Sum(self.dtype, np.asarray(row, dtype=array.dtype))
            if place in own:
                own[place].add_sum(row_sum)
            else:
                own[place] = row_sum
        return own, row_shape

    def _check_grad_shape(self, grad_shape):
        dims = [int(dim) for dim in grad_shape]
        if self.shape is None or self.shape == ():
            return
        if len(dims) < len(self.shape):
            raise Refused(f"grad_shape {dims} for {self.shape}")
        for have, dim in zip(dims, self.shape, strict=False):
            if dim not in (None, have):
                raise Refused(f"grad_shape {dims} for {self.shape}")

    def _arrays(self, content):
        return [(self.dtype, row.value) for row in content.values()]

    def _encoded(self, content, encoding):
        places = sorted(content)
        if self.dtype != "float32" or not places:
            return content
        rows = encoded(np.stack([content[place].value for place in places]), encoding)
        return {place: Sum(self.dtype, np.asarray(row)) for place, row in zip(places, rows, strict=True)}

    def _reduced(self):
        assert self.round_shape is not None
        rows = {}
        held = {}
        for one in self.ordered:
            for place, row in one.content.items():
                own = copy.copy(row)
                own.scale(one.weight)
                if place in rows:
                    rows[place].add_sum(own)
                else:
                    rows[place] = own
                held[place] = held.get(place, 0.0) + (1 if self.normalize == "count" else one.weight)
        whole = self.divisor if self.sparse_mean == "round" else None
        whole = whole if self.row_divisor is None else self.row_divisor
        values = np.zeros((len(rows), *self.round_shape), storage_dtype(self.dtype))
        magnitude = np.zeros(values.shape)
        for position, place in enumerate(sorted(rows)):
            divisor = held[place] if whole is None else whole
            values[position] = rows[place].result(divisor, self.reduction)
            magnitude[position] = rows[place].magnitude / (divisor if self.reduction == "MEAN" else 1)
        first = self.shape[0] if self.shape else None
        shape = np.array([-1 if first is None else first, *self.round_shape], dtype=np.int64)
        return (np.array(sorted(rows), dtype=np.int64), values, shape), magnitude


@dataclass
class Tree(Accumulator):
    """The leaves are accumulators of their own, whose steps and workers play no role."""

    # path -> kind, dtype and shape
    leaves: dict[str, tuple[str, str, tuple[int | None, ...]]] = field(default_factory=dict)
    missing: str = "zero"
    sparse_mean: str = "round"

    kind = "tree"

    @classmethod
    def of(
        cls,
        leaves,
        reduction="MEAN",
        missing="zero",
        sparse_mean="round",
    ):
        dtypes = ",".join(dict.fromkeys(dtype for _, dtype, _ in leaves.values()))
        return cls(dtypes, None, reduction, leaves=leaves, missing=missing, sparse_mean=sparse_mean)

    @property
    def schema(self):
        return *super().schema, tuple(self.leaves.items()), self.missing, self.sparse_mean

    @property
    def dtypes(self):
        return {dtype for _, dtype, _ in self.leaves.values()}

    def _leaf(self, path):
        kind, dtype, shape = self.leaves[path]
        leaf_kind = Dense if kind == "dense" else Sparse
        return leaf_kind(dtype, shape, self.reduction, normalize=self.normalize, round_shape=tuple(shape[1:]))

    def apply(self, grad, local_step, worker, **how):
        """Applies a gradient: path -> an array, a pair of indices and rows, or None."""
        if grad.keys() != self.leaves.keys():
            raise Refused(f"{set(grad)} for {set(self.leaves)}")
        content = {path: None if leaf is None else self._checked_leaf(path, leaf) for path, leaf in grad.items()}
        return self._apply(content, (), local_step, worker, How(**how))

    def _checked_leaf(self, path, grad):
        leaf = self._leaf(path)
        if isinstance(leaf, Dense):
            return leaf.checked(grad)
        rows, row_shape = leaf.checked(*grad)
        # Unlike in a sparse accumulator, rows cannot have more dimensions than declared.
        if row_shape != leaf.round_shape:
            raise Refused(f"rows of shape {row_shape} for {leaf.shape}")
        return rows

    def _arrays(self, content):
        return [found for path, leaf in content.items() if leaf is not None for found in self._leaf(path)._arrays(leaf)]

    def _encoded(self, content, encoding):
        # A section of so few elements would become larger as int8.
        assert encoding != "int8" or sum(array.size for _, array in self._arrays(content)) < BLOCK
        return {
            path: None if leaf is None else self._leaf(path)._encoded(leaf, encoding) for path, leaf in content.items()
        }

    def _reduced(self):
        gradients = {}
        magnitudes = {}
        for path in self.leaves:
            leaf = self._leaf(path)
            absent = np.zeros(leaf.shape, leaf.storage) if isinstance(leaf, Dense) else {}
            holding = [one for one in self.ordered if one.content[path] is not None]
            gradients[path] = magnitudes[path] = None
            if self.missing == "skip" and not holding:
                continue
            divisor = self.divisor
            if self.missing == "skip":
                divisor = len(holding) if self.normalize == "count" else total(one.weight for one in holding)
            # A leaf that is missing counts as zeros.
            leaf.round = [
                dataclasses.replace(one, content=absent if one.content[path] is None else one.content[path])
                for one in self.ordered
            ]
            if isinstance(leaf, Sparse):
                leaf.row_divisor = divisor if self.sparse_mean == "round" else None
                gradients[path], magnitudes[path] = leaf._reduced()
            else:
                first, *others = (Sum(leaf.dtype, one.content, one.weight) for one in leaf.round)
                for other in others:
                    first.add_sum(other)
                gradients[path], magnitudes[path] = first.result(divisor, self.reduction), first.magnitude
        return gradients, magnitudes


@dataclass
class Published:
    """Parameters, from their first version until they are deleted."""

    # path -> dtype and shape; decided with the first version, as the number of partitions is.
    leaves: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    partitions: int
    step: int
    # What readers get of the latest version, by path, and how it is stored.
    tree: dict[str, np.ndarray]
    encoding: str
    state: Any
    finished: bool

    @classmethod
    def first(cls, tree, partitions, *version):
        leaves = {path: (array.dtype, array.shape) for path, array in tree.items()}
        made = cls(leaves, partitions, STEP_MIN, {}, "float32", None, finished=False)
        made._set(tree, *version)
        return made

    def publish(self, tree, step, state, finished, encoding):
        """Publishes a version, or the same once more.

        Raises:
            Refused: its form is another.
            Conflicting: another version is published for this step, or a later one.
        """
        if {path: (array.dtype, array.shape) for path, array in tree.items()} != self.leaves:
            raise Refused("another form")
        if step > self.step:
            self._set(tree, step, state, finished, encoding)
        elif step < self.step or not self._is_same(tree, state):
            raise Conflicting
        self.finished |= finished

    def _set(self, tree, step, state, finished, encoding):
        self.step, self.state, self.encoding = step, state, encoding
        self.tree = {path: encoded(array, encoding) for path, array in tree.items()}
        self.finished |= finished

    def _is_same(self, tree, state):
        """Whether nothing differs from what is stored, after rounding."""
        ours = [encoded(array, self.encoding) for array in tree.values()]
        return (
            all(map(_same_bytes, ours, self.tree.values()))
            and (state is None) == (self.state is None)
            and (state is None or all(map(_same_bytes, state.values(), self.state.values())))
        )


class Conflicting(Exception):
    """The library has to raise ConflictError, and nothing may change."""


def _same_bytes(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def flat(tree, path=""):
    """Path -> leaf, in the order of sorted keys. Everything but dicts, lists and tuples is a leaf."""
    if isinstance(tree, dict):
        pairs = sorted(tree.items())
    elif isinstance(tree, list | tuple):
        pairs = [(str(place), child) for place, child in enumerate(tree)]
    else:
        return {path or ".": tree}
    return {key: leaf for name, child in pairs for key, leaf in flat(child, f"{path}/{name}".lstrip("/")).items()}


def nested(by_path):
    """The tree of leaves by path: the opposite of `flat`. Where all keys are numbers, it has a list."""
    if "." in by_path:
        return by_path["."]
    children = {}
    for path, leaf in by_path.items():
        key, _, rest = path.partition("/")
        children.setdefault(key, {})[rest or "."] = leaf
    trees = {key: nested(below) for key, below in children.items()}
    return [trees[key] for key in sorted(trees, key=int)] if all(map(str.isdigit, trees)) else trees


def assert_same(actual, expected):
    """Equal in dtype, shape and every bit, except that a NaN equals any NaN."""
    assert isinstance(actual, np.ndarray), type(actual)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    for a, e in zip(_parts(actual), _parts(expected), strict=True):
        equal = a == e
        if a.dtype.kind == "f":
            equal = equal & (np.signbit(a) == np.signbit(e)) | (np.isnan(a) & np.isnan(e))
        assert equal.all(), f"\n{actual!r}\nis not\n{expected!r}"


def assert_close(actual, expected, magnitude, dtype):
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
        limits = ml_dtypes.finfo(storage) if storage.kind != "c" else np.finfo(storage)
        fair = np.isfinite(magnitude) & (magnitude < float(limits.max) / 1000)
        assert (~fair | (a == e) | (np.abs(a - e) <= room)).all(), f"\n{actual!r}\nis not close to\n{expected!r}"


def _parts(array):
    """The array in types whose signbit and isnan numpy knows."""
    if array.dtype.kind == "c":
        return [array.real, array.imag]
    if array.dtype == storage_dtype("bfloat16"):
        return [array.astype(np.float32)]
    return [array]
