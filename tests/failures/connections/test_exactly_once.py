"""Every operation, with its connection broken at every place: done exactly once, and reported so."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import redis
import valkey
from support.clients import ALL as ALL_CLIENTS
from support.leaks import leftovers
from support.proxy import ClusterProxy, Fault, Proxy, all_faults
from support.selection import clients as chosen_clients
from support.selection import thorough
from support.servers import CLUSTER
from support.until import until

import redisacc

pytestmark = pytest.mark.servers("valkey", CLUSTER)

# Elements of float32: too many for an inline gradient; too many to be sent without asking first, in several parts.
IN_PARTS, LARGE = 20_000, 1_200_000


@contextlib.contextmanager
def _as_it_comes(proxy: Proxy) -> Iterator[Any]:
    with redis.Redis(port=proxy.port) as client:
        yield client


@contextlib.contextmanager
def _url(proxy: Proxy) -> Iterator[Any]:
    yield proxy.where


@contextlib.contextmanager
def _valkey_cluster(proxy: ClusterProxy) -> Iterator[Any]:
    with contextlib.closing(proxy.client(valkey)) as client:
        yield client


# Each fault meets the next of these, or of those that --clients names.
MADE_HERE = {c.__name__: c for c in (_url, _as_it_comes, _valkey_cluster)}
USUAL = [
    "_url",
    "_as_it_comes",
    "redis-py-tcp-blocking_pool-resp3-decode-retries",
    "valkey-py-tcp-plain_pool-resp2",
    "redis-py-tls-two_pool-resp2-retries",
    "valkey-py-sentinel-plain_pool-resp2-decode-retries",
]
# Those of a cluster. The first one makes a client there, because a URL would lead past the proxy.
OF_CLUSTER = ["_url", "_valkey_cluster"]


def connected(kind: str, proxy: Proxy) -> contextlib.AbstractContextManager[Any]:
    """Opens a client of a kind: one of the above, or of support/clients.py."""
    return MADE_HERE[kind](proxy) if kind in MADE_HERE else ALL_CLIENTS[kind].connected(proxy.port)


@pytest.fixture
def turns(request, real_server) -> Iterator[str]:
    """Kinds of clients, one after the other and again from the beginning, from a place that depends on the test."""
    names = OF_CLUSTER if real_server.name == CLUSTER else chosen_clients(request.config) or USUAL
    start = zlib.crc32(request.node.name.encode()) % len(names)
    return itertools.cycle(names[start:] + names[:start])


@dataclass
class Scene:
    """An accumulator that is reached through the proxy, and directly."""

    operation: Operation
    through: Any
    direct: Any
    client: redis.Redis
    sent: list[Any] = field(default_factory=list)

    def grad(self, value: float) -> Any:
        return self.operation.grad(value)


class Operation:
    """An operation to do once, and a check that it was done once.

    Element 0 shows everything, because all elements of a gradient have one value, which no other gradient has.
    """

    size = 8
    limit: int | None = 10**9

    def open(self, where: Any, **options: Any) -> Any:
        """Opens the accumulator."""
        return redisacc.ConditionalAccumulator("float32", None, "w", reduction_type="SUM", redis=where, **options)

    def grad(self, value: float) -> Any:
        """Returns a gradient whose elements all have this value."""
        return np.full(self.size, value, np.float32)

    def elements(self, gradient: Any) -> Any:
        """Returns all elements of a gradient that was taken."""
        return gradient

    def prepare(self, scene: Scene) -> None:
        """Prepares what the operation needs."""

    def do(self, scene: Scene) -> Any:
        """The operation, through the proxy."""

    def check(self, scene: Scene, value: Any) -> None:
        """Checks that it was done exactly once."""

    def again(self, scene: Scene) -> None:
        """Checks that late requests have changed nothing; ``check`` has passed before."""


class Apply(Operation):
    def do(self, scene):
        return scene.through.apply_grad(scene.grad(1.0))

    def check(self, scene, value):
        assert (value.outcome, value.global_step) == ("applied", 0)
        self.again(scene)

    def again(self, scene):
        looked, info = scene.direct.peek(), scene.direct.info()
        assert (looked.num_accumulated, info.applied) == (1, 1)
        elements = self.elements(looked.gradient)
        assert elements[0] == elements[-1] == 1.0


class ApplyBuffered(Apply):
    limit = 0


class ApplyInParts(Apply):
    limit = 0
    size = IN_PARTS


class ApplyLarge(Apply):
    limit = 0
    size = LARGE


class ApplyEncoded(Apply):
    """In parts, of bytes that were encoded once. Ones are exact as int8, too."""

    limit = 0
    size = LARGE

    def do(self, scene):
        return scene.through.apply_grad(scene.grad(1.0), encoding="int8")


class ApplyStale(Operation):
    def prepare(self, scene):
        scene.direct.set_global_step(3)

    def do(self, scene):
        return scene.through.apply_grad(scene.grad(1.0), local_step=2)

    def check(self, scene, value):
        assert (value.outcome, value.global_step) == ("stale", 3)
        self.again(scene)
        # A dropped gradient stays dropped, whatever the step is when a copy arrives.
        scene.direct.set_global_step(0)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.num_accumulated, info.applied, info.stale) == (0, 0, 1)


class ApplyLate(Operation):
    """It stays as late, and weighs as much, as when it arrived first, whatever the step is when a copy arrives."""

    def open(self, where, **options):
        return super().open(where, staleness=redisacc.Staleness(2, weight=[1, 0.5, 0.25]), **options)

    def prepare(self, scene):
        scene.direct.set_global_step(3)

    def do(self, scene):
        return scene.through.apply_grad(scene.grad(1.0), local_step=2, weight=4)

    def check(self, scene, value):
        assert (value.outcome, value.global_step) == ("applied", 3)
        self.again(scene)
        scene.direct.set_global_step(4)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.num_accumulated, info.applied, info.stale, info.staleness) == (1, 1, 0, {1: 1})
        looked = scene.direct.peek()
        elements = self.elements(looked.gradient)
        assert (info.total_weight, looked.total_weight, elements[0], elements[-1]) == (2, 2, 2, 2)


class ApplyLateBuffered(ApplyLate):
    limit = 0


class ApplyLateInParts(ApplyLate):
    limit = 0
    size = IN_PARTS


class ApplyRefused(Operation):
    """Refused because of the round's shape; a copy that arrives in another round must not be accepted."""

    def prepare(self, scene):
        scene.direct.apply_grad(np.ones(3, np.float32))

    def do(self, scene):
        with pytest.raises(redisacc.InvalidArgumentError):
            scene.through.apply_grad(scene.grad(1.0), local_step=100)

    def check(self, scene, value):
        assert scene.direct.num_accumulated() == 1
        scene.direct.take_grad(1)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.num_accumulated, info.applied) == (0, 1)


class ApplyWithRoomToMake(Operation):
    """The gradient and those before it are compacted into one."""

    limit = 0

    @property
    def buffered_bytes(self):
        return 4 * self.size

    def prepare(self, scene):
        scene.direct.delete()
        options = {"limits": redisacc.Limits(in_place=0, buffer=3 * self.buffered_bytes)}
        scene.direct = self.open(scene.client, **options)
        scene.through = self.open(scene.through._transport.where, **options)
        for value in (1.0, 2.0, 4.0):
            assert scene.direct.apply_grad(scene.grad(value))

    def do(self, scene):
        return scene.through.apply_grad(scene.grad(8.0), weight=0.5)

    def check(self, scene, value):
        assert value.num_accumulated == 4
        self.again(scene)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.num_accumulated, info.applied) == (4, 4)
        assert info.buffered < 4
        assert info.total_weight == 3.5
        assert set(self.elements(scene.direct.peek().gradient).tolist()) == {11.0}


class ApplyWithRoomToMakeInParts(ApplyWithRoomToMake):
    size = IN_PARTS


class Take(Operation):
    """A late copy must not be granted the next round."""

    def prepare(self, scene):
        for value in (1.0, 2.0, 4.0):
            scene.direct.apply_grad(scene.grad(value))

    def do(self, scene):
        return self.elements(scene.through.take_grad(3))

    def check(self, scene, value):
        assert value[0] == value[-1] == 7.0
        info = scene.direct.info()
        assert (info.global_step, info.takes, info.num_accumulated, info.unacknowledged) == (1, 1, 0, [])
        for _ in range(3):
            scene.direct.apply_grad(scene.grad(8.0), local_step=1)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.global_step, info.takes, info.num_accumulated) == (1, 1, 3)
        assert (info.unacknowledged, info.waiting) == ([], [])
        assert not [key for key in scene.client.scan_iter() if b":taken" in key]


class TakeBuffered(Take):
    limit = 0


class TakeInParts(Take):
    limit = 0
    size = IN_PARTS


class TakeLarge(Take):
    limit = 0
    size = LARGE


class TakeInABlock(Take):
    """Read in a block, acknowledged at its end."""

    limit = 0

    def do(self, scene):
        with scene.through.take(3) as taken:
            assert (taken.global_step, taken.num_accumulated) == (0, 3)
            return taken.gradient


class TakeWithAGrace(Take):
    """The last gradient has ended the grace."""

    def do(self, scene):
        return self.elements(scene.through.take_grad(2, most=3, grace=3600))


class TakeWithSettings(Take):
    def prepare(self, scene):
        super().prepare(scene)
        scene.direct.set_quorum(least=3)

    def do(self, scene):
        return self.elements(scene.through.take_grad())


class TakeInVainWithAGrace(Operation):
    """A take that leaves during its grace takes nothing later, and the grace does not begin again."""

    def prepare(self, scene):
        scene.direct.apply_grad(scene.grad(1.0))

    def do(self, scene):
        with pytest.raises(redisacc.TakeTimeoutError):
            scene.through.take_grad(1, grace=3600, timeout=0)

    def check(self, scene, value):
        # So long ago that it is over.
        scene.client.hset("redisacc:{w}", "grace_began_ms", 1_000_000_000_000)
        self.again(scene)

    def again(self, scene):
        info = scene.direct.info()
        assert (info.takes, info.num_accumulated, info.waiting, info.unacknowledged) == (0, 1, [], [])
        assert scene.client.hget("redisacc:{w}", "grace_began_ms") == b"1000000000000"


class TakeInVain(Operation):
    """A take that times out leaves nothing, and takes nothing later."""

    def do(self, scene):
        with pytest.raises(redisacc.TakeTimeoutError):
            scene.through.take_grad(1, timeout=0)

    def check(self, scene, value):
        scene.direct.apply_grad(scene.grad(1.0))
        assert scene.direct.info().waiting == []

    def again(self, scene):
        info = scene.direct.info()
        assert (info.takes, info.num_accumulated, info.waiting, info.unacknowledged) == (0, 1, [], [])


class Recover(Operation):
    def prepare(self, scene):
        scene.direct.apply_grad(scene.grad(5.0))
        with contextlib.suppress(ZeroDivisionError), scene.direct.take(1):
            raise ZeroDivisionError

    def do(self, scene):
        with scene.through.recover() as taken:
            return taken.gradient

    def check(self, scene, value):
        assert value.tolist() == [5.0] * self.size
        self.again(scene)

    def again(self, scene):
        assert scene.direct.info().unacknowledged == []
        assert not [key for key in scene.client.scan_iter() if b":taken" in key]


class SetStep(Operation):
    def do(self, scene):
        scene.through.set_global_step(5)

    def check(self, scene, value):
        assert scene.direct.global_step() == 5
        scene.direct.apply_grad(scene.grad(1.0), local_step=5)
        scene.direct.take_grad(1)

    def again(self, scene):
        # A late copy would set the step back.
        assert scene.direct.global_step() == 6


class Configure(Operation):
    def do(self, scene):
        scene.through.set_quorum(least=2, grace=1)

    def check(self, scene, value):
        assert scene.direct.quorum() == redisacc.Quorum(2, None, 1.0)
        scene.direct.set_quorum(least=3)

    def again(self, scene):
        # A late copy would undo the change that came after it.
        assert scene.direct.quorum() == redisacc.Quorum(3, None, 1.0)


class Look(Operation):
    def prepare(self, scene):
        scene.direct.apply_grad(scene.grad(3.0))

    def do(self, scene):
        return scene.through.peek(), scene.through.info(), scene.through.num_accumulated(), scene.through.global_step()

    def check(self, scene, value):
        looked, info, number, step = value
        assert looked.gradient.tolist() == [3.0] * self.size
        assert (info.num_accumulated, number, step) == (1, 1, 0)


class Open(Operation):
    def prepare(self, scene):
        scene.direct.delete()

    def do(self, scene):
        where = scene.through._transport.where
        options = {"reduction_type": "SUM", "limits": redisacc.Limits(in_place=self.limit)}
        return redisacc.ConditionalAccumulator("float32", None, "w", redis=where, **options)

    def check(self, scene, value):
        assert value.apply_grad(scene.grad(2.0)).num_accumulated == 1
        scene.direct = redisacc.ConditionalAccumulator("float32", None, "w", reduction_type="SUM", redis=scene.client)
        assert scene.direct.info().incarnation == value.info().incarnation
        self.again(scene)

    def again(self, scene):
        assert scene.direct.peek().gradient.tolist() == [2.0] * self.size
        assert scene.client.smembers("redisacc:names") == {b"w"}


class Delete(Operation):
    """A late copy must not delete a new accumulator of the same name."""

    limit = 0

    def prepare(self, scene):
        Recover().prepare(scene)
        scene.direct.apply_grad(scene.grad(1.0), local_step=1)

    def do(self, scene):
        scene.through.delete()

    def check(self, scene, value):
        left = [key for key in scene.client.scan_iter() if scene.client.pttl(key) < 0]
        assert left == []
        scene.direct = redisacc.ConditionalAccumulator("float32", None, "w", reduction_type="SUM", redis=scene.client)
        scene.direct.apply_grad(scene.grad(2.0))

    def again(self, scene):
        assert scene.direct.peek().gradient.tolist() == [2.0] * self.size
        # A late SREM removes the name from the list, and the next opening adds it again.
        redisacc.ConditionalAccumulator("float32", None, "w", reduction_type="SUM", redis=scene.client)


class Tree(Operation):
    """A tree of a dense leaf, a sparse leaf and one that every gradient lacks."""

    ROWS = 3

    def open(self, where, **options):
        spec = {
            "a": ("float32", (self.size,)),
            "b": [redisacc.Sparse("float32", (None, self.size)), ("float64", (2,))],
        }
        return redisacc.TreeAccumulator(
            spec, "w", reduction_type="SUM", mean=redisacc.Mean(missing="skip"), redis=where, **options
        )

    def grad(self, value):
        rows = np.full((self.ROWS, self.size), value, np.float32)
        return {"a": rows[0], "b": [(np.arange(self.ROWS), rows), None]}

    def elements(self, gradient):
        rows, lacking = gradient["b"]
        assert (rows.indices.tolist(), lacking) == (list(range(self.ROWS)), None)
        return np.concatenate([gradient["a"], rows.values.ravel()])


class ApplyTree(Tree, Apply):
    pass


class ApplyTreeInParts(Tree, Apply):
    limit = 0
    size = IN_PARTS


class ApplyTreeWithRoomToMake(Tree, ApplyWithRoomToMake):
    # Rows and their indices, the dense leaf, the zeros of the one that is missing, and which leaves there are.
    buffered_bytes = 4 * 8 * (Tree.ROWS + 1) + 8 * Tree.ROWS + 16 + 12


class TakeTree(Tree, Take):
    pass


class TakeTreeInParts(Tree, Take):
    limit = 0
    size = IN_PARTS


class Stream(Apply):
    """Two leaves are put one by one, the last one first. Each is sent before the next is there."""

    limit = 0
    size = 80_000

    def open(self, where, **options):
        spec = dict.fromkeys("ab", ("float32", (self.size,)))
        return redisacc.TreeAccumulator(spec, "w", reduction_type="SUM", redis=where, **options)

    def grad(self, value):
        return dict.fromkeys("ab", super().grad(value))

    def elements(self, gradient):
        return np.concatenate([gradient["a"], gradient["b"]])

    def do(self, scene):
        gradient = scene.grad(1.0)
        upload = scene.through._begin(0)
        for leaf, path in ((1, "b"), (0, "a")):
            upload.put(leaf, gradient[path])
            due = {part for part, leaves in enumerate(upload.layout.leaves_of) if min(leaves) >= leaf}
            # Requests are the same in each run, unless a fault ends the upload.
            until(lambda due=due: upload._ended.is_set() or due <= {*upload._written})
        return scene.through._commit(upload, gradient, 1.0, None, "")


class StreamInPartitions(Stream):
    def open(self, where, **options):
        return super().open(where, partitions=3, **options)


class InPartitions(Operation):
    """The parts lie in three slots, apart from the record."""

    limit = 0
    size = IN_PARTS

    def open(self, where, **options):
        return super().open(where, partitions=3, **options)


class ApplyInPartitions(InPartitions, Apply):
    pass


class ApplyWithRoomToMakeInPartitions(InPartitions, ApplyWithRoomToMake):
    pass


class TakeInPartitions(InPartitions, Take):
    pass


OPERATIONS = [
    ApplyInPartitions,
    ApplyWithRoomToMakeInPartitions,
    TakeInPartitions,
    Apply,
    ApplyBuffered,
    ApplyInParts,
    ApplyLarge,
    ApplyEncoded,
    ApplyStale,
    ApplyLate,
    ApplyLateBuffered,
    ApplyLateInParts,
    ApplyRefused,
    ApplyWithRoomToMake,
    ApplyWithRoomToMakeInParts,
    Take,
    TakeBuffered,
    TakeInParts,
    TakeLarge,
    TakeInABlock,
    TakeWithAGrace,
    TakeWithSettings,
    TakeInVain,
    TakeInVainWithAGrace,
    Recover,
    SetStep,
    Configure,
    Look,
    Open,
    Delete,
    ApplyTree,
    ApplyTreeInParts,
    ApplyTreeWithRoomToMake,
    TakeTree,
    TakeTreeInParts,
    Stream,
    StreamInPartitions,
]
# The others differ less from those of their kind.
UNUSUAL_OPERATIONS = (
    *(ApplyTree, TakeTree, ApplyLate, ApplyLateBuffered, ApplyLateInParts, TakeWithAGrace, TakeWithSettings),
    *(TakeInVainWithAGrace, Configure, StreamInPartitions),
)
USUAL_OPERATIONS = [kind for kind in OPERATIONS if kind not in UNUSUAL_OPERATIONS]


@pytest.fixture
def stage(proxy, real_client) -> Callable[..., Any]:
    """Prepares an operation and the kind of client that does it."""

    @contextlib.contextmanager
    def set_scene(operation: Operation, kind: str) -> Iterator[Scene]:
        real_client.flushall()
        direct = operation.open(real_client, limits=redisacc.Limits(in_place=operation.limit))
        with connected(kind, proxy) as where:
            through = operation.open(where, limits=redisacc.Limits(in_place=operation.limit))
            scene = Scene(operation, through, direct, real_client)
            operation.prepare(scene)
            # It is connected already, so that the first message is the operation's.
            scene.through._transport.call("PING")
            yield scene
            proxy.arm(None)
            proxy.deliver_late()
            scene.direct.delete()
            assert leftovers(real_client) == []

    return set_scene


def every_fault(proxy: Proxy, operation: Operation, stage: Any) -> list[Fault]:
    """Returns every place and kind of fault in this operation, found by doing it."""
    # Once more, so that the server knows all scripts.
    for _ in range(2):
        with stage(operation, "_url") as scene:
            proxy.arm(None)
            value = operation.do(scene)
            faults = list(all_faults(proxy.lengths))
            operation.check(scene, value)
            operation.again(scene)
    return faults


@pytest.mark.parametrize("kind", thorough(OPERATIONS, usual=USUAL_OPERATIONS), ids=lambda kind: kind.__name__)
def test_a_connection_that_breaks_anywhere_changes_nothing_else(
    proxy, stage, turns, kind, request, everything, record_property
):
    operation = kind()
    faults = every_fault(proxy, operation, stage)
    assert len(faults) >= 10
    if not request.config.getoption("--long"):
        late = [fault for fault in faults if fault.action == "late"]
        rest = [fault for fault in faults if fault.action != "late"]
        most = 12 if everything else 4
        faults = late[: most - 2] + rest[:: len(rest) // most + 1]
    for fault, client in zip(faults, turns, strict=False):
        with stage(operation, client) as scene:
            proxy.arm(fault)
            value = operation.do(scene)
            assert proxy.happened(), fault
            try:
                operation.check(scene, value)
                late = proxy.deliver_late()
                assert late == (fault.action == "late")
                operation.again(scene)
            except BaseException as error:
                error.add_note(f"{fault}, {client}")
                raise
    record_property("faults", sum(proxy.fired.values()))


@pytest.mark.parametrize(
    "kind", [Apply, ApplyBuffered, Take, TakeBuffered, SetStep, Open, Delete], ids=lambda k: k.__name__
)
def test_replies_that_come_byte_by_byte_are_read_whole(proxy, stage, turns, kind):
    operation = kind()
    with stage(operation, next(turns)) as scene:
        proxy.bytewise = True
        value = operation.do(scene)
        operation.check(scene, value)
        operation.again(scene)
        proxy.bytewise = False


@pytest.mark.parametrize("kind", [Apply, ApplyBuffered], ids=lambda k: k.__name__)
def test_faults_do_no_harm_while_another_client_is_at_work(proxy, stage, turns, kind, background, everything):
    """Both apply to one accumulator; the sum has every accepted gradient of each once."""
    operation = kind()
    faults = every_fault(proxy, operation, stage)
    if not everything:
        faults = faults[::4]
    for fault, client in zip(faults, turns, strict=False):
        with stage(operation, client) as scene:
            ready, stop = threading.Event(), threading.Event()

            def other(scene=scene, ready=ready, stop=stop):
                count = 0
                while not stop.is_set():
                    assert scene.direct.apply_grad(scene.grad(1000.0))
                    count += 1
                    ready.set()
                return count

            job = background(other)
            assert ready.wait(20)
            proxy.arm(fault)
            for _ in range(3):
                assert operation.do(scene)
            stop.set()
            others = job.result()
            assert proxy.happened()
            proxy.deliver_late()
            info = scene.direct.info()
            assert (info.applied, info.num_accumulated) == (others + 3, others + 3)
            assert scene.direct.take_grad(others + 3)[0] == others * 1000.0 + 3.0
