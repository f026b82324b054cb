"""Random sequences of operations on several handles of several names, against the plain numpy model.

One example is a database of its own: some names, under each of them one accumulator after the other, and handles on
them that differ in client, worker, encoding and way of storing gradients. After every operation the accumulator's state
is compared with the model's; results are compared bit for bit wherever the order of addition is determined.
`test_parameter_machine.py` does the same with parameters.
"""

import dataclasses
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from support import model
from support.sequences import Machine, run

import redisacc

NAMES = ("s", "d", "t", "another", None)
# Gradients of at most five elements are added in place (a row counts for 24 more), and larger ones buffered, in one
# and the same round.
FIVE = redisacc.Limits(in_place=29)
IN_PLACE = redisacc.Limits(in_place=10**9)
# Inline; the smallest inline and the others in parts, some of them announced; all in parts and announced.
LIMITS = (
    IN_PLACE,
    FIVE,
    redisacc.Limits(in_place=0),
    redisacc.Limits(in_place=0, inline=24),
    redisacc.Limits(in_place=0, inline=0),
)
ENCODINGS = (None, "bfloat16", "int8")
SHAPES = {
    "dense": ((), (3,), (None,), (2, 3), (None, 3), (0,), (300,), (300,), None),
    "sparse": ((), (9,), (None,), (9, 2), (None, None), (9, None, 2), None),
}
# Leaves of trees by path: kind, dtype and shape. None stands for the dtype of the example.
TREES = (
    {".": ("dense", None, (3,))},
    {"a": ("dense", None, (2,)), "b": ("sparse", None, (9, 2))},
    {"0": ("dense", "float32", ()), "1/x": ("dense", None, (2, 2)), "1/y": ("sparse", "float32", (None,))},
    {"k/0": ("sparse", None, (9, 2)), "k/1": ("sparse", "int32", (None,)), "k/2": ("sparse", "float32", (9, 0))},
)
# With order="worker", ten comes after nine, and the last one has no number.
WORKERS = ("worker 10", "worker 2", "worker 9", "weight=9 x")
# How many steps late a gradient may be.
LATE = (0, 0, 1, 3, 1000)
# What else the creator decides. True: a buffer that holds little more than one sum, so that clients compact.
DECIDED = (
    {},
    {},
    {"once_per_worker": True},
    {"once_per_worker": True, "order": "worker"},
    {"partitions": 3},
    {"once_per_worker": True, "order": "worker", "partitions": 3},
    {"once_per_worker": True, "order": "worker", "partitions": 3},
    {"buffer": True},
    {"buffer": True, "partitions": 3},
)
# What of an accumulator a handle may leave out.
DECIDABLE = ("max_staleness", "staleness_weight", "normalize", "once_per_worker", "order", "partitions", "buffer")
STEPS = (0, 1, 7, -4, 2**53, 2**53 + 1, -(2**63), 2**63 - 2, 2**63 - 1, 2**63 - 1)


def random_accumulator(draw, kind, shape=..., decided=None):
    """A new accumulator, according to the model."""
    dtype, reduction = draw.choice(model.DTYPES + 17 * ("float32",)), draw.choice(("MEAN", "SUM"))
    shape = draw.choice(SHAPES.get(kind, ()) or TREES) if shape is ... else shape
    rows = draw.choice(("round", "index"))
    m: Any
    if kind == "tree":
        leaves = {path: (kind, of or dtype, dims) for path, (kind, of, dims) in shape.items()}
        m = model.Tree.of(leaves, reduction, draw.choice(("zero", "skip")), rows)
    elif kind == "sparse":
        m = model.Sparse(dtype, shape, reduction, sparse_mean=rows)
    else:
        m = model.Dense(dtype, shape, reduction)
    m.max_staleness, m.normalize = draw.choice(LATE), draw.choice(("weights", "count"))
    if m.max_staleness and m.dtypes.isdisjoint(model.INTEGERS):
        m.staleness_weight = draw.choice(("constant", "inverse_sqrt"))
    vars(m).update(draw.choice(DECIDED) if decided is None else decided)
    m.buffer = bytes_of_a_sum(m) if m.buffer else None
    return m


def bytes_of_a_sum(m):
    """No less than what the sum of a whole round takes."""

    def of(kind, dtype, shape):
        size = max(8 if model.is_integer(dtype) else model.storage_dtype(dtype).itemsize, 4)
        dims = [3 if dim is None else dim for dim in (shape if shape is not None else (3, 3))]
        return size * math.prod(dims) if kind == "dense" else 9 * (24 + size * math.prod(dims[1:]))

    if m.kind == "tree":
        return sum(16 + of(*leaf) for leaf in m.leaves.values())
    return of(m.kind, m.dtype, m.shape)


@dataclass
class Living:
    """An accumulator, according to the model."""

    name: str | None
    model: Any
    alive: bool = True
    # Which ways of storing gradients the current round has seen; None: unknown.
    ways: set[str | None] = field(default_factory=set)
    # Taken, never acknowledged.
    stray: list[tuple[model.ModelRound, set[str | None]]] = field(default_factory=list)
    # The takes that wait: what they require, and what they will return.
    queue: list[tuple[int, Future[Any]]] = field(default_factory=list)

    @property
    def sparse(self):
        return bool(self.model.kind == "sparse")


@dataclass
class Handle:
    acc: Any
    living: Living
    limits: redisacc.Limits
    worker: str
    encoding: str | None
    finite: bool
    closed: bool = False
    # How many of its gradients had which outcome.
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("applied", "stale", "repeated"), 0))

    def __repr__(self):
        options = f"{self.limits} {self.worker} {self.encoding} finite={self.finite}"
        return f"<{self.living.name} {self.living.model.schema} {self.living.model.options} {options}>"

    @property
    def gone(self):
        """The error of every call, once the handle is closed or the accumulator deleted."""
        if self.closed:
            return redisacc.CancelledError
        return None if self.living.alive else redisacc.NotFoundError


class Unfinished(Exception):
    """Raised inside a block, so that its round isn't acknowledged."""


class Accumulators(Machine):
    OPERATIONS: ClassVar = {
        "apply": 8,
        "apply_anything": 8,
        "take": 8,
        "takers_wait": 2,
        "graces": 4,
        "recover": 3,
        "set_quorum": 2,
        "set_quorum_while_a_take_waits": 1,
        "set_global_step": 2,
        "time_passes": 1,
        "peek": 2,
        "look": 2,
        "open": 4,
        "close": 1,
        "delete": 1,
    }

    def __init__(self, *where):
        super().__init__(*where)
        self.names = {}
        self.opened = []

    def end(self):
        for handle in self.opened:
            handle.acc.close()
        super().end()

    # Opening, closing and deleting

    def _open(self, m, name, client, given=-1, **options):
        """Opens an accumulator as a model describes it. given: a bit for each option that is not left out."""
        asked = [option for place, option in enumerate(m.options) if given >> place & 1]
        one_per = {"once_per_worker": m.once_per_worker, "order": m.order, "partitions": m.partitions}
        options |= {option: value for option, value in one_per.items() if option in asked}
        if "staleness" in asked:
            options["staleness"] = redisacc.Staleness(m.max_staleness, m.staleness_weight)
        if "buffer" in asked:
            options["limits"] = dataclasses.replace(options.get("limits", IN_PLACE), buffer=m.buffer)
        rows = {} if m.kind == "dense" else {"rows": m.sparse_mean}
        options["mean"] = redisacc.Mean(m.normalize if "mean" in asked else None, **rows)
        options |= {"shared_name": name, "reduction_type": m.reduction}
        schema = (m.dtype, m.shape)
        kind = redisacc.SparseConditionalAccumulator if m.kind == "sparse" else redisacc.ConditionalAccumulator
        if m.kind == "tree":
            spec = {
                path: redisacc.Sparse(dtype, shape) if kind == "sparse" else (dtype, shape)
                for path, (kind, dtype, shape) in m.leaves.items()
            }
            options["mean"] = dataclasses.replace(options["mean"], missing=m.missing)
            schema, kind = (model.nested(spec),), redisacc.TreeAccumulator
        return self.open_at(client, kind, *schema, **options)

    def _handle(
        self,
        living,
        client,
        limits,
        worker,
        encoding=None,
        given=-1,
        *,
        finite=False,
    ):
        if "float32" not in living.model.dtypes or limits is FIVE:
            encoding = None
        options = {"limits": limits, "worker": worker, "encoding": encoding, "finite": finite}
        acc = self._open(living.model, living.name, client, given, **options)
        handle = Handle(acc, living, limits, worker, encoding, finite)
        self.opened.append(handle)
        return handle

    def _pick(self):
        """One of the handles, mostly one that is of use."""
        usable = [handle for handle in self.opened if handle.gone is None]
        others = [handle for handle in self.opened if handle.gone is not None]
        return self.draw.choice(others if others and self.happens(0.05) else usable)

    def _handles(self, living):
        return [handle for handle in self.opened if handle.living is living and handle.gone is None]

    def begin(self):
        shapes = {"sparse": ((9, 2), (9, None)), "dense": SHAPES["dense"], "tree": TREES}
        for kind, decided in zip(shapes, self.draw.sample(DECIDED, len(shapes)), strict=True):
            name = kind[0]
            m = random_accumulator(self.draw, kind, self.draw.choice(shapes[kind]), decided)
            living = self.names[name] = Living(name, m)
            encoding = self.draw.choice(ENCODINGS)
            self._handle(living, 0, self.draw.choice(LIMITS), WORKERS[0])
            self._handle(living, 1, self.draw.choice(LIMITS), WORKERS[1], encoding)
            self._handle(living, 2, self.draw.choice(LIMITS[2:]), WORKERS[2], encoding)

    def open(self):
        name, client = self.draw.choice(NAMES), self.draw.randrange(3)
        asked = random_accumulator(self.draw, self.draw.choice(("dense", "sparse", "tree")))
        given = self.draw.getrandbits(len(asked.options))
        living = self.names.get(name)
        if living is None:
            living = Living(name, asked)
            if name is not None:
                self.names[name] = living
            given = -1
        elif self.happens(0.5):
            if self.happens(0.5):
                # Another one in what may be left out, at most.
                asked = dataclasses.replace(living.model, **{name: getattr(asked, name) for name in DECIDABLE})
                if not asked.dtypes.isdisjoint(model.INTEGERS):
                    asked.staleness_weight = "constant"
            found, wanted = living.model.options, asked.options
            named = [option for place, option in enumerate(found) if given >> place & 1]
            differs = [option for option in named if found[option] != wanted[option]]
            if asked.buffer is None and "buffer" in differs:
                differs.remove("buffer")
            # It implies the other one.
            if "order" in named and asked.order == "worker" and not living.model.once_per_worker:
                differs.append("once_per_worker")
            if differs or living.model.schema != asked.schema:
                with pytest.raises(redisacc.InvalidArgumentError, match="was created as something else"):
                    self._open(asked, name, client, given)
                self.compare(living)
                return
        limits, worker, encoding = self.draw.choice(LIMITS), self.draw.choice(WORKERS), self.draw.choice(ENCODINGS)
        self._handle(living, client, limits, worker, encoding, given, finite=self.happens(0.3))

    def close(self):
        """A private accumulator ends with its handle."""
        handle = self._pick()
        if handle.living.name is None or len(self._handles(handle.living)) > 1 or handle.gone:
            handle.acc.close()
            handle.closed = True
            handle.living.alive &= handle.living.name is not None

    def delete(self):
        handle = self._pick()
        if handle.closed or (len(self.names) == 1 and handle.living.name in self.names):
            return
        handle.acc.delete()
        if handle.living.alive:
            handle.living.alive = False
            self.names.pop(handle.living.name, None)

    # Applying

    def apply(self):
        """Gradients of several workers that can be accepted, and overlap."""
        living = self._pick().living
        handles = self._handles(living) or self.opened
        several = self.draw.sample(handles, min(self.draw.randint(1, 4), len(handles)))
        if living.model.buffer and self.happens(0.3):
            # Enough to compact.
            several = self.draw.choices([one for one in handles if one.limits is not IN_PLACE] or handles, k=10)
        for handle in several:
            self._random_gradient(handle, 0, faults=0)
        if self.happens(0.4):
            self._peek(handles[0])

    def apply_anything(self):
        """Gradients of the right dtype, often of another step or shape than the round's."""
        for _ in range(self.draw.randint(1, 3)):
            self._random_gradient(self._pick(), self.draw.choice([0, 0, 1, 5, -1, -3]), faults=0.2)

    def _random_gradient(self, handle, step, faults):
        rng, m, count = self.rng, handle.living.model, self.draw.randint(0 if faults else 1, 4)
        local_step = min(max(m.step + step, -(2**63)), 2**63 - 1)
        elements = 0
        if m.kind == "tree":
            arguments = (self._random_tree(rng, m, count, faults),)
        elif m.kind == "sparse":
            arguments = self._random_rows(rng, m, count, faults)
        else:
            shape = tuple(3 if dim is None else dim for dim in (m.shape if m.shape is not None else (2,)))
            if m.count and rng.random() >= faults:
                shape = m.round_shape
            elif faults and (m.shape is None or rng.random() < faults):
                shape = tuple(int(dim) for dim in rng.integers(0, 4, int(rng.integers(0, 3))))
            arguments = (model.numbers(rng, m.dtype, shape),)
            elements = arguments[0].size
        how = {"weight": self._weight(rng, m)}
        if rng.random() < 0.2:
            how["metrics"] = {"loss": float(rng.integers(-5, 5))}
        self._apply(handle, arguments, local_step, elements, how)

    @staticmethod
    def _weight(rng, m):
        """1 in most cases, and nearly always for integers, which accept no other."""
        has_weight = rng.random() < (0.4 if m.dtypes.isdisjoint(model.INTEGERS) else 0.05)
        return float(rng.choice([0.5, 2.0, 0.1, 3.7, 1e-6])) if has_weight else 1.0

    def _random_rows(self, rng, m, count, faults):
        row_rank = max(len(m.shape) - 1, 0) if m.shape is not None else int(rng.integers(0, 2))
        # Values may have more dimensions than declared.
        row_rank += bool(faults and not m.buffer and rng.random() < faults)
        row = tuple(int(rng.choice([2, 2, 2, 3, 0])) if faults else 2 for _ in range(row_rank))
        if m.count and rng.random() >= faults:
            row = m.round_shape or ()
        bounded = (m.shape and m.shape[0] is not None) or m.buffer
        top = 9 if bounded or not faults else int(rng.choice([9, 2**63 - 1]))
        indices = rng.permutation(9)[:count] if top == 9 else rng.integers(0, top, count)
        if count > 1 and rng.random() < 0.3:
            # Twice, not three times: the order of addition is not promised for the rows of one gradient.
            indices[-1] = indices[0]
        grad_shape = None
        if m.shape and rng.random() < 0.3:
            grad_shape = [9 if dim is None or rng.random() < faults / 4 else dim for dim in m.shape]
        return indices, model.numbers(rng, m.dtype, (count, *row)), grad_shape

    def _random_tree(self, rng, m, count, faults):
        """Leaves by path; some of them missing, and some of another shape or with an index that is out of bounds."""
        grad = {}
        for path, (kind, dtype, shape) in m.leaves.items():
            wrong = rng.random() < faults / 2
            if rng.random() < 0.2:
                grad[path] = None
            elif kind == "dense":
                grad[path] = model.numbers(rng, dtype, (*shape, 1) if wrong else shape)
            else:
                indices = rng.permutation(9)[:count]
                if count > 1 and rng.random() < 0.3:
                    indices[-1] = indices[0]
                row = (3,) if wrong else shape[1:]
                grad[path] = (indices, model.numbers(rng, dtype, (count, *row)))
        return grad

    def _apply(self, handle, arguments, local_step, elements, how):
        living, m = handle.living, handle.living.model
        given = (model.nested(arguments[0]),) if m.kind == "tree" else arguments
        options = {**how, "local_step": local_step}
        if handle.gone:
            with pytest.raises((handle.gone, redisacc.InvalidArgumentError)):
                handle.acc.apply_grad(*given, **options)
            return
        # An element that is multiplied counts twice.
        is_weighed = how["weight"] != 1 or m.staleness_weight != "constant"
        way = self._way(handle, elements * (2 if is_weighed else 1))
        how |= {"encoding": handle.encoding or "float32", "encoded": way == "buffered", "finite": handle.finite}
        if way is not None and self.happens(0.1):
            self._compare_with_what_is_sent(handle, arguments, given, how)
        try:
            expected = m.apply(*arguments, local_step, handle.worker, **how)
        except model.Refused as refusal:
            error = redisacc.NotFiniteError if isinstance(refusal, model.NotFinite) else redisacc.InvalidArgumentError
            with pytest.raises(error):
                handle.acc.apply_grad(*given, **options)
        else:
            result = handle.acc.apply_grad(*given, **options)
            actual = (result.outcome, result.global_step, result.num_accumulated)
            assert actual == (expected.outcome, expected.global_step, expected.num_accumulated)
            assert bool(result) == (expected.outcome == "applied")
            handle.outcomes[result.outcome] += 1
            if result:
                # Compacting adds some gradients of the middle to each other first.
                living.ways |= {way, "compacted"} if m.buffer else {way}
            self._serve(living)
        self.compare(living)

    def _compare_with_what_is_sent(self, handle, arguments, given, how):
        """A handle can say beforehand what a take of the gradient alone would return."""
        alone = dataclasses.replace(handle.living.model, round=[], max_staleness=0, order="arrival", normalize="count")
        try:
            alone.apply(*arguments, alone.step, "", **{**how, "finite": False})
        except model.Refused:
            return
        alone.round[0].weight = 1.0
        sent = handle.acc.as_encoded(*given[:2], weight=how["weight"])
        self._compare_gradient(handle.living, sent, alone.peek(), {"alone"})

    def _way(self, handle, elements):
        m = handle.living.model
        if not self.server.real or handle.limits.in_place == 0 or m.order == "worker":
            return "buffered"
        if not m.dtypes.isdisjoint({"int64", "uint64"}):
            return "buffered"
        if handle.limits is FIVE and m.kind != "dense":
            # It depends on how many rows there are.
            return None
        return "buffered" if handle.limits is FIVE and elements > 5 else "in place"

    # Steps

    def set_global_step(self):
        handle, step = self._pick(), self.draw.choice(STEPS)
        if handle.gone:
            with pytest.raises(handle.gone):
                handle.acc.set_global_step(step)
            return
        handle.living.model.set_global_step(step)
        handle.acc.set_global_step(step)
        self.compare(handle.living)

    # Taking

    def take(self):
        handle, grace, most = self._pick(), {}, {}
        required = None if self.happens(0.2) else self.draw.randint(1, max(handle.living.model.count, 2))
        if self.happens(0.2):
            grace = {"grace": self.draw.choice([0, 60, 150])}
            if self.happens(0.5):
                most = {"most": self.draw.randint(1, handle.living.model.count + 2)}
        weight = {"min_weight": self.draw.choice([0.5, 2.1])} if self.happens(0.3) else {}
        self._take(handle, required, {**most, **grace}, weight)

    def graces(self):
        """Takes with a grace, gradients and time, all at one accumulator."""
        handle, follows = self._pick(), self.happens(0.4)
        living, m = handle.living, handle.living.model
        if handle.gone:
            return
        quorum = {"least": self.draw.randint(1, 2), "most": self.draw.choice([None, 2, 3]), "grace": 60}
        if follows:
            handle.acc.set_quorum(**quorum)
            m.set_quorum(**quorum)
        weight = {"min_weight": self.draw.choice([0.5, 2.1])} if self.happens(0.3) else {}
        number = self.draw.randint(1, m.count + 2)
        for _ in range(8):
            required = None if follows else number + self.happens(0.2)
            most = {} if follows or self.happens(0.5) else {"most": required + self.draw.randint(0, 2)}
            now = self.draw.random()
            if now < 0.4:
                self._take(handle, required, {} if follows else {**most, "grace": 60}, weight)
            elif now < 0.8:
                self._random_gradient(self.draw.choice(self._handles(living)), 0, faults=0)
            else:
                self.time_passes()

    def _take(self, handle, required, options, weight):
        living, acc, how = handle.living, handle.acc, self.draw.choice(["grad", "slices", "block", "stray"])
        if required is None and options:
            with pytest.raises(redisacc.InvalidArgumentError, match="needs num_required"):
                acc.take_grad(required, timeout=0, **options)
            return
        if required is not None and options.get("most", required) < required:
            with pytest.raises(redisacc.InvalidArgumentError, match="most must be in"):
                acc.take_grad(required, timeout=0, **options)
            return
        options = {**options, **weight}
        if handle.gone:
            with pytest.raises(handle.gone):
                acc.take_grad(required, timeout=0, **options)
            return
        ways = set(living.ways)
        try:
            expected = living.model.take(required, **options)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError, match="num_required is missing"):
                acc.take_grad(required, timeout=0)
            self.compare(living)
            return
        except model.Insufficient:
            with pytest.raises(redisacc.TakeTimeoutError) as failure:
                acc.take_grad(required, timeout=0, **options)
            error = failure.value
            wanted = required or living.model.quorum["least"] or 1
            assert (error.num_required, error.num_accumulated) == (wanted, living.model.count)
            assert error.workers == living.model.workers
            assert error.min_weight == weight.get("min_weight", 0)
            assert error.total_weight == pytest.approx(living.model.total_weight)
            self.compare(living)
            return
        except model.Overflowing:
            with pytest.raises(redisacc.RedisAccError, match="the largest int64"):
                acc.take_grad(required, timeout=10, **options)
            self.compare(living)
            return
        living.ways.clear()
        if how == "grad" or (how == "slices" and not living.sparse):
            self._compare_gradient(living, acc.take_grad(required, timeout=10, **options), expected, ways)
        elif how == "slices":
            self._compare_gradient(
                living, acc.take_indexed_slices_grad(required, timeout=10, **options), expected, ways
            )
        elif how == "block":
            with acc.take(required, timeout=10, **options) as taken:
                self._compare_round(living, taken, expected, ways)
        else:
            with pytest.raises(Unfinished) as interrupted, acc.take(required, timeout=10, **options) as taken:
                raise Unfinished(taken)
            self._compare_round(living, interrupted.value.args[0], expected, ways)
            living.stray.append((expected, ways))
        self.compare(living)

    def time_passes(self):
        """A grace of 60 seconds ends, and one of 150 seconds does not yet."""
        if all(handle.living.model.grace_began is None for handle in self.opened):
            return
        self.clock.advance(100)
        for living in {id(handle.living): handle.living for handle in self.opened}.values():
            living.model.now += 100

    def takers_wait(self):
        """They are served in order of arrival, while gradients come from all sides."""
        handle, beyond = self._pick(), [self.draw.randint(1, 2) for _ in range(self.draw.randint(1, 3))]
        living, m = handle.living, handle.living.model
        if handle.gone or m.step > model.STEP_MAX - len(beyond):
            return
        useful = [one for one in self._handles(living) if m.order != "worker" or one.worker.startswith("worker ")]
        most = len({one.worker for one in useful}) if m.once_per_worker else m.count + 2
        required = [min(number + (0 if place else m.count), most) for place, number in enumerate(beyond)]
        if required[0] <= m.count:
            return
        with ThreadPoolExecutor(len(required)) as pool:
            for number in required:
                living.queue.append((number, pool.submit(handle.acc.take_grad, number, timeout=20)))
                while len(handle.acc.info().waiting) < len(living.queue):
                    assert not living.queue[-1][1].done(), living.queue[-1][1].result()
            try:
                while living.queue:
                    self._random_gradient(self.draw.choice(useful), 0, faults=0)
            except BaseException:
                # Nobody serves the others.
                handle.acc.close()
                raise

    def _serve(self, living):
        """Compares what the first take in the queue returns, if there is enough for it."""
        if living.queue and living.queue[0][0] <= living.model.count:
            number, take = living.queue.pop(0)
            ways = set(living.ways)
            living.ways.clear()
            self._compare_gradient(living, take.result(), living.model.take(number), ways)

    def set_quorum(self):
        handle = self._pick()
        values = {"least": [None, 1, 2, 3], "most": [None, 1, 2, 4, 5], "grace": [None, None, 0, 60]}
        change = {name: self.draw.choice(some) for name, some in values.items() if self.happens(0.6)}
        if handle.gone:
            with pytest.raises(handle.gone):
                handle.acc.set_quorum(**change)
            return
        try:
            handle.living.model.set_quorum(**change)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError, match="Change them together"):
                handle.acc.set_quorum(**change)
        else:
            handle.acc.set_quorum(**change)
        self.compare(handle.living)

    def set_quorum_while_a_take_waits(self):
        """A crew that shrinks to those who have contributed already."""
        handle, beyond = self._pick(), self.draw.randint(1, 2)
        living, acc, m = handle.living, handle.acc, handle.living.model
        if handle.gone or not m.count or m.step == model.STEP_MAX:
            return
        # A handle of another client, too, sees the change.
        other = self._handles(living)[-1].acc
        acc.set_quorum(least=m.count + beyond, most=None, grace=None)
        with ThreadPoolExecutor(1) as pool:
            take = pool.submit(acc.take_grad, timeout=20)
            while not acc.info().waiting:
                assert not take.done(), take.result()
            other.set_quorum(least=m.count)
            gradient = take.result()
        m.set_quorum(least=m.count, most=None, grace=None)
        ways = set(living.ways)
        living.ways.clear()
        self._compare_gradient(living, gradient, m.take(None), ways)
        self.compare(living)

    def recover(self):
        """The oldest round that was taken and not acknowledged, or the one of a token."""
        stray = [one for one in self.opened if one.living.stray and not one.gone]
        handle = self.draw.choice(stray) if stray and self.happens(0.8) else self._pick()
        living = handle.living
        if handle.gone:
            with pytest.raises(handle.gone):
                handle.acc.recover().__enter__()
            return
        held = handle.acc.info().unacknowledged
        token = self.draw.choice(held).token if held and self.happens(0.5) else None
        if not held:
            with handle.acc.recover() as taken:
                assert taken is None
            return
        try:
            with handle.acc.recover(token) as taken:
                # Rounds of one millisecond may come in any order.
                steps = [expected.global_step for expected, _ in living.stray]
                place = next(
                    i
                    for i, (expected, _) in enumerate(living.stray)
                    if (expected.global_step, expected.num_accumulated, expected.workers)
                    == (taken.global_step, taken.num_accumulated, taken.workers)
                )
                if token is not None:
                    assert taken.global_step == next(one.global_step for one in held if one.token == token)
                if steps.count(taken.global_step) == 1:
                    self._compare_round(living, taken, *living.stray[place])
                if self.happens(0.3):
                    raise Unfinished
            del living.stray[place]
        except Unfinished:
            pass
        self.compare(living)

    # Reading

    def peek(self):
        self._peek(self._pick())

    def _peek(self, handle):
        living = handle.living
        if handle.gone:
            with pytest.raises(handle.gone):
                handle.acc.peek()
            return
        expected = living.model.peek()
        looked = handle.acc.peek()
        if expected.gradient is None:
            assert looked.gradient is None
            assert (looked.num_accumulated, looked.workers) == (0, {})
        else:
            self._compare_round(living, looked, expected, living.ways)

    def look(self):
        handle = self._pick()
        living, acc = handle.living, handle.acc
        if handle.gone:
            for call in (acc.num_accumulated, acc.global_step, acc.info, acc.quorum, lambda: acc.wait_for_step(0)):
                with pytest.raises(handle.gone):
                    call()
            return
        m = living.model
        assert acc.num_accumulated() == m.count
        assert acc.global_step() == acc.wait_for_step(m.step, timeout=0) == m.step
        if m.step < model.STEP_MAX:
            with pytest.raises(redisacc.WaitTimeoutError):
                acc.wait_for_step(m.step + 1, timeout=0)
        info = acc.info()
        assert (info.kind, info.dtype, info.shape, info.reduction_type) == (m.kind, m.dtype, m.shape, m.reduction)
        assert (info.applied, info.stale, info.repeated) == (m.applied, m.stale, m.repeated)
        assert (info.takes, info.duplicates) == (m.takes, 0)
        assert info.round_shape == (m.round_shape if m.count else None)
        assert (info.max_staleness, info.staleness_weight) == (m.max_staleness, m.staleness_weight)
        assert (info.normalize, info.once_per_worker, info.order) == (m.normalize, m.once_per_worker, m.order)
        assert len(info.partitions) == (m.partitions if m.partitions > 1 else 0)
        if living.ways == {"buffered"}:
            assert info.buffered == m.count
        if m.buffer:
            assert info.buffered_bytes <= info.buffer_limit == m.buffer
        # Takes of other threads have no part in it.
        assert dataclasses.asdict(acc.settle()) == {**handle.outcomes, "unknown": 0}

    # Comparing

    def compare(self, living):
        """The accumulator, as one of its handles sees it."""
        info, m = self._handles(living)[0].acc.info(), living.model
        assert (info.global_step, info.num_accumulated, info.workers) == (m.step, m.count, m.workers)
        assert info.staleness == m.staleness
        assert info.total_weight == pytest.approx(m.total_weight)
        assert dataclasses.asdict(info.quorum) == {**m.quorum, "min_weight": None}
        assert [taker.num_required for taker in info.waiting] == [number for number, _ in living.queue]
        assert len(info.unacknowledged) == len(living.stray)

    def _compare_round(self, living, taken, expected, ways):
        assert (taken.global_step, taken.num_accumulated) == (expected.global_step, expected.num_accumulated)
        assert taken.workers == expected.workers
        assert (taken.staleness, taken.total_weight) == (expected.staleness, expected.total_weight)
        assert taken.metrics == pytest.approx(expected.metrics)
        self._compare_gradient(living, taken.gradient, expected, ways)

    def _compare_gradient(self, living, actual, expected, ways):
        def same(array, wanted, magnitude, dtype):
            if len(ways) == 1 and None not in ways:
                model.assert_same(array, wanted)
            else:
                model.assert_close(array, wanted, magnitude, dtype)

        def compare(found, wanted, magnitude, dtype):
            if not isinstance(wanted, tuple):
                same(found, wanted, magnitude, dtype)
                return
            if isinstance(found, redisacc.IndexedSlices):
                found = found.indices, found.values, found.dense_shape
            indices, values, shape = wanted
            model.assert_same(np.asarray(found[0]), indices)
            same(found[1], values, magnitude, dtype)
            assert list(found[2]) == list(shape)

        m = living.model
        if m.kind != "tree":
            compare(actual, expected.gradient, expected.magnitude, m.dtype)
            return
        found = model.flat(actual)
        assert found.keys() == expected.gradient.keys()
        for path, wanted in expected.gradient.items():
            if wanted is None:
                assert found[path] is None
            else:
                compare(found[path], wanted, expected.magnitude[path], m.leaves[path][1])

    def check(self):
        assert self.clients[1].smembers("redisacc:names") == {name.encode() for name in self.names}


@pytest.mark.servers("fakeredis", "valkey")
@pytest.mark.timeout(3600)
def test_random_operations(server, clock, request, everything, caplog):
    caplog.set_level("ERROR")  # lowered steps warn
    run(Accumulators, request, 12)
