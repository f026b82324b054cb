"""Random sequences of operations on several handles of several names, against the plain numpy model.

One example is a database of its own: some names, under each of them one accumulator after the other, and handles on
them that differ in client, worker and way of storing gradients. After every operation the accumulator's state is
compared with the model's; results are compared bit for bit wherever the order of addition is determined.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import model
from support.leaks import leftovers
from support.servers import ServerUnderTest

import redisacc
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place

NAMES = ("a", "b", "c", "t")
# 29: gradients of at most five elements are added in place (a row counts for 24 more), and larger ones buffered, in one
# and the same round.
FIVE = 5 + in_place.ROW_COST
LIMITS = (0, FIVE, 10**9)
SHAPES: dict[str, tuple[Any, ...]] = {
    "dense": ((), (3,), (None,), (2, 3), (None, 3), (0,), None),
    "sparse": ((), (9,), (None,), (9, 2), (None, None), (9, None, 2), None),
}
# Leaves of trees by path: kind, dtype and shape. None stands for the dtype of the example.
TREES: tuple[dict[str, Any], ...] = (
    {".": ("dense", None, (3,))},
    {"a": ("dense", None, (2,)), "b": ("sparse", None, (9, 2))},
    {"0": ("dense", "float32", ()), "1/x": ("dense", None, (2, 2)), "1/y": ("sparse", "float32", (None,))},
    {"k/0": ("sparse", None, (9, 2)), "k/1": ("sparse", "int32", (None,))},
)
WORKERS = ("ann", "bob")
REDUCTIONS = ("MEAN", "SUM")
# How many steps late a gradient may be.
LATE = (0, 0, 1, 3, 1000)
STEPS = (0, 1, 7, -4, 2**53, 2**53 + 1, -(2**63), 2**63 - 2, 2**63 - 1, 2**63 - 1)
PICK = st.integers(0, 12 * 5040 - 1)


@dataclass
class Living:
    """An accumulator, according to the model."""

    name: str
    model: Any
    alive: bool = True
    # Which ways of storing gradients the current round has seen; None: unknown.
    ways: set[str | None] = field(default_factory=set)
    stray: list[model.ModelRound] = field(default_factory=list)  # taken, never acknowledged; oldest first

    @property
    def sparse(self) -> bool:
        return bool(self.model.kind == "sparse")


@dataclass
class Handle:
    acc: Any
    living: Living
    limit: int
    worker: str

    def __repr__(self) -> str:
        return f"<{self.living.name} {self.living.model.schema} limit={self.limit} {self.worker}>"


def tree_model(dtype: str, which: int, reduction: str) -> model.Tree:
    """A tree of a number from 0 to 6."""
    leaves = {path: (kind, of or dtype, shape) for path, (kind, of, shape) in TREES[which % len(TREES)].items()}
    return model.Tree.of(leaves, reduction, ("zero", "skip")[which % 2], ("round", "index")[which // 2 % 2])


def weigh_by_staleness(m: Any, late: int, which: int) -> None:
    """Sets how late gradients may be, what that does to their weights, and what means are divided by."""
    m.max_staleness = late
    if late and m.dtypes.isdisjoint(model.INTEGERS):
        m.staleness_weight = ("constant", "inverse_sqrt", tuple(1 / (1 + steps) for steps in range(late + 1)))[
            which % 3
        ]
    m.normalize = ("weights", "count")[which // 3]
    if m.kind == "tree":
        m._clear()


class Unfinished(Exception):
    """Raised inside a take() block, so that its round isn't acknowledged."""


class Accumulators(RuleBasedStateMachine):
    server: ServerUnderTest

    def __init__(self) -> None:
        super().__init__()
        self.chosen: Handle | None = None
        self.names: dict[str, Living] = {}
        self.opened: list[Handle] = []
        # The servers' own tests begin with an empty database, and so does every example.
        self.clients = [self.server.client(), self.server.client()]
        self.clients[0].flushall()
        # The smallest buffered gradients are inline, the others in parts.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(buffered_format, "INLINE_BYTES", 24)
        self.patch.setattr(buffered_format, "ANNOUNCED_BYTES", 40)

    def teardown(self) -> None:
        self.patch.undo()
        for handle in self.opened:
            handle.acc.close()
        assert leftovers(self.clients[0]) == []
        self.server.close()

    # Opening and deleting

    def _open(self, m: Any, name: str, **options: Any) -> Any:
        """Opens an accumulator as a model describes it."""
        options |= {"shared_name": name, "reduction_type": m.reduction, "mean": redisacc.Mean(by=m.normalize)}
        options |= {"staleness": redisacc.Staleness(m.max_staleness, m.staleness_weight)}
        if m.kind == "tree":
            spec = {
                path: redisacc.Sparse(dtype, shape) if kind == "sparse" else (dtype, shape)
                for path, (kind, dtype, shape) in m.leaves.items()
            }
            options |= {"mean": redisacc.Mean(m.normalize, m.sparse_mean, m.missing)}
            return redisacc.TreeAccumulator(model.nested(spec), **options)
        kind = redisacc.SparseConditionalAccumulator if m.kind == "sparse" else redisacc.ConditionalAccumulator
        return kind(m.dtype, m.shape, **options)

    def _handle(self, living: Living, client: int, limit: int, worker: str) -> Handle:
        options = {"redis": self.clients[client], "limits": redisacc.Limits(in_place=limit), "worker": worker}
        acc = self._open(living.model, living.name, **options)
        handle = Handle(acc, living, limit, worker)
        self.opened.append(handle)
        return handle

    def _pick(self, number: int) -> Handle:
        """One of the handles, mostly one whose accumulator still exists."""
        living = [handle for handle in self.opened if handle.living.alive]
        dead = [handle for handle in self.opened if not handle.living.alive]
        some = dead if dead and number % 12 == 11 else living
        return some[number // 12 % len(some)]

    @initialize(
        sparse=st.sampled_from(model.DTYPES),
        dense=st.sampled_from(model.DTYPES),
        tree=st.tuples(st.sampled_from(model.DTYPES), st.integers(0, 6)),
        reduction=st.sampled_from(REDUCTIONS),
        late=st.sampled_from(LATE),
        rule=st.integers(0, 5),
    )
    def begin(self, sparse, dense, tree, reduction, late, rule):
        self.names["a"] = Living("a", model.Sparse(sparse, (9, None), reduction))
        self.names["b"] = Living("b", model.Dense(dense, (None, 3), reduction))
        self.names["t"] = Living("t", tree_model(*tree, reduction))
        for name in ("a", "t"):
            weigh_by_staleness(self.names[name].model, late, rule)
        for name in ("a", "b", "t"):
            for client, limit, worker in ((0, 10**9, "ann"), (1, 10**9, "bob"), (1, 0, "bob")):
                self._handle(self.names[name], client, limit, worker)

    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["dense", "sparse", "tree"]),
        dtype=st.sampled_from(model.DTYPES),
        which=st.integers(0, 6),
        reduction=st.sampled_from(REDUCTIONS),
        late=st.sampled_from(LATE),
        rule=st.integers(0, 5),
        client=st.integers(0, 1),
        limit=st.sampled_from(LIMITS),
        worker=st.sampled_from(WORKERS),
    )
    def open(self, name, kind, dtype, which, reduction, late, rule, client, limit, worker):
        if kind == "tree":
            asked = tree_model(dtype, which, reduction)
        else:
            asked = {"dense": model.Dense, "sparse": model.Sparse}[kind](dtype, SHAPES[kind][which], reduction)
        weigh_by_staleness(asked, late, rule)
        living = self.names.get(name)
        if living is None:
            living = self.names[name] = Living(name, asked)
        elif living.model.schema != asked.schema:
            with pytest.raises(redisacc.InvalidArgumentError, match="was created as something else"):
                self._open(asked, name, redis=self.clients[client])
            self.compare(name)
            return
        self._handle(living, client, limit, worker)

    @rule(
        name=st.sampled_from(NAMES),
        client=st.integers(0, 1),
        limit=st.sampled_from(LIMITS),
        worker=st.sampled_from(WORKERS),
    )
    def reopen(self, name, client, limit, worker):
        if name in self.names:
            self._handle(self.names[name], client, limit, worker)

    @precondition(lambda self: len(self.names) > 1)
    @rule(pick=PICK, sure=st.integers(0, 2))
    def delete(self, pick, sure):
        handle = self._pick(pick)
        if sure == 0 and handle.living.alive:
            handle.acc.delete()
            handle.living.alive = False
            del self.names[handle.living.name]

    # Applying

    @rule(pick=PICK, seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4))
    def apply(self, pick, seed, count):
        """Gradients that can be accepted, and overlap."""
        self._random_gradient(self._pick(pick), seed, 0, count, faults=0)

    @rule(
        pick=PICK,
        seed=st.integers(0, 2**32 - 1),
        step=st.sampled_from([0, 0, 1, 5, -1, -3]),
        count=st.integers(0, 4),
    )
    def apply_anything(self, pick, seed, step, count):
        """Gradients of the right dtype, often of another step or shape than the round's."""
        self._random_gradient(self._pick(pick), seed, step, count, faults=0.2)

    def _random_gradient(self, handle: Handle, seed: int, step: int, count: int, faults: float) -> None:
        rng = np.random.default_rng(seed)
        m = handle.living.model
        local_step = min(max(m.step + step, -(2**63)), 2**63 - 1)
        if m.kind == "tree":
            arguments: tuple[Any, ...] = (self._random_tree(rng, m, count, faults),)
            self._apply(handle, arguments, local_step, elements=0, once=rng.random() < 0.2, weight=self._weight(rng, m))
            return
        if handle.living.sparse:
            row_rank = max(len(m.shape) - 1, 0) if m.shape is not None else int(rng.integers(0, 2))
            row = tuple(int(rng.choice([2, 2, 2, 3, 0])) if faults else 2 for _ in range(row_rank))
            if m.count and rng.random() >= faults:
                row = m.round_shape
            top = 9 if (m.shape and m.shape[0] is not None) or not faults else int(rng.choice([9, 2**63 - 1]))
            indices = rng.permutation(9)[:count] if top == 9 else rng.integers(0, top, count)
            if count > 1 and rng.random() < 0.3:
                # Twice, not three times: the order of addition is not promised for the rows of one gradient.
                indices[-1] = indices[0]
            grad_shape = None
            if m.shape and rng.random() < 0.3:
                grad_shape = [9 if dim is None else dim for dim in m.shape]
            arguments = (indices, model.numbers(rng, m.dtype, (count, *row)), grad_shape)
        else:
            shape = tuple(3 if dim is None else dim for dim in (m.shape if m.shape is not None else (2,)))
            if m.count and rng.random() >= faults:
                shape = m.round_shape
            elif faults and (m.shape is None or rng.random() < faults):
                shape = tuple(int(dim) for dim in rng.integers(0, 4, int(rng.integers(0, 3))))
            arguments = (model.numbers(rng, m.dtype, shape),)
        elements = arguments[-1 - handle.living.sparse].size
        once, weight = rng.random() < 0.2, self._weight(rng, m)
        self._apply(handle, arguments, local_step, elements=elements, once=once, weight=weight)

    @staticmethod
    def _weight(rng: np.random.Generator, m: Any) -> float:
        """1 in most cases, and nearly always for integers, which accept no other."""
        has_weight = rng.random() < (0.4 if m.dtypes.isdisjoint(model.INTEGERS) else 0.05)
        return float(rng.choice([0.5, 2.0, 0.1, 3.7, 1e-6])) if has_weight else 1.0

    def _random_tree(self, rng: np.random.Generator, m: model.Tree, count: int, faults: float) -> dict[str, Any]:
        """Leaves by path; some of them missing, and some of another shape or with an index that is out of bounds."""
        grad: dict[str, Any] = {}
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

    def _apply(
        self,
        handle: Handle,
        arguments: tuple[Any, ...],
        local_step: Any,
        *,
        elements: int,
        once: bool,
        weight: float,
    ) -> None:
        living, options = handle.living, {"local_step": local_step, "once_per_worker": once, "weight": weight}
        given = (model.nested(arguments[0]),) if living.model.kind == "tree" else arguments
        if not living.alive:
            with pytest.raises((redisacc.NotFoundError, redisacc.InvalidArgumentError)):
                handle.acc.apply_grad(*given, **options)
            return
        try:
            expected = living.model.apply(*arguments, local_step, handle.worker, once, weight)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError):
                handle.acc.apply_grad(*given, **options)
        else:
            result = handle.acc.apply_grad(*given, **options)
            actual = (result.outcome, result.global_step, result.num_accumulated)
            assert actual == (expected.outcome, expected.global_step, expected.num_accumulated)
            assert bool(result) == (expected.outcome == "applied")
            if result:
                # An element that is multiplied counts twice.
                is_weighed = weight != 1 or living.model.staleness_weight != "constant"
                living.ways.add(self._way(handle, elements * (2 if is_weighed else 1)))
        self.compare(living.name)

    def _way(self, handle: Handle, elements: int) -> str | None:
        m = handle.living.model
        dtypes = [dtype for _, dtype, _ in m.leaves.values()] if m.kind == "tree" else [m.dtype]
        if not self.server.real or handle.limit == 0 or not {"int64", "uint64"}.isdisjoint(dtypes):
            return "buffered"
        if handle.limit == FIVE and m.kind != "dense":
            # It depends on how many rows there are.
            return None
        return "buffered" if handle.limit == FIVE and elements > 5 else "in place"

    BAD_STEPS = (1.0, "1", None, [1], np.array([1]), 2**63, -(2**63) - 1, True, np.float64(2), 1j, object())

    def _apply_at_a_bad_step(self, handle, case):
        step = self.BAD_STEPS[case % len(self.BAD_STEPS)]
        m = handle.living.model
        if m.kind == "tree":
            arguments: tuple[Any, ...] = (model.nested(dict.fromkeys(m.leaves)),)
        else:
            value = np.zeros((1, 2) if handle.living.sparse else (3,), m.storage)
            arguments = ([0], value) if handle.living.sparse else (value,)
        with pytest.raises(redisacc.InvalidArgumentError):
            handle.acc.apply_grad(*arguments, local_step=step)
        if handle.living.alive:
            self.compare(handle.living.name)

    def _apply_something_wrong(self, handle, case):
        case %= 10
        m = handle.living.model
        if m.kind == "tree":
            right = dict.fromkeys(m.leaves)
            path = sorted(right)[case % len(right)]
            whole = model.nested(right)
            wrong = [
                ({"surplus": None, **whole} if isinstance(whole, dict) else [whole],),
                ({},),
                ((whole,),),
                (model.nested({**right, path: "text"}),),
                (model.nested({**right, path: np.zeros((7, 7))}),),
                (model.nested({**right, path: object()}),),
                (model.nested({**right, path: ([-1], [[1, 1]])}),),
                (model.nested({**right, path: ([0.5], [[1, 1]])}),),
                (model.nested({**right, path: (1, 2, 3, 4)}),),
                (model.nested({**right, path: {}}),),
            ][case]
        elif handle.living.sparse:
            storage = m.storage
            rows = np.ones((2, 2), storage)
            wrong = [
                ([-1, 0], rows, None),
                ([0.0, 1.0], rows, None),
                ([np.nan, 1.0], rows, None),
                ([[0, 1]], rows, None),
                ([0], rows, None),
                (0, rows[0], None),
                ([0, 1], storage.type(1), None),
                ([0, 2**63], rows, None),
                ([0, 1], np.array(["x", "y"]), None),
                ([0, 1], rows.astype(object), None),
            ][case]
        else:
            wrong = [
                (np.array(["x"]),),
                (None,),
                ([[1], [2, 3]],),
                (np.array([1, 2, 3], object),),
                (np.array(["2020-01-01"], "datetime64[D]"),),
                (b"bytes",),
                ({"a": 1},),
                (np.zeros(3, [("x", "f4")]),),
                (np.ma.masked_array([1, 2, 3], [0, 1, 0]),),
                (object(),),
            ][case]
        with pytest.raises(redisacc.InvalidArgumentError):
            handle.acc.apply_grad(*wrong)
        if handle.living.alive:
            self.compare(handle.living.name)

    # Steps

    @rule(pick=PICK, step=st.sampled_from(STEPS))
    def set_global_step(self, pick, step):
        handle = self._pick(pick)
        if not handle.living.alive:
            with pytest.raises(redisacc.NotFoundError, match="accumulator"):
                handle.acc.set_global_step(step)
            return
        handle.living.model.set_global_step(step)
        handle.acc.set_global_step(step)
        self.compare(handle.living.name)

    def _set_a_bad_step(self, handle, case):
        step = self.BAD_STEPS[case % len(self.BAD_STEPS)]
        with pytest.raises(redisacc.InvalidArgumentError):
            handle.acc.set_global_step(step)
        if handle.living.alive:
            self.compare(handle.living.name)

    # Taking

    @rule(
        pick=PICK,
        required=st.integers(1, 3) | st.none(),
        how=st.sampled_from(["grad", "slices", "block", "stray"]),
        # An hour never ends here. How a grace ends is tested elsewhere.
        options=st.sampled_from([{}] * 5 + [{"grace": 0}, {"grace": 3600}])
        | st.fixed_dictionaries({"most": st.integers(1, 4), "grace": st.sampled_from([0, 3600, 3600])}),
        weight=st.sampled_from([{}] * 3 + [{"min_weight": 0.5}, {"min_weight": 2.1}]),
    )
    def take(self, pick, required, how, options, weight):
        handle = self._pick(pick)
        living, acc = handle.living, handle.acc
        if required is None and options:
            with pytest.raises(redisacc.InvalidArgumentError, match="needs num_required"):
                acc.take_grad(required, timeout=0, **options)
            return
        if required is not None and options.get("most", required) < required:
            with pytest.raises(redisacc.InvalidArgumentError, match="most must be in"):
                acc.take_grad(required, timeout=0, **options)
            return
        options = {**options, **weight}
        if not living.alive:
            with pytest.raises(redisacc.NotFoundError, match="accumulator"):
                acc.take_grad(required, timeout=0, **options)
            return
        ways = set(living.ways)
        try:
            expected = living.model.take(required, **options)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError, match="num_required is missing"):
                acc.take_grad(required, timeout=0)
            self.compare(living.name)
            return
        except model.Insufficient:
            with pytest.raises(redisacc.TakeTimeoutError) as failure:
                acc.take_grad(required, timeout=0, **options)
            error = failure.value
            wanted = required or living.model.quorum["least"] or 1
            assert (error.num_required, error.num_accumulated) == (wanted, living.model.count)
            assert error.workers == living.model.workers
            assert (error.min_weight, error.total_weight) == (weight.get("min_weight", 0), living.model.total_weight)
            self.compare(living.name)
            return
        except model.Overflowing:
            with pytest.raises(redisacc.RedisAccError, match="the largest int64"):
                acc.take_grad(required, **options)
            self.compare(living.name)
            return
        living.ways.clear()
        if how == "grad" or (how == "slices" and not living.sparse):
            self._compare_gradient(living, acc.take_grad(required, **options), expected, ways)
        elif how == "slices":
            self._compare_gradient(living, acc.take_indexed_slices_grad(required, **options), expected, ways)
        elif how == "block":
            with acc.take(required, **options) as taken:
                self._compare_round(living, taken, expected, ways)
        else:
            with pytest.raises(Unfinished) as interrupted, acc.take(required, **options) as taken:
                raise Unfinished(taken)
            self._compare_round(living, interrupted.value.args[0], expected, ways)
            living.stray.append((expected, ways))
        self.compare(living.name)

    @rule(
        pick=PICK,
        change=st.fixed_dictionaries(
            {},
            optional={
                "least": st.none() | st.integers(1, 4),
                "most": st.none() | st.integers(1, 5),
                "grace": st.sampled_from([None, None, 0, 3600]),
            },
        ),
    )
    def set_quorum(self, pick, change):
        handle = self._pick(pick)
        if not handle.living.alive:
            with pytest.raises(redisacc.NotFoundError):
                handle.acc.set_quorum(**change)
            return
        try:
            handle.living.model.set_quorum(**change)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError, match="Change them together"):
                handle.acc.set_quorum(**change)
        else:
            handle.acc.set_quorum(**change)
        self.compare(handle.living.name)

    @rule(pick=PICK, beyond=st.integers(1, 2))
    def set_quorum_while_a_take_waits(self, pick, beyond):
        """A crew that shrinks to those who have contributed already."""
        handle = self._pick(pick)
        living, acc, m = handle.living, handle.acc, handle.living.model
        if not living.alive or not m.count or m.step == model.STEP_MAX:
            return
        # A handle of another client, too, sees the change.
        other = next(one.acc for one in reversed(self.opened) if one.living is living)
        acc.set_quorum(least=m.count + beyond, most=None, grace=None)
        with ThreadPoolExecutor(1) as pool:
            take = pool.submit(acc.take_grad, timeout=60)
            while not acc.info().waiting:
                assert not take.done(), take.result()
            other.set_quorum(least=m.count)
            gradient = take.result()
        m.set_quorum(least=m.count, most=None, grace=None)
        ways = set(living.ways)
        living.ways.clear()
        self._compare_gradient(living, gradient, m.take(None), ways)
        self.compare(living.name)

    @rule(pick=PICK)
    def recover(self, pick):
        handle = self._pick(pick)
        living = handle.living
        if not living.alive:
            return
        with handle.acc.recover() as taken:
            if living.stray:
                # Rounds of one millisecond may come in any order.
                steps = [expected.global_step for expected, _ in living.stray]
                place = next(
                    i
                    for i, (expected, _) in enumerate(living.stray)
                    if (expected.global_step, expected.num_accumulated, expected.workers)
                    == (taken.global_step, taken.num_accumulated, taken.workers)
                )
                if steps.count(taken.global_step) == 1:
                    self._compare_round(living, taken, *living.stray[place])
                del living.stray[place]
            else:
                assert taken is None
        self.compare(living.name)

    BAD_NUMBERS = (0, -1, 1.0, "1", [1], 2**63, np.nan, True)

    def _take_a_bad_number(self, handle, case):
        required = self.BAD_NUMBERS[case % len(self.BAD_NUMBERS)]
        with pytest.raises(redisacc.InvalidArgumentError):
            handle.acc.take_grad(required)
        if handle.living.alive:
            self.compare(handle.living.name)

    @rule(pick=PICK, what=st.integers(0, 3), case=st.integers(0, 989))
    def give_something_wrong(self, pick, what, case):
        calls = (self._apply_at_a_bad_step, self._apply_something_wrong, self._set_a_bad_step, self._take_a_bad_number)
        calls[what](self._pick(pick), case)

    # Reading

    @rule(pick=PICK)
    def peek(self, pick):
        handle = self._pick(pick)
        living = handle.living
        if not living.alive:
            with pytest.raises(redisacc.NotFoundError, match="accumulator"):
                handle.acc.peek()
            return
        expected = living.model.peek()
        looked = handle.acc.peek()
        if expected.gradient is None:
            assert looked.gradient is None
            assert (looked.num_accumulated, looked.workers) == (0, {})
        else:
            self._compare_round(living, looked, expected, living.ways)

    @rule(pick=PICK)
    def look(self, pick):
        handle = self._pick(pick)
        living, acc = handle.living, handle.acc
        if not living.alive:
            for call in (acc.num_accumulated, acc.global_step, acc.info):
                with pytest.raises(redisacc.NotFoundError, match="accumulator"):
                    call()
            return
        m = living.model
        assert acc.num_accumulated() == m.count
        assert acc.global_step() == m.step
        info = acc.info()
        assert (info.kind, info.dtype, info.shape, info.reduction_type) == (m.kind, m.dtype, m.shape, m.reduction)
        assert (info.applied, info.stale, info.repeated) == (m.applied, m.stale, m.repeated)
        assert (info.takes, info.duplicates) == (m.takes, 0)
        assert info.round_shape == (m.round_shape if m.count else None)
        assert (info.max_staleness, info.staleness_weight) == (m.max_staleness, m.staleness_weight)
        assert info.normalize == m.normalize
        if living.ways == {"buffered"}:
            assert info.buffered == m.count

    # Comparing

    def compare(self, name: str) -> None:
        """The accumulator of a name, as any handle sees it."""
        living = self.names[name]
        acc = next(handle.acc for handle in self.opened if handle.living is living)
        info, m = acc.info(), living.model
        assert (info.global_step, info.num_accumulated, info.workers) == (m.step, m.count, m.workers)
        assert (info.staleness, info.total_weight) == (m.staleness, m.total_weight)
        assert dataclasses.asdict(info.quorum) == {**m.quorum, "min_weight": None}
        assert info.waiting == []
        assert len(info.unacknowledged) == len(living.stray)

    def _compare_round(self, living, taken, expected, ways):
        assert (taken.global_step, taken.num_accumulated) == (expected.global_step, expected.num_accumulated)
        assert taken.workers == expected.workers
        assert (taken.staleness, taken.total_weight) == (expected.staleness, expected.total_weight)
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

    @invariant()
    def names_are_listed(self):
        assert self.clients[1].smembers("redisacc:names") == {name.encode() for name in self.names}


@pytest.mark.servers("valkey")
@pytest.mark.timeout(3600)
def test_random_operations(server, request, everything, caplog):
    caplog.set_level("ERROR")  # lowered steps warn

    class Machine(Accumulators):
        pass

    Machine.server = server
    long = request.config.getoption("--long")
    examples = 60 if server.real else 25
    if long:
        examples *= 40
    elif not everything:
        examples //= 2
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            # The same examples every time, unless one asks for a search.
            derandomize=not long,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
