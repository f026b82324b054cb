"""Random sequences of operations on several handles on parameters of two names, against a plain model.

Handles differ in client, encoding and partitions. Those that publish say which rows have changed since the version that
they know, which is often no longer the latest one. What readers get is compared with the model, bit for bit.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from support import model
from support.sequences import Machine, run

import redisacc

# An accumulator has the first one as well.
NAMES = ("both", "weights")
# Leaves by path: dtype and shape. The table of the last one has several parts.
TREES = (
    {".": ("float32", (5,))},
    {"d": ("float64", (2,)), "table": ("float32", (30, 2)), "w/0": ("int8", (3,)), "w/1": ("bool", ())},
    {"e": ("bfloat16", (0, 3)), "rows": ("int64", (7,)), "table": ("float32", (20_000, 2))},
)
ENCODINGS = (None, "float32", "bfloat16")
PARTITIONS = (None, None, "auto", 1, 3, 3)
STEPS = (-(2**63), -1, 0, 0, 2**53, 2**63 - 3)


@dataclass
class Handle:
    acc: Any
    name: str
    encoding: str
    partitions: int | str | None
    closed: bool = False
    # What it has seen, and the version that it has published or returned last.
    seen: model.Published | None = None
    base: dict[str, np.ndarray] | None = None


class Parameters(Machine):
    OPERATIONS: ClassVar = {
        "publish": 8,
        "latest": 3,
        "wait": 3,
        "publish_while_another_waits": 2,
        "look": 2,
        "finish": 1,
        "time_passes": 1,
        "open": 2,
        "close": 1,
        "delete": 1,
    }

    def __init__(self, *where):
        super().__init__(*where)
        self.published = dict.fromkeys(NAMES)
        self.opened = []
        # Arrays of earlier versions, and what they held when they were returned.
        self.held = []
        self.gradients = redisacc.ConditionalAccumulator("float32", [2], NAMES[0], redis=self.clients[0])
        self.gradients.apply_grad([1.0, 2.0])

    def end(self):
        for array, was in self.held:
            model.assert_same(array, was)
        assert self.gradients.take_grad(1).tolist() == [1.0, 2.0]
        for name in NAMES:
            # What the next publisher would remove goes, too.
            self.open_at(0, redisacc.Parameters, name).delete()
        for handle in self.opened:
            handle.acc.close()
        self.gradients.close()
        super().end()

    # Handles

    def begin(self):
        self.spec = self.draw.choice(TREES)
        for name in NAMES:
            partitions = self.draw.choice(PARTITIONS)
            for client in range(3):
                encoding = self.draw.choice(ENCODINGS)
                made = self.open_at(client, redisacc.Parameters, name, encoding=encoding, partitions=partitions)
                self.opened.append(Handle(made, name, encoding or "float32", partitions))

    def open(self):
        name, client, encoding = self.draw.choice(NAMES), self.draw.randrange(3), self.draw.choice(ENCODINGS)
        partitions, create = self.draw.choice(PARTITIONS), self.happens(0.5)
        options = {"encoding": encoding, "partitions": partitions, "create": create}
        there = self.published[name]
        if there is None and not create:
            with pytest.raises(redisacc.NotFoundError, match="nothing has been published"):
                self.open_at(client, redisacc.Parameters, name, **options)
        elif there is not None and self._has_others(there, partitions):
            with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is"):
                self.open_at(client, redisacc.Parameters, name, **options)
        else:
            made = self.open_at(client, redisacc.Parameters, name, **options)
            self.opened.append(Handle(made, name, encoding or "float32", partitions, seen=there))

    @staticmethod
    def _has_others(there, partitions):
        return isinstance(partitions, int) and partitions != there.partitions

    def _pick(self):
        """One of the handles, mostly one that is of use."""
        usable = [handle for handle in self.opened if self._gone(handle) is None]
        others = [handle for handle in self.opened if self._gone(handle) is not None]
        return self.draw.choice(others if not usable or (others and self.happens(0.05)) else usable)

    def _gone(self, handle):
        """The error of every call, once the handle is closed or what it has seen was deleted."""
        if handle.closed:
            return redisacc.CancelledError
        there = self.published[handle.name]
        return redisacc.NotFoundError if handle.seen is not None and handle.seen is not there else None

    def _see(self):
        """A handle that is about to look at what is published, and that."""
        handle = self._pick()
        there = self.published[handle.name]
        if self._gone(handle) is None:
            handle.seen = there
        return handle, there

    def close(self):
        handle = self._pick()
        handle.acc.close()
        handle.closed = True

    def delete(self):
        handle, _ = self._see()
        if not handle.closed:
            handle.acc.delete()
            if self._gone(handle) is None:
                self.published[handle.name] = None

    # Publishing

    def _random_tree(self):
        return {
            path: np.asarray(self.rng.random(shape) < 0.5) if dtype == "bool" else model.numbers(self.rng, dtype, shape)
            for path, (dtype, shape) in sorted(self.spec.items())
        }

    def _changed_tree(self, base):
        """Another tree, and which rows of it differ from the given one, as far as that is said."""
        fresh, tree, changed = self._random_tree(), {}, {}
        for path, array in base.items():
            tree[path] = fresh[path]
            if array.ndim and self.happens(0.7):
                rows = self.rng.integers(0, len(array), self.draw.randint(0, 5)) if len(array) else []
                tree[path] = array.copy()
                tree[path][rows] = fresh[path][rows]
                changed[path] = rows
        return tree, changed

    def publish(self):
        """Some versions, by one handle or several."""
        for _ in range(self.draw.randint(1, 4)):
            handle, _ = self._see()
            how = self.draw.choice(["rows"] * 4 + ["whole", "again", "wrong"])
            self._publish(handle, self.draw.choice([-1, 0, 1, 1, 1, 1, 5]), how, finished=self.happens(0.1))

    def _publish(self, handle, step, how, *, finished=False):
        rng, there = self.rng, self.published[handle.name]
        number = int(rng.choice(STEPS)) if there is None else min(max(there.step + step, -(2**63)), 2**63 - 1)
        tree, changed = self._random_tree(), None
        if how == "rows":
            # What it says of a version that it does not know is not used.
            tree, changed = self._changed_tree(handle.base or tree)
        state = {"m": model.numbers(rng, "float32", (4,))} if self.happens(0.5) else None
        if how == "again" and there is not None:
            number, tree, state = there.step, there.tree, there.state
        if how == "wrong":
            path = self.draw.choice(sorted(tree))
            tree[path] = self.draw.choice((np.zeros((2, 9)), np.zeros(tree[path].shape, np.complex64)))
            number = there.step + 1 if there is not None and there.step < model.STEP_MAX else number
        options = {"changed": changed, "state": state, "finished": finished}
        version = (number, state, finished, handle.encoding)

        def call():
            handle.acc.publish(model.nested(tree), number, **options)

        gone = self._gone(handle)
        if gone:
            # The form that a handle has seen is checked first.
            with pytest.raises((gone, redisacc.InvalidArgumentError) if how == "wrong" else gone):
                call()
        elif there is None:
            if how == "wrong":
                return
            call()
            partitions = handle.partitions if isinstance(handle.partitions, int) else 1
            handle.seen = self.published[handle.name] = model.Published.first(tree, partitions, *version)
            handle.base = tree
        elif self._has_others(there, handle.partitions):
            with pytest.raises(redisacc.InvalidArgumentError):
                call()
        else:
            try:
                there.publish(tree, *version)
            except model.Refused:
                with pytest.raises(redisacc.InvalidArgumentError):
                    call()
            except model.Conflicting:
                with pytest.raises(redisacc.ConflictError):
                    call()
            else:
                call()
                handle.base = tree

    def finish(self):
        finished = self.happens(0.5)
        handle, there = self._see()
        error = self._gone(handle) or (redisacc.NotFoundError if there is None else None)
        if error:
            with pytest.raises(error):
                handle.acc.finish(finished)
        else:
            handle.acc.finish(finished)
            there.finished = finished

    # Reading

    def latest(self):
        handle, there = self._see()
        if self._gone(handle):
            with pytest.raises(self._gone(handle)):
                handle.acc.latest()
        elif there is None:
            assert handle.acc.latest() is None
        else:
            self._compare(handle, there, handle.acc.latest())

    def wait(self):
        after, skip_last = self.draw.choice([None, -1, -1, 0, 1]), self.happens(0.5)
        handle, there = self._see()
        step = there.step if there is not None else 0
        after = None if after is None else min(max(step + after, -(2**63)), 2**63 - 1)
        error = self._gone(handle)
        if error is None and there is None:
            error = redisacc.WaitTimeoutError
        elif error is None and ((skip_last and there.finished) or (after is not None and step <= after)):
            error = redisacc.FinishedError if there.finished else redisacc.WaitTimeoutError
        if error:
            with pytest.raises(error):
                handle.acc.wait(after, timeout=0, skip_last=skip_last)
        else:
            self._compare(handle, there, handle.acc.wait(after, timeout=0, skip_last=skip_last))

    def publish_while_another_waits(self):
        handle, writer = self._pick(), self._pick()
        there = self.published[handle.name]
        if handle is writer or writer.name != handle.name or self._gone(handle) or self._gone(writer):
            return
        if (
            there is None
            or there.finished
            or there.step == model.STEP_MAX
            or self._has_others(there, writer.partitions)
        ):
            return
        handle.seen = writer.seen = there
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handle.acc.wait, there.step, 20)
            self._publish(writer, 1, self.draw.choice(["rows", "whole"]))
            self._compare(handle, there, waiting.result())

    def look(self):
        handle, there = self._see()
        acc = handle.acc
        calls = (acc.latest_state, acc.step, acc.finished, acc.is_complete)
        if self._gone(handle):
            for call in calls:
                with pytest.raises(self._gone(handle)):
                    call()
            return
        assert acc.is_complete()
        if there is None:
            assert (acc.latest_state(), acc.step(), acc.finished()) == (None, None, False)
            return
        step, state = acc.latest_state()
        assert (step, acc.step(), acc.finished()) == (there.step, there.step, there.finished)
        acc.check(model.nested(there.tree))
        assert (state is None) == (there.state is None)
        if state is not None:
            model.assert_same(state["m"], there.state["m"])
            state["m"][0] = 7

    def time_passes(self):
        """Whatever earlier versions consisted of expires, or is removed by the next publisher."""
        if any(self.published.values()):
            self.clock.advance(100)

    # Comparing

    def _compare(self, handle, there, found):
        step, tree = found
        assert step == there.step
        arrays = model.flat(tree)
        assert list(arrays) == list(there.tree)
        for path, array in arrays.items():
            model.assert_same(array, there.tree[path])
            assert not array.flags.writeable
        handle.base = arrays
        if len(self.held) < 20:
            self.held += [(array, array.copy()) for array in arrays.values()]

    def check(self):
        names = {NAMES[0], *(name for name, there in self.published.items() if there is not None)}
        assert self.clients[1].smembers("redisacc:names") == {name.encode() for name in names}


@pytest.mark.servers("fakeredis", "valkey")
@pytest.mark.timeout(3600)
def test_random_operations(server, clock, request, everything):
    run(Parameters, request, 10)
