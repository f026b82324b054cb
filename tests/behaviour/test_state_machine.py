"""Random sequences of operations on several handles of several names, against the plain numpy model.

One example is a database of its own: some names, under each of them one accumulator after the other, and handles on
them that differ in client, worker and way of storing gradients. After every operation the accumulator's state is
compared with the model's; results are compared bit for bit wherever the order of addition is determined.
"""

from __future__ import annotations

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
from support.servers import FAKE, ServerUnderTest

import redisacc
from redisacc._format import buffered as buffered_format

NAMES = ("a", "b", "c")
# 5: gradients of at most five elements are added in place, larger ones buffered, in one and the same round.
LIMITS = (0, 5, 10**9)
SHAPES: dict[str, tuple[Any, ...]] = {
    "dense": ((), (3,), (None,), (2, 3), (None, 3), (0,), None),
    "sparse": ((), (9,), (None,), (9, 2), (None, None), (9, None, 2), None),
}
WORKERS = ("ann", "bob")
REDUCTIONS = ("MEAN", "SUM")
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

    def teardown(self) -> None:
        self.patch.undo()
        for handle in self.opened:
            handle.acc.close()
        assert leftovers(self.clients[0]) == []
        self.server.close()

    # Opening and deleting

    def _open(self, kind: str, dtype: str, shape: Any, reduction: str, name: str, **options: Any) -> Any:
        classes = {
            "dense": redisacc.ConditionalAccumulator,
            "sparse": redisacc.SparseConditionalAccumulator,
        }
        return classes[kind](dtype, shape, name, reduction_type=reduction, **options)

    def _handle(self, living: Living, client: int, limit: int, worker: str) -> Handle:
        m = living.model
        acc = self._open(
            m.kind,
            m.dtype,
            m.shape,
            m.reduction,
            living.name,
            redis=self.clients[client],
            in_place_limit=limit,
            worker=worker,
        )
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
        sparse=st.sampled_from(model.DTYPES), dense=st.sampled_from(model.DTYPES), reduction=st.sampled_from(REDUCTIONS)
    )
    def begin(self, sparse, dense, reduction):
        self.names["a"] = Living("a", model.Sparse(sparse, (9, None), reduction))
        self.names["b"] = Living("b", model.Dense(dense, (None, 3), reduction))
        for name in ("a", "b"):
            for client, limit, worker in ((0, 10**9, "ann"), (1, 10**9, "bob"), (1, 0, "bob")):
                self._handle(self.names[name], client, limit, worker)

    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["dense", "sparse"]),
        dtype=st.sampled_from(model.DTYPES),
        which=st.integers(0, 6),
        reduction=st.sampled_from(REDUCTIONS),
        client=st.integers(0, 1),
        limit=st.sampled_from(LIMITS),
        worker=st.sampled_from(WORKERS),
    )
    def open(self, name, kind, dtype, which, reduction, client, limit, worker):
        shape = SHAPES[kind][which]
        kinds = {"dense": model.Dense, "sparse": model.Sparse}
        asked = kinds[kind](dtype, shape, reduction)
        living = self.names.get(name)
        if living is None:
            living = self.names[name] = Living(name, asked)
        elif living.model.schema != asked.schema:
            with pytest.raises(redisacc.SchemaMismatchError):
                self._open(kind, dtype, shape, reduction, name, redis=self.clients[client])
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
        self._apply(handle, arguments, local_step, elements=elements, once=rng.random() < 0.2)

    def _apply(self, handle: Handle, arguments: tuple[Any, ...], local_step: Any, *, elements: int, once: bool) -> None:
        living, options = handle.living, {"local_step": local_step, "once_per_worker": once}
        if not living.alive:
            with pytest.raises((redisacc.AccumulatorNotFoundError, redisacc.InvalidArgumentError)):
                handle.acc.apply_grad(*arguments, **options)
            return
        try:
            expected = living.model.apply(*arguments, local_step, handle.worker, once)
        except model.Refused:
            with pytest.raises(redisacc.InvalidArgumentError):
                handle.acc.apply_grad(*arguments, **options)
        else:
            result = handle.acc.apply_grad(*arguments, **options)
            actual = (result.outcome, result.global_step, result.num_accumulated)
            assert actual == (expected.outcome, expected.global_step, expected.num_accumulated)
            assert bool(result) == (expected.outcome == "applied")
            if result:
                living.ways.add(self._way(handle, elements))
        self.compare(living.name)

    def _way(self, handle: Handle, elements: int) -> str | None:
        if not self.server.real or handle.limit == 0:
            return "buffered"
        if handle.limit == 5 and elements > 5:
            # Summing repeated rows may have made it small enough.
            return None if handle.living.sparse else "buffered"
        return "in place"

    BAD_STEPS = (1.0, "1", None, [1], np.array([1]), 2**63, -(2**63) - 1, True, np.float64(2), 1j, object())

    def _apply_at_a_bad_step(self, handle, case):
        step = self.BAD_STEPS[case % len(self.BAD_STEPS)]
        m = handle.living.model
        value = np.zeros((1, 2) if handle.living.sparse else (3,), model.storage_dtype(m.dtype))
        arguments = ([0], value) if handle.living.sparse else (value,)
        with pytest.raises(redisacc.InvalidArgumentError):
            handle.acc.apply_grad(*arguments, local_step=step)
        if handle.living.alive:
            self.compare(handle.living.name)

    def _apply_something_wrong(self, handle, case):
        case %= 10
        m = handle.living.model
        storage = model.storage_dtype(m.dtype)
        if handle.living.sparse:
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
            with pytest.raises(redisacc.AccumulatorNotFoundError):
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

    @rule(pick=PICK, required=st.integers(1, 3), how=st.sampled_from(["grad", "slices", "block", "stray"]))
    def take(self, pick, required, how):
        handle = self._pick(pick)
        living, acc = handle.living, handle.acc
        if not living.alive:
            with pytest.raises(redisacc.AccumulatorNotFoundError):
                acc.take_grad(required, timeout=0)
            return
        ways = set(living.ways)
        try:
            expected = living.model.take(required)
        except model.Insufficient:
            with pytest.raises(redisacc.TakeTimeoutError) as failure:
                acc.take_grad(required, timeout=0)
            error = failure.value
            assert (error.num_required, error.num_accumulated) == (required, living.model.count)
            assert error.workers == living.model.workers
            self.compare(living.name)
            return
        except model.Overflowing:
            with pytest.raises(redisacc.StepOverflowError):
                acc.take_grad(required)
            self.compare(living.name)
            return
        living.ways.clear()
        if how == "grad" or (how == "slices" and not living.sparse):
            self._compare_gradient(living, acc.take_grad(required), expected, ways)
        elif how == "slices":
            self._compare_gradient(living, acc.take_indexed_slices_grad(required), expected, ways)
        elif how == "block":
            with acc.take(required) as taken:
                self._compare_round(living, taken, expected, ways)
        else:
            with pytest.raises(Unfinished) as interrupted, acc.take(required) as taken:
                raise Unfinished(taken)
            self._compare_round(living, interrupted.value.args[0], expected, ways)
            living.stray.append((expected, ways))
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

    BAD_NUMBERS = (0, -1, 1.0, "1", None, [1], 2**63, np.nan, True)

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
            with pytest.raises(redisacc.AccumulatorNotFoundError):
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
                with pytest.raises(redisacc.AccumulatorNotFoundError):
                    call()
            return
        m = living.model
        assert acc.num_accumulated() == m.count
        assert acc.global_step() == m.step
        info = acc.info()
        assert (info.kind, info.dtype, info.shape, info.reduction_type) == m.schema
        assert (info.applied, info.stale, info.repeated) == (m.applied, m.stale, m.repeated)
        assert (info.takes, info.duplicates) == (m.takes, 0)
        assert info.round_shape == (m.round_shape if m.count else None)
        if living.ways == {"buffered"}:
            assert info.buffered == m.count

    # Comparing

    def compare(self, name: str) -> None:
        """The accumulator of a name, as any handle sees it."""
        living = self.names[name]
        acc = next(handle.acc for handle in self.opened if handle.living is living)
        info, m = acc.info(), living.model
        assert (info.global_step, info.num_accumulated, info.workers) == (m.step, m.count, m.workers)
        assert info.waiting == []
        assert len(info.unacknowledged) == len(living.stray)

    def _compare_round(self, living, taken, expected, ways):
        assert (taken.global_step, taken.num_accumulated) == (expected.global_step, expected.num_accumulated)
        assert taken.workers == expected.workers
        self._compare_gradient(living, taken.gradient, expected, ways)

    def _compare_gradient(self, living, actual, expected, ways):
        def same(array, wanted):
            if len(ways) == 1 and None not in ways:
                model.assert_same(array, wanted)
            else:
                model.assert_close(array, wanted, expected.magnitude, living.model.dtype)

        if not living.sparse:
            same(actual, expected.gradient)
            return
        if isinstance(actual, redisacc.IndexedSlices):
            actual = actual.indices, actual.values, actual.dense_shape
        indices, values, shape = expected.gradient
        model.assert_same(np.asarray(actual[0]), indices)
        same(actual[1], values)
        assert list(actual[2]) == list(shape)

    @invariant()
    def names_are_listed(self):
        assert self.clients[1].smembers("redisacc:names") == {name.encode() for name in self.names}


@pytest.mark.servers("valkey", FAKE)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_operations(server, request, caplog):
    caplog.set_level("ERROR")  # lowered steps warn

    class Machine(Accumulators):
        pass

    Machine.server = server
    long = request.config.getoption("--long")
    examples = 60 if server.real else 25
    if long:
        examples *= 40
    elif not request.config.getoption("--all"):
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
