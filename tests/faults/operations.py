"""The table of operations: each call of each class, and what must be true after it, whatever fault it has met.

An operation is a class; a variant of it is a row with other attributes. A sum shows which gradients are in it, because
these are powers of two: the operation applies 1, and others apply the larger ones.
"""

import contextlib
import copy
import time
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
from support.leaks import remaining

import redisacc

NAME = "w"
RECORD = "redisacc:{w}"
# A step that no round reaches, so that a gradient of it is never stale.
FOREVER = 2**62
# How long calls wait in vain, and for what must arrive, in seconds.
IN_VAIN, PATIENCE = 0.1, 600


class Outcome(NamedTuple):
    """How an operation has ended, as far as its caller knows, and what it has returned.

    It is "done"; or "over", because it was interrupted or cancelled, and the caller continues; or "gone" with its
    process.
    """

    how: Literal["done", "over", "gone"]
    value: Any = None


class Operation:
    """An operation.

    Args:
        attributes: of the class, for a variant of it.

    Attributes:
        never: the beginnings of the names of faults that it cannot meet.
        is_timed: whether the number of its messages depends on the time that they take.
    """

    never = ()
    is_timed = False

    def __init__(self, **attributes):
        assert all(hasattr(self, name) for name in attributes), attributes
        vars(self).update(attributes)

    def prepare(self, scene):
        """Prepares what it needs, without the way through which it meets the fault."""

    def enter(self, scene):
        """Opens its own handle, in the process that does it, and connects it: the next message is the operation's."""

    def do(self, scene):
        """Does it, and returns what can be pickled and compared."""

    def look(self, scene):
        """Uses the same handle, in another process, and changes nothing."""

    def check(self, scene, outcome):
        """Does what its caller, or a successor, does after this outcome, and checks what is known then."""

    def again(self, scene):
        """Checks that late requests have changed nothing since."""

    def end(self, scene):
        """Checks that its handle still works, or another one if its process is gone; and deletes everything."""


def value_of(tree):
    """Returns the value that all elements of a gradient have."""
    (value,) = {float(value) for array in _arrays(tree) for value in (array.min(), array.max())}
    return value


def _arrays(tree):
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(each)
    elif tree is not None:
        yield tree.values if isinstance(tree, redisacc.IndexedSlices) else tree


# Accumulators


class OnAccumulator(Operation):
    """An operation on an accumulator.

    Attributes:
        kind: a key of ``SCHEMAS``.
        size: the number of elements of a dense leaf, or of a row.
        in_place, inline, partitions, options: how the accumulator is opened.
        room: how many gradients fit into the buffer. None: any number.
        before: the gradients that are in the round already.
        left: the sum of those that are there afterwards.
        handles: how many there are at most. Each has one session.
    """

    kind = "dense"
    size = 6
    in_place = 10**9
    inline = None
    partitions = None
    options: ClassVar[dict[str, Any]] = {}
    room = None
    before = ()
    left = 0.0
    handles = 2

    def open(self, opener):
        make, *schema = SCHEMAS[self.kind](self.size)
        room = self.room and self.room * BYTES[self.kind](self.size)
        limits = redisacc.Limits(self.in_place, room, self.inline)
        given = {"reduction_type": "SUM", "limits": limits, "partitions": self.partitions, **self.options}
        return opener(make, *schema, NAME, **given)

    def gradient(self, value):
        dense, rows = np.full(self.size, value, np.float32), np.full((ROWS, self.size), value, np.float32)
        slices = redisacc.IndexedSlices(rows, range(ROWS))
        return {
            "rows": (range(ROWS), rows),
            "tree": ({"a": dense, "b": [slices, None]},),
            "leaves": ({"a": dense, "b": dense},),
        }.get(self.kind, (dense,))

    def take(self, handle, number, timeout=PATIENCE, **options):
        take = handle.take_indexed_slices_grad if self.kind == "rows" else handle.take_grad
        return value_of(take(number, timeout=timeout, **options))

    def apply(self, *values, handle=None):
        for value in values:
            assert (handle or self.direct).apply_grad(*self.gradient(value), local_step=FOREVER)

    @property
    def handle(self):
        """Its own handle, or another one if its process is gone."""
        return getattr(self, "through", self.direct)

    def rounds(self):
        """Takes and recovers all rounds that are left. Returns the value of each."""
        found = []
        with contextlib.suppress(redisacc.TakeTimeoutError):
            # An interrupted take may have left one in its handle.
            while self.handle is not self.direct:
                found.append(self.take(self.handle, 1, timeout=0))
        while self.direct.num_accumulated():
            found.append(self.take(self.direct, 1))
        while True:
            with self.direct.recover() as taken:
                if taken is None:
                    return found
                found.append(value_of(taken.gradient))

    def prepare(self, scene):
        self.direct = self.open(scene.open_directly)
        self.apply(*self.before)
        self.left = sum(self.before)

    def enter(self, scene):
        self.through = self.open(scene.open)
        self.through.num_accumulated()

    def look(self, scene):
        self.through.info()

    def end(self, scene):
        scene.pass_time()
        self.apply(64, handle=self.handle)
        assert self.take(self.handle, 1) == self.left + 64
        info = self.direct.info()
        assert (info.num_accumulated, info.waiting, info.unacknowledged) == (0, [], [])
        # Interrupts do not fill the table.
        assert self.handle is self.direct or scene.client.hlen(RECORD + ":sessions") <= self.handles
        assert scene.leftovers() == []
        self.direct.delete()


ROWS = 3
SCHEMAS = {
    "dense": lambda size: (redisacc.ConditionalAccumulator, "float32", [size]),
    "any shape": lambda size: (redisacc.ConditionalAccumulator, "float32", None),
    "rows": lambda size: (redisacc.SparseConditionalAccumulator, "float32", [None, size]),
    # No gradient has the last leaf.
    "tree": lambda size: (
        redisacc.TreeAccumulator,
        {"a": ("float32", (size,)), "b": [redisacc.Sparse("float32", (None, size)), ("float64", (2,))]},
    ),
    "leaves": lambda size: (redisacc.TreeAccumulator, dict.fromkeys("ab", ("float32", (size,)))),
}
# Rows and their indices, the dense leaf, the zeros of the one that is missing, and which leaves there are.
BYTES = {
    "dense": lambda size: 4 * size,
    "tree": lambda size: 4 * size * (ROWS + 1) + 8 * ROWS + 16 + 12,
}


class Apply(OnAccumulator):
    """A gradient is counted once, or not at all, and its caller learns which.

    Attributes:
        arguments: of the apply.
        counts: what it is counted as.
        adds: what it adds to the sum of the round.
        counted: how many there were.
    """

    arguments: ClassVar[dict[str, Any]] = {}
    counts = "applied"
    adds = 1.0
    counted = 0

    def do(self, scene):
        return self.through.apply_grad(*self.gradient(1.0), **self.arguments)

    def check(self, scene, outcome):
        self.counted = self.number()
        assert self.counted in ((1,) if outcome.how == "done" else (0, 1))
        assert outcome.how != "done" or outcome.value.outcome == self.counts
        if self.handle is not self.direct:
            self.check_settled()
        self.left += self.adds * self.counted
        self.again(scene)

    def check_settled(self):
        settled = self.through.settle()
        # A copy that arrives later is refused.
        self.counted = self.number()
        assert settled == redisacc.types.Tally(**{**NOTHING, self.counts: self.counted})

    def number(self):
        """Returns how many gradients were counted in addition to those before."""
        return getattr(self.direct.info(), self.counts) - (len(self.before) if self.counts == "applied" else 0)

    def again(self, scene):
        assert self.number() == self.counted
        looked = self.direct.peek()
        assert looked.num_accumulated == len(self.before) + self.counted * (self.counts == "applied")
        assert not looked.num_accumulated or value_of(looked.gradient) == self.left
        # A part of a gradient that counts does not expire.
        assert scene.leftovers() == []


NOTHING = dict.fromkeys(("applied", "stale", "repeated", "unknown"), 0)


class ApplyAgain(Apply):
    """The next apply settles the one before."""

    def check_settled(self):
        self.do(None)
        assert self.through.settle().applied == self.number()
        self.counted = self.number()


class ApplyStale(Apply):
    """A dropped gradient stays dropped, whatever the step is when a copy arrives."""

    arguments: ClassVar[dict[str, Any]] = {"local_step": 2}
    counts = "stale"
    adds = 0.0

    def prepare(self, scene):
        super().prepare(scene)
        self.direct.set_global_step(3)

    def check(self, scene, outcome):
        super().check(scene, outcome)
        self.direct.set_global_step(0)


class ApplyLate(Apply):
    """It stays as late, and weighs as much, as when it arrived first, whatever the step is when a copy arrives."""

    options: ClassVar[dict[str, Any]] = {"staleness": redisacc.Staleness(4, weight="inverse_sqrt")}
    arguments: ClassVar[dict[str, Any]] = {"local_step": 2, "weight": 4}
    adds = 2.0

    def prepare(self, scene):
        super().prepare(scene)
        self.direct.set_global_step(5)

    def check(self, scene, outcome):
        super().check(scene, outcome)
        self.direct.set_global_step(6)

    def again(self, scene):
        super().again(scene)
        info = self.direct.info()
        assert (info.staleness, info.total_weight) == ({3: 1} if self.counted else {}, self.left)


class ApplyRefused(OnAccumulator):
    """Refused because of the round's shape; a copy that arrives in another round must not be accepted."""

    kind = "any shape"

    def prepare(self, scene):
        super().prepare(scene)
        self.direct.apply_grad(np.ones(3, np.float32))

    def do(self, scene):
        with pytest.raises(redisacc.InvalidArgumentError, match="shape"):
            self.through.apply_grad(*self.gradient(1.0), local_step=FOREVER)

    def check(self, scene, outcome):
        if outcome.how == "over":
            assert self.through.settle().applied == 0
        assert self.direct.num_accumulated() == 1
        self.direct.take_grad(1)

    def again(self, scene):
        info = self.direct.info()
        assert (info.num_accumulated, info.applied) == (0, 1)


class ApplyMakingRoom(Apply):
    """The gradient and those before it are compacted into one."""

    in_place = 0
    room = 3
    before = (2, 4, 8)
    arguments: ClassVar[dict[str, Any]] = {"weight": 0.5}
    adds = 0.5

    def again(self, scene):
        super().again(scene)
        info = self.direct.info()
        assert info.total_weight == 3 + self.adds * self.counted
        assert info.buffered <= 3


class Take(OnAccumulator):
    """A round is delivered once, and a late copy is not granted the next one.

    Attributes:
        number, arguments: of the take.
        quorum: what a take waits for that does not say it.
    """

    before = (1, 2, 4)
    number = 3
    arguments: ClassVar[dict[str, Any]] = {}
    quorum = None

    def prepare(self, scene):
        super().prepare(scene)
        if self.quorum:
            self.direct.set_quorum(least=self.quorum)

    def do(self, scene):
        return self.take(self.through, self.number, **self.arguments)

    def check(self, scene, outcome):
        found = [outcome.value] if outcome.how == "done" else self.rounds()
        assert found == [sum(self.before)] or (self.may_have_it(outcome) and found == [])
        info = self.direct.info()
        assert (info.global_step, info.takes, info.num_accumulated, info.unacknowledged) == (1, 1, 0, [])
        self.apply(8, 16, 32)
        self.left = 56
        self.again(scene)

    def may_have_it(self, outcome):
        """Returns whether the caller may have the round, though the call has returned nothing."""
        return outcome.how == "gone"

    def again(self, scene):
        info = self.direct.info()
        assert (info.global_step, info.takes, info.num_accumulated) == (1, 1, 3)
        # A dead taker keeps its place in the queue for a while.
        assert (info.unacknowledged, self.handle is not self.direct and info.waiting) in (([], []), ([], False))
        assert not [key for key in scene.client.scan_iter() if b":taken" in key]


class TakeInABlock(Take):
    """Read in a block, and acknowledged at its end."""

    has_begun = False

    def do(self, scene):
        with self.through.take(3) as taken:
            self.has_begun = True
            assert (taken.global_step, taken.num_accumulated) == (0, 3)
            return value_of(taken.gradient)

    def may_have_it(self, outcome):
        return outcome.how == "gone" or (outcome.how == "over" and self.has_begun)


class Recover(TakeInABlock):
    """A round whose taker has failed."""

    def prepare(self, scene):
        super().prepare(scene)
        with contextlib.suppress(ZeroDivisionError), self.direct.take(3):
            raise ZeroDivisionError

    def do(self, scene):
        with self.through.recover() as taken:
            self.has_begun = taken is not None
            return value_of(taken.gradient)


class TakeInVain(OnAccumulator):
    """A take that times out leaves nothing, and takes nothing later."""

    before = (1,)
    timeout = 0.0

    def do(self, scene):
        with pytest.raises(redisacc.TakeTimeoutError):
            self.take(self.through, 2, timeout=self.timeout)

    def check(self, scene, outcome):
        self.apply(2)
        self.left = 3
        self.again(scene)

    def again(self, scene):
        info = self.direct.info()
        assert (info.takes, info.num_accumulated, info.unacknowledged) == (0, 2, [])
        assert info.waiting == [] or self.handle is self.direct


class TakeInVainWithAGrace(TakeInVain):
    """A take that leaves during its grace takes nothing later, and the grace does not begin again."""

    def do(self, scene):
        with pytest.raises(redisacc.TakeTimeoutError):
            self.take(self.through, 1, grace=3600, timeout=0)

    def check(self, scene, outcome):
        # So long ago that it is over.
        self.began = scene.client.hget(RECORD, "grace_began_ms") and b"1000000000000"
        if self.began:
            scene.client.hset(RECORD, "grace_began_ms", self.began)
        super().check(scene, outcome)

    def again(self, scene):
        super().again(scene)
        assert self.began is None or scene.client.hget(RECORD, "grace_began_ms") == self.began


class Look(OnAccumulator):
    """Calls that change nothing."""

    before = (1, 2)

    def do(self, scene):
        acc = self.through
        looked, info = acc.peek(), acc.info()
        return value_of(looked.gradient), info.num_accumulated, acc.num_accumulated(), acc.global_step(), acc.quorum()

    def check(self, scene, outcome):
        assert outcome.how != "done" or outcome.value == (3, 2, 2, 0, redisacc.Quorum())


class SetStep(OnAccumulator):
    """A late copy would set the step back."""

    def do(self, scene):
        self.through.set_global_step(5)

    def check(self, scene, outcome):
        if outcome.how == "over":
            self.through.settle()
        self.step = self.direct.global_step()
        assert self.step in ((5,) if outcome.how == "done" else (0, 5))
        self.apply(1)
        self.direct.take_grad(1)

    def again(self, scene):
        assert self.direct.global_step() == self.step + 1


class SetQuorum(OnAccumulator):
    """A late copy would undo the change that came after it."""

    def do(self, scene):
        self.through.set_quorum(least=2, grace=1)

    def check(self, scene, outcome):
        if outcome.how == "over":
            self.through.settle()
        new = redisacc.Quorum(2, None, 1.0)
        assert self.direct.quorum() in ((new,) if outcome.how == "done" else (redisacc.Quorum(), new))
        self.direct.set_quorum(least=3)

    def again(self, scene):
        assert self.direct.quorum().least == 3


class WaitForStep(OnAccumulator):
    """In vain."""

    is_timed = True

    def do(self, scene):
        with pytest.raises(redisacc.WaitTimeoutError, match="was not reached in time"):
            self.through.wait_for_step(1, timeout=IN_VAIN)

    def again(self, scene):
        self.direct.set_global_step(1)
        assert self.handle.wait_for_step(1) == 1


class ListenToEvents(OnAccumulator):
    is_timed = True

    def do(self, scene):
        with self.through.events(timeout=IN_VAIN) as events:
            return [event.kind for event in events]

    def check(self, scene, outcome):
        # It may have missed some if its connection broke.
        assert outcome.how != "done" or set(outcome.value) <= {"missed"}

    def again(self, scene):
        with self.handle.events(timeout=20) as events:
            kind = "missed"
            while kind == "missed":
                self.apply(1)
                self.left += 1
                kind = next(events).kind
            assert kind == "applied"


class Open(OnAccumulator):
    """It is there once."""

    never = ("forked",)
    handles = 5

    def enter(self, scene):
        super().enter(scene)
        self.direct.delete()

    def do(self, scene):
        self.through = self.open(scene.open)
        return self.through.info().incarnation

    def check(self, scene, outcome):
        self.direct = self.open(scene.open_directly)
        if outcome.how == "over":
            self.through = self.open(scene.open)
        assert outcome.how != "done" or self.direct.info().incarnation == outcome.value
        assert self.direct.num_accumulated() == len(self.before)
        self.apply(2)
        self.left += 2

    def again(self, scene):
        assert value_of(self.direct.peek().gradient) == self.left
        assert scene.client.smembers("redisacc:names") == {NAME.encode()}


class OpenExisting(Open):
    before = (1,)

    def enter(self, scene):
        OnAccumulator.enter(self, scene)


class OpenPrivate(OnAccumulator):
    """A private accumulator is removed when it is closed, or when its lease ends."""

    never = ("suspended",)

    def do(self, scene):
        opened = scene.open(redisacc.ConditionalAccumulator, "float32", [self.size])
        try:
            opened.apply_grad(*self.gradient(3))
            return self.take(opened, 1)
        finally:
            opened.close()

    def check(self, scene, outcome):
        assert outcome.how != "done" or outcome.value == 3


class Delete(OnAccumulator):
    """A late copy must not delete a new accumulator of the same name."""

    never = ("forked",)
    in_place = 0
    before = (1,)

    def prepare(self, scene):
        super().prepare(scene)
        with contextlib.suppress(ZeroDivisionError), self.direct.take(1):
            raise ZeroDivisionError
        self.apply(2)

    def do(self, scene):
        self.through.delete()

    def check(self, scene, outcome):
        if outcome.how == "over":
            self.do(scene)
        elif outcome.how == "gone":
            with contextlib.suppress(redisacc.NotFoundError):
                # All of it is there, or nothing can be used.
                assert (self.direct.num_accumulated(), len(self.direct.info().unacknowledged)) == (1, 1)
                self.direct.delete()
        if outcome.how != "gone":
            assert not [key for key in scene.client.scan_iter() if scene.client.pttl(key) < 0]
        # The next one who opens the name finishes the deletion.
        self.direct = self.open(scene.open_directly)
        assert (self.direct.num_accumulated(), self.direct.info().unacknowledged) == (0, [])
        self.apply(4)
        self.left = 4

    def again(self, scene):
        assert value_of(self.direct.peek().gradient) == self.left

    def end(self, scene):
        # A late copy removes the name from the list, and the next opening adds it again. Its own handle is of no use.
        vars(self).pop("through", None)
        self.direct = self.open(scene.open_directly)
        super().end(scene)


# Gradients of a training


class Stream(Operation):
    """Two leaves are put one by one, the last one first, which is sent before the other is there.

    Attributes:
        partitions: in how many of them the gradients are.
    """

    never = ("forked",)
    partitions = None
    size = 80_000

    def prepare(self, scene):
        weights = dict.fromkeys("ab", np.zeros(self.size, np.float32))
        options = {"partitions": self.partitions, "limits": redisacc.Limits(in_place=0), "reduction_type": "SUM"}
        self.weights, self.options = weights, {"workers": 1, "accumulator": options}
        self.chief = scene.open_directly(redisacc.Chief, NAME, weights, **self.options)

    def enter(self, scene):
        self.begin(scene.open)
        self.worker.begin().abandon()

    def begin(self, opener):
        self.worker = opener(redisacc.Worker, NAME, number=0)
        self.steps = self.worker.steps()
        self.step, _ = next(self.steps)

    @property
    def gradient(self):
        return {path: leaf + 1 for path, leaf in self.weights.items()}

    def do(self, scene):
        upload = self.worker.begin()
        upload.put("b", self.gradient["b"])
        time.sleep(HEAD_START)
        upload.put("a", self.gradient["a"])
        return upload.commit()

    def check(self, scene, outcome):
        if outcome.how == "gone":
            self.begin(scene.open_directly)
        if outcome.how != "done":
            # The worker, or its successor, computes it again, and it counts once.
            outcome = Outcome("done", self.worker.apply(self.gradient))
            assert outcome.value.outcome in ("applied", "repeated")
        self.direct = scene.open_directly(
            redisacc.TreeAccumulator, *SCHEMAS["leaves"](self.size)[1:], NAME, reduction_type="SUM"
        )
        self.again(scene)

    def again(self, scene):
        looked, info = self.direct.peek(), self.direct.info()
        assert (looked.num_accumulated, info.applied, value_of(looked.gradient)) == (1, 1, 1)

    def end(self, scene):
        scene.pass_time()
        for taken in self.chief.rounds(until=1):
            assert value_of(taken.gradient) == 1
            self.chief.publish(taken.gradient)
        assert scene.leftovers() == []
        self.chief.delete()


# What is put first is sent within this time, in seconds, if the machine is not busy.
HEAD_START = 0.005


class Step(Stream):
    """A step of a training: its gradient, its round, and what it publishes."""

    # Programs do not continue a loop that was interrupted, but start again, as if their process were gone.
    never = ("interrupted", "cancelled", "forked")
    size = 60

    def prepare(self, scene):
        super().prepare(scene)
        self.chief.close()

    def enter(self, scene):
        self.begin(scene.open)

    def begin(self, opener):
        self.chief = opener(redisacc.Chief, NAME, self.weights, **self.options)
        self.rounds = self.chief.rounds()
        super().begin(opener)

    def do(self, scene):
        self.worker.apply(self.gradient, metrics={"loss": self.step})
        next(self.rounds)
        self.chief.publish({path: leaf + 1 for path, leaf in self.chief.parameters.items()})

    def check(self, scene, outcome):
        if not hasattr(self, "worker"):
            # A successor.
            self.begin(scene.open_directly)
        assert self.chief.step == 1 or outcome.how != "done"
        if self.chief.step == 0:
            self.do(scene)
        self.again(scene)

    def again(self, scene):
        step, weights = scene.open_directly(redisacc.Parameters, NAME).latest()
        assert (step, value_of(weights)) == (self.chief.step, self.chief.step)
        # Each step is in the history once.
        assert [(past.step, past.metrics) for past in self.chief.history()] == [(n, {"loss": n}) for n in range(step)]

    def end(self, scene):
        scene.pass_time()
        if self.step == 0:
            self.step, _ = next(self.steps)
        assert self.step == self.chief.step == 1
        self.do(scene)
        self.again(scene)
        assert scene.leftovers() == []
        self.chief.delete()


# Parameters


class OnParameters(Operation):
    """An operation on parameters. Version 1 is published, and its handle has read it.

    Attributes:
        partitions: in how many of them the values are.
        rows: of the table, whose rows may be published alone.
    """

    partitions = None
    rows = 100
    published = 1

    def prepare(self, scene):
        self.direct = scene.open_directly(redisacc.Parameters, NAME, partitions=self.partitions)
        for step in range(1, self.published + 1):
            self.publish(self.direct, step)

    def enter(self, scene):
        self.through = scene.open(redisacc.Parameters, NAME, partitions=self.partitions)
        self.through.latest()

    def look(self, scene):
        self.through.step()

    def tree(self, step):
        table = np.zeros((self.rows, 2))
        table[:step] = step
        return {"bias": np.full(3, float(step)), "table": table}

    def publish(self, handle, step):
        changed = {"table": range(step)} if step > 1 else None
        handle.publish(self.tree(step), step, changed=changed, state=[np.full(3, step)])

    @property
    def handle(self):
        return getattr(self, "through", self.direct)

    def check_version(self, scene, step):
        """Checks that a version is there, whole, for a handle that has an earlier one, and for another."""
        for handle in (self.direct, scene.open_directly(redisacc.Parameters, NAME)):
            self.check_read(handle.latest(), step)
        assert [state.tolist() for state in handle.latest_state()[1]] == [[step] * 3]
        # A late copy of what stored its parts would let them expire.
        record = scene.client.hgetall(RECORD + ":parameters")
        listed = {entry.partition(b":")[0] for name in (b"full", b"rows", b"state") for entry in record[name].split()}
        parts = [key for key in scene.client.scan_iter() if any(b":%b:" % blob in key for blob in listed)]
        assert parts
        assert {scene.client.pttl(key) for key in parts} == {-1}

    def check_read(self, found, step):
        assert found[0] == step
        assert {path: leaf.tobytes() for path, leaf in found[1].items()} == {
            path: leaf.tobytes() for path, leaf in self.tree(step).items()
        }

    def end(self, scene):
        scene.pass_time()
        step = self.direct.step() + 1
        self.publish(self.handle, step)
        self.check_version(scene, step)
        assert scene.leftovers() == []
        self.direct.delete()


class Publish(OnParameters):
    """The same call again publishes the version, whether it was published already or not.

    Attributes:
        gives_up: whether a publisher that does not know the outcome publishes the next version instead.
    """

    gives_up = False

    def do(self, scene):
        self.publish(self.through, self.published + 1)

    def check(self, scene, outcome):
        step = self.published + 1
        if outcome.how == "gone":
            found = self.direct.latest()
            if found is not None and found[0] == step:
                self.check_read(found, step)
            else:
                assert (found[0] if found else 0) == self.published
        if outcome.how != "done" and not self.gives_up:
            self.publish(self.handle, step)
        if not self.gives_up:
            self.check_version(scene, step)
        # What arrives late replaces nothing that is newer.
        self.publish(self.handle, step + 1)
        self.again(scene)

    def again(self, scene):
        self.check_version(scene, self.published + 2)


class Read(OnParameters):
    """Fetches the rows that have changed.

    Attributes:
        call: what it calls, given the handle.
    """

    @staticmethod
    def call(handle):
        return handle.latest()

    def enter(self, scene):
        super().enter(scene)
        self.publish(scene.open_directly(redisacc.Parameters, NAME), 2)

    def do(self, scene):
        return self.call(self.through)

    def check(self, scene, outcome):
        if outcome.how == "done":
            self.check_read(outcome.value, 2)
        self.check_read(self.call(self.handle), 2)


class ReadState(Read):
    @staticmethod
    def call(handle):
        return handle.latest_state()

    def check_read(self, found, step):
        if isinstance(found[1], dict):
            super().check_read(found, step)
        else:
            assert (found[0], found[1][0].tolist()) == (step, [step] * 3)


class WaitInVain(OnParameters):
    is_timed = True

    def do(self, scene):
        with pytest.raises(redisacc.WaitTimeoutError, match="timed out waiting for parameters"):
            self.through.wait(after=1, timeout=IN_VAIN)

    def again(self, scene):
        self.publish(self.direct, 2)
        self.check_read(self.handle.wait(after=1), 2)


class Finish(OnParameters):
    def do(self, scene):
        self.through.finish()

    def check(self, scene, outcome):
        assert outcome.how != "done" or self.direct.finished()
        self.handle.finish()

    def again(self, scene):
        assert self.direct.finished()


class DeleteParameters(OnParameters):
    never = ("forked",)

    def do(self, scene):
        self.through.delete()

    def check(self, scene, outcome):
        if outcome.how != "done":
            with contextlib.suppress(redisacc.NotFoundError):
                self.handle.delete()
        with pytest.raises(redisacc.NotFoundError, match="parameters"):
            self.direct.latest()
        assert remaining(scene.client) == []
        self.direct = scene.open_directly(redisacc.Parameters, NAME)
        self.publish(self.direct, 1)

    def again(self, scene):
        self.check_version(scene, 1)

    def end(self, scene):
        vars(self).pop("through", None)
        super().end(scene)


IN_PARTS = {"in_place": 0, "inline": 0, "size": 60}
# Sent only when the server would accept it.
LARGE = {"in_place": 0, "size": 1_200_000, "never": ("bytewise",)}
SPREAD = {**IN_PARTS, "partitions": 3}
TABLE = {"rows": 20_000, "partitions": 3}
TREE = {"kind": "tree", "options": {"mean": redisacc.Mean(missing="skip")}}

OPERATIONS = {
    "apply": Apply(),
    "apply inline": Apply(in_place=0),
    "apply in parts": Apply(**IN_PARTS),
    "apply in partitions": Apply(**SPREAD),
    "apply large": Apply(**LARGE),
    "apply encoded": Apply(**LARGE, options={"encoding": "int8"}),
    "apply rows": Apply(kind="rows"),
    "apply rows in parts": Apply(kind="rows", **IN_PARTS),
    "apply a tree": Apply(**TREE),
    "apply a tree in parts": Apply(**TREE, **IN_PARTS),
    "apply again": ApplyAgain(),
    "apply stale": ApplyStale(),
    "apply late": ApplyLate(),
    "apply late inline": ApplyLate(in_place=0),
    "apply late in parts": ApplyLate(**IN_PARTS),
    "apply refused": ApplyRefused(),
    "make room": ApplyMakingRoom(),
    "make room in parts": ApplyMakingRoom(**IN_PARTS),
    "make room in partitions": ApplyMakingRoom(**SPREAD),
    "make room in a tree": ApplyMakingRoom(**TREE),
    "take": Take(),
    "take inline": Take(in_place=0),
    "take in parts": Take(**IN_PARTS),
    "take in partitions": Take(**SPREAD),
    "take large": Take(**LARGE),
    "take rows": Take(kind="rows"),
    "take a tree": Take(**TREE),
    "take a tree in parts": Take(**TREE, **IN_PARTS),
    "take in a block": TakeInABlock(in_place=0),
    "take with a grace": Take(number=2, arguments={"most": 3, "grace": 3600}),
    "take with settings": Take(number=None, quorum=3),
    "take in vain": TakeInVain(),
    "wait in vain for a round": TakeInVain(timeout=IN_VAIN, is_timed=True, never=("forked",)),
    "take in vain with a grace": TakeInVainWithAGrace(),
    "recover": Recover(),
    "recover in parts": Recover(**IN_PARTS),
    "recover in partitions": Recover(**SPREAD),
    "look": Look(),
    "look in partitions": Look(**SPREAD),
    "set the step": SetStep(),
    "set the quorum": SetQuorum(),
    "wait for a step": WaitForStep(),
    "listen": ListenToEvents(),
    "open": Open(),
    "open an existing one": OpenExisting(),
    "open a private one": OpenPrivate(),
    "delete": Delete(),
    "delete in parts": Delete(**IN_PARTS),
    "delete in partitions": Delete(**SPREAD),
    "stream": Stream(),
    "stream in partitions": Stream(partitions=3),
    "step": Step(),
    "step in partitions": Step(partitions=3),
    "publish": Publish(),
    "publish in partitions": Publish(**TABLE),
    "publish large": Publish(rows=300_000, never=("bytewise",)),
    "publish the first": Publish(published=0),
    "publish the first in partitions": Publish(published=0, **TABLE),
    "publish the next": Publish(gives_up=True),
    "read": Read(),
    "read in partitions": Read(**TABLE),
    "read the state": ReadState(),
    "wait": Read(call=lambda handle: handle.wait(after=1)),
    "wait in vain for a version": WaitInVain(),
    "finish": Finish(),
    "delete parameters": DeleteParameters(),
}


def operation(name):
    """Returns an operation to be done once."""
    return copy.copy(OPERATIONS[name])
