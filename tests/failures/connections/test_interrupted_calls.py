"""The table of calls and moments: every call that waits for the server is interrupted at each request and reply.

A signal handler that raises interrupts it, or the cancellation of its task. Whatever the server had done by then,
nothing is lost, counted twice or left behind, and the same handle works afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis
from support.clients import authority, tls_gateway
from support.driven import DrivenClient
from support.leaks import leftovers
from support.proxy import Fault, Proxy
from support.selection import thorough
from support.until import until

import redisacc
from redisacc._format import parameter_record

pytestmark = pytest.mark.servers("valkey")

# Elements of float32: too many for an inline gradient.
IN_PARTS = 20_000
# How long calls wait that wait in vain, in seconds. Their first polls take much less.
IN_VAIN = 0.2


class Interrupt(BaseException):
    """What the signal handler raises."""


# What else handlers raise. Calls know these from sockets, where they mean that the connection is broken.
LIKE_FAULTS = (TimeoutError, ConnectionResetError, OSError)


class Scene:
    """A server that is reached directly, and through a proxy that interrupts the calls of this thread.

    Attributes:
        client: a client of the server.
        where: what handles get as ``redis=`` that reach it through the proxy.
        interrupt: what the signal handler raises.
    """

    def __init__(self, proxy: Proxy, client: redis.Redis, where: Any, interrupt: type[BaseException]) -> None:
        self._proxy = proxy
        self.client = client
        self.where = where
        self.interrupt = interrupt
        self._raised: BaseException | None = None
        self._handles: list[Any] = []
        self._armed = False

    def open(self, kind: Any, *args: Any, **options: Any) -> Any:
        """Opens a handle whose calls may be interrupted."""
        if isinstance(self.where, DrivenClient):
            handle = self.where.open(kind, *args, redis=self.where, **options)
        else:
            handle = kind(*args, redis=self.where, **options)
        self._handles.append(handle)
        return handle

    def open_directly(self, kind: Any, *args: Any, **options: Any) -> Any:
        """Opens a handle whose calls are never interrupted."""
        handle = kind(*args, redis=self.client, **options)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            handle.close()

    def interrupted(self, function: Callable[[], Any], fault: Fault) -> tuple[bool, Any]:
        """Calls a function, and interrupts it when a message has got to a place.

        Returns:
            Whether that has ended the call; and what the call has returned if not.
        """
        happened = threading.Event()
        interrupt = self._interrupter()

        def happen() -> None:
            happened.set()
            interrupt()

        before = signal.signal(signal.SIGUSR1, self._on_signal)
        self._proxy.when_it_happens = happen
        self._raised = None
        value, is_over = None, False
        try:
            self._armed = True
            self._proxy.arm(fault)
            value = function()
            self._armed = False
        except BaseException as error:
            if error is not self._raised and not isinstance(error, asyncio.CancelledError):
                raise
            is_over = True
        finally:
            self._armed = False
            # From here on, everything passes, except for what is held.
            self._proxy._fault = None
            self._proxy.when_it_happens = lambda: None
            signal.signal(signal.SIGUSR1, before)
        assert not happened.is_set() or self._proxy.happened()
        assert is_over or self._raised is None, "the call has swallowed what the signal handler raised"
        return is_over, value

    def _interrupter(self) -> Callable[[], Any]:
        if isinstance(self.where, DrivenClient):
            return self.where.canceller()
        assert threading.current_thread() is threading.main_thread()
        ident = threading.main_thread().ident
        return lambda: signal.pthread_kill(ident, signal.SIGUSR1)

    def _on_signal(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self._raised = self.interrupt()
            raise self._raised

    def release(self) -> None:
        """Lets replies that were held pass, and hands the server requests that were."""
        self._proxy.resume()
        self._proxy.deliver_late()


class Call:
    """A row of the table: a call, and what has to be true after it was interrupted."""

    def prepare(self, scene: Scene) -> None:
        """Opens handles, and prepares what the call needs."""

    def do(self, scene: Scene) -> Any:
        """The call."""

    def settle(self, scene: Scene) -> None:
        """Does what a caller does after an interrupt. A request may still be on its way."""

    def check(self, scene: Scene, value: Any, *, is_over: bool) -> None:
        """Checks that nothing was lost, doubled or left behind, and that the handle works.

        Args:
            scene: where.
            value: what the call has returned.
            is_over: whether it was interrupted, so that it has not returned.
        """

    def end(self, scene: Scene) -> None:
        """Deletes what is there."""


class OnAccumulator(Call):
    """A call on an accumulator."""

    size = 4
    limit = 10**9
    partitions: int | None = None
    buffer_limit: int | None = None

    def _open(self, opener: Any) -> Any:
        return opener(
            redisacc.ConditionalAccumulator,
            "float32",
            [self.size],
            "w",
            reduction_type="SUM",
            limits=redisacc.Limits(in_place=self.limit, buffer=self.buffer_limit),
            partitions=self.partitions,
        )

    def prepare(self, scene):
        self.direct = self._open(scene.open_directly)
        self.through = self._open(scene.open)
        # Its connection is open, so that the first message is one of the call.
        self.through.num_accumulated()

    def apply(self, *values):
        for value in values:
            assert self.direct.apply_grad(self.grad(value), local_step=2**62)

    def grad(self, value):
        return np.full(self.size, value, np.float32)

    def rounds(self):
        """Takes and recovers all rounds that are left. Returns the elements of each."""
        found = []
        with contextlib.suppress(redisacc.TakeTimeoutError):
            while True:
                found.append(self.through.take_grad(1, timeout=0))
        for _ in self.direct.info().unacknowledged:
            with self.direct.recover() as taken:
                found.append(taken.gradient)
        return [only(gradient) for gradient in found]

    def end(self, scene):
        self.direct.delete()


def only(gradient):
    """Returns the only value of all elements."""
    (value,) = set(gradient.tolist())
    return value


class Apply(OnAccumulator):
    before = 0

    def prepare(self, scene):
        super().prepare(scene)
        self.apply(*[1] * self.before)

    def do(self, scene):
        return self.through.apply_grad(self.grad(1), local_step=2**62)

    def settle(self, scene):
        self.settled = self.through.settle().applied

    def check(self, scene, value, *, is_over):
        assert is_over or (value.outcome, self.settled) == ("applied", 1)
        counted = self.before + self.settled
        assert self.direct.info().applied == counted
        assert self.do(scene).num_accumulated == counted + 1
        assert self.rounds() == [counted + 1]
        assert self.through.settle() == redisacc.types.Tally(self.settled + 1, 0, 0, 0)


class ApplyBuffered(Apply):
    limit = 0


class ApplyInParts(ApplyBuffered):
    size = IN_PARTS


class ApplyInPartitions(ApplyInParts):
    partitions = 3


class ApplyWithRoomToMake(ApplyInParts):
    before = 3
    buffer_limit = 3 * 4 * IN_PARTS


class Stream(ApplyInParts):
    """A gradient of two leaves, the last of which leaves first. It is interrupted wherever the caller waits."""

    size = 80_000

    def _open(self, opener: Any) -> Any:
        spec = dict.fromkeys("ab", ("float32", (self.size,)))
        options = {"reduction_type": "SUM", "limits": redisacc.Limits(in_place=0), "partitions": self.partitions}
        return opener(redisacc.TreeAccumulator, spec, "w", **options)

    def grad(self, value):
        return dict.fromkeys("ab", np.full(self.size, value, np.float32))

    def do(self, scene):
        if not isinstance(scene.where, DrivenClient):
            return self.stream(self.through)
        handle = self.through._driven
        return self.through._driver.run(lambda: handle.waits.run(lambda: self.stream(handle.blocking)))

    def stream(self, acc):
        gradient = self.grad(1)
        upload = None
        try:
            self.upload = upload = acc._begin(2**62)
            for leaf, path in ((1, "b"), (0, "a")):
                upload.put(leaf, gradient[path])
            return acc._commit(upload, gradient, 1.0, None, "")
        finally:
            if upload is not None:
                upload.close()

    def check(self, scene, value, *, is_over):
        # What is in the background has heard that it is over, and removes its parts.
        until(self.upload._ended.is_set)
        super().check(scene, value, is_over=is_over)

    def rounds(self):
        found = []
        with contextlib.suppress(redisacc.TakeTimeoutError):
            while True:
                found.append(only(np.concatenate(list(self.through.take_grad(1, timeout=0).values()))))
        return found


class StreamInPartitions(Stream):
    partitions = 3


class ApplyAgain(Apply):
    """The next apply settles the one before."""

    def settle(self, scene):
        self.do(scene)

    def check(self, scene, value, *, is_over):
        tally = self.through.settle()
        assert tally == redisacc.types.Tally(self.direct.info().applied, 0, 0, 0)
        assert tally.applied in ((1, 2) if is_over else (2,))
        assert self.rounds() == [tally.applied]


class Take(OnAccumulator):
    def prepare(self, scene):
        super().prepare(scene)
        self.apply(1, 2, 4)

    def do(self, scene):
        return self.through.take_grad(3)

    def check(self, scene, value, *, is_over):
        assert self.direct.info().waiting == []
        assert [*([] if is_over else [only(value)]), *self.rounds()] == [7]
        info = self.direct.info()
        assert (info.takes, info.num_accumulated, info.unacknowledged, info.waiting) == (1, 0, [], [])
        self.apply(8, 16, 32)
        assert only(self.do(scene)) == 56


class TakeInParts(Take):
    limit = 0
    size = IN_PARTS


class TakeInPartitions(TakeInParts):
    partitions = 3


class TakeInVain(OnAccumulator):
    """It waits for a gradient that does not arrive."""

    def prepare(self, scene):
        super().prepare(scene)
        self.apply(1)

    def do(self, scene):
        with pytest.raises(redisacc.TakeTimeoutError):
            self.through.take_grad(2, timeout=IN_VAIN)

    def check(self, scene, value, *, is_over):
        self.apply(2)
        # A copy of a request that still arrived would be granted the round.
        info = self.direct.info()
        assert (info.takes, info.num_accumulated, info.unacknowledged, info.waiting) == (0, 2, [], [])
        assert only(self.through.take_grad(2)) == 3


class TakeInABlock(Take):
    def do(self, scene):
        self.used = False
        with self.through.take(3) as taken:
            self.used = True
            return taken.gradient

    def check(self, scene, value, *, is_over):
        rounds = self.rounds()
        # At the end of a block that has used it, the round was removed, or it is listed.
        assert rounds == [7] or (self.used and rounds == [])
        assert is_over or (only(value), rounds) == (7, [])
        assert self.direct.info().waiting == []
        self.apply(8, 16, 32)
        assert only(self.do(scene)) == 56


class Recover(TakeInABlock):
    def prepare(self, scene):
        super().prepare(scene)
        with contextlib.suppress(ZeroDivisionError), self.direct.take(1):
            raise ZeroDivisionError

    def do(self, scene):
        self.used = False
        with self.through.recover() as taken:
            self.used = taken is not None
            return taken and taken.gradient

    def check(self, scene, value, *, is_over):
        rounds = self.rounds()
        assert rounds == [7] or (self.used and rounds == [])
        assert is_over or (only(value), rounds) == (7, [])
        assert self.do(scene) is None


class Peek(OnAccumulator):
    def prepare(self, scene):
        super().prepare(scene)
        self.apply(1, 2)

    def do(self, scene):
        return only(self.through.peek().gradient)

    def check(self, scene, value, *, is_over):
        assert is_over or value == 3
        assert self.do(scene) == 3
        assert self.rounds() == [3]


class PeekInPartitions(Peek):
    limit = 0
    size = IN_PARTS
    partitions = 3


class Info(OnAccumulator):
    def prepare(self, scene):
        super().prepare(scene)
        self.apply(1, 2)

    def do(self, scene):
        return self.through.info().num_accumulated, self.through.global_step(), self.through.quorum().least

    def check(self, scene, value, *, is_over):
        assert is_over or value == (2, 0, None)
        assert self.do(scene) == (2, 0, None)


class SetStep(OnAccumulator):
    def do(self, scene):
        self.through.set_global_step(5)

    def settle(self, scene):
        self.through.settle()
        self.step = self.direct.global_step()

    def check(self, scene, value, *, is_over):
        assert self.direct.global_step() == self.step
        assert self.step in ((0, 5) if is_over else (5,))
        self.do(scene)
        assert self.direct.global_step() == 5


class Configure(OnAccumulator):
    def do(self, scene):
        self.through.set_quorum(least=2)

    def settle(self, scene):
        self.through.settle()
        self.required = self.direct.quorum().least

    def check(self, scene, value, *, is_over):
        assert self.direct.quorum().least == self.required
        assert self.required in ((None, 2) if is_over else (2,))
        self.do(scene)
        assert self.direct.quorum().least == 2


class WaitForStep(OnAccumulator):
    def do(self, scene):
        with pytest.raises(redisacc.WaitTimeoutError, match="was not reached in time"):
            self.through.wait_for_step(1, timeout=IN_VAIN)

    def check(self, scene, value, *, is_over):
        self.direct.set_global_step(1)
        assert self.through.wait_for_step(1) == 1


class ListenToEvents(OnAccumulator):
    def do(self, scene):
        with self.through.events(timeout=IN_VAIN) as events:
            return [event.kind for event in events]

    def check(self, scene, value, *, is_over):
        assert is_over or value == []
        with self.through.events(timeout=20) as events:
            self.apply(1)
            if (kind := next(events).kind) == "missed":
                # It has found out only now that the connection broke.
                self.apply(1)
                kind = next(events).kind
            assert kind == "applied"


class Open(OnAccumulator):
    def prepare(self, scene):
        super().prepare(scene)
        self.direct.delete()

    def do(self, scene):
        return self._open(scene.open)

    def check(self, scene, value, *, is_over):
        opened = self.do(scene)
        assert opened.apply_grad(self.grad(1)).num_accumulated == 1
        self.direct = self._open(scene.open_directly)
        assert self.direct.info().incarnation == opened.info().incarnation
        assert scene.client.smembers("redisacc:names") == {b"w"}


class OpenAndClosePrivate(OnAccumulator):
    """A private accumulator is removed when it is closed, or when its lease ends."""

    def do(self, scene):
        opened = scene.open(redisacc.ConditionalAccumulator, "float32", [self.size])
        try:
            return only(opened.take_grad(1)) if opened.apply_grad(self.grad(3)) else None
        finally:
            opened.close()

    def check(self, scene, value, *, is_over):
        assert is_over or value == 3
        assert self.do(scene) == 3


class Delete(OnAccumulator):
    def prepare(self, scene):
        super().prepare(scene)
        self.apply(1)

    def do(self, scene):
        self.through.delete()

    def check(self, scene, value, *, is_over):
        self.do(scene)
        with pytest.raises(redisacc.NotFoundError, match="accumulator"):
            self.through.info()
        assert scene.client.smembers("redisacc:names") == set()


class OnParameters(Call):
    """A call on parameters."""

    partitions: int | None = None

    def prepare(self, scene):
        self.direct = scene.open_directly(redisacc.Parameters, "w", partitions=self.partitions)
        self.through = scene.open(redisacc.Parameters, "w", partitions=self.partitions)
        self.direct.publish(self.tree(1), step=1, state={"momentum": np.ones(3)})
        assert self.through.latest_state()[0] == 1
        assert only_step(self.through.latest()) == 1

    def tree(self, step):
        rows = np.zeros((100, 4), np.float32)
        rows[:step] = step
        return {"b": np.full(3, float(step)), "rows": rows}

    def publish(self, handle, step):
        changed = {"rows": list(range(step))} if step > 1 else None
        handle.publish(self.tree(step), step=step, changed=changed, state={"momentum": np.full(3, step)})

    def check_published(self, found, step):
        """Checks that a version is what was published for its step."""
        assert found[0] == step
        wanted = self.tree(step)
        assert {path: values.tolist() for path, values in found[1].items()} == {
            path: values.tolist() for path, values in wanted.items()
        }

    def end(self, scene):
        self.direct.delete()


def only_step(found):
    return found[0]


class Publish(OnParameters):
    """The same call again publishes the version, whether it was published already or not."""

    def do(self, scene):
        self.publish(self.through, 2)

    def check(self, scene, value, *, is_over):
        for step in (2, 3):
            self.publish(self.through, step)
            self.check_published(self.direct.latest(), step)
            assert self.direct.latest_state()[1]["momentum"].tolist() == [step] * 3


class PublishInPartitions(Publish):
    partitions = 3


class PublishWhileACopyIsOnItsWay(Publish):
    """What arrives late replaces nothing that is newer."""

    def settle(self, scene):
        for step in (2, 3):
            self.publish(self.through, step)

    def check(self, scene, value, *, is_over):
        self.check_published(self.direct.latest(), 3)
        self.publish(self.through, 4)
        self.check_published(self.direct.latest(), 4)


class PublishTheNext(Publish):
    """The interrupted version is given up: the rows that changed since then are not enough."""

    def check(self, scene, value, *, is_over):
        self.publish(self.through, 3)
        self.check_published(self.direct.latest(), 3)


class PublishTheFirst(Publish):
    def prepare(self, scene):
        self.direct = scene.open_directly(redisacc.Parameters, "w", partitions=self.partitions)
        self.through = scene.open(redisacc.Parameters, "w", partitions=self.partitions)
        assert self.through.latest() is None

    def do(self, scene):
        self.publish(self.through, 1)

    def check(self, scene, value, *, is_over):
        for step in (1, 2):
            self.publish(self.through, step)
            self.check_published(self.direct.latest(), step)


class PublishTheFirstInPartitions(PublishTheFirst):
    partitions = 3


class Latest(OnParameters):
    """It has the version before, and fetches the rows that have changed."""

    def prepare(self, scene):
        super().prepare(scene)
        self.publish(self.direct, 2)

    def do(self, scene):
        return self.through.latest()

    def check(self, scene, value, *, is_over):
        if not is_over:
            self.check_published(value, 2)
        self.check_published(self.do(scene), 2)
        self.publish(self.direct, 3)
        self.check_published(self.do(scene), 3)


class LatestInPartitions(Latest):
    partitions = 3


class LatestState(OnParameters):
    def do(self, scene):
        return self.through.latest_state()[1]["momentum"].tolist()

    def check(self, scene, value, *, is_over):
        assert is_over or value == [1, 1, 1]
        assert self.do(scene) == [1, 1, 1]


class Wait(Latest):
    def do(self, scene):
        return self.through.wait(after=1)


class WaitInVain(OnParameters):
    def do(self, scene):
        with pytest.raises(redisacc.WaitTimeoutError, match="timed out waiting for parameters"):
            self.through.wait(after=1, timeout=IN_VAIN)

    def check(self, scene, value, *, is_over):
        self.publish(self.direct, 2)
        self.check_published(self.through.wait(after=1), 2)


class Finish(OnParameters):
    def do(self, scene):
        self.through.finish()

    def check(self, scene, value, *, is_over):
        assert is_over or self.direct.finished()
        self.do(scene)
        assert self.direct.finished()


class DeleteParameters(OnParameters):
    def do(self, scene):
        self.through.delete()

    def check(self, scene, value, *, is_over):
        self.do(scene)
        with pytest.raises(redisacc.NotFoundError, match="parameters"):
            self.direct.latest()
        assert scene.client.smembers("redisacc:names") == set()


CALLS = [
    *(Apply, ApplyBuffered, ApplyInParts, ApplyInPartitions, ApplyWithRoomToMake, ApplyAgain),
    *(Stream, StreamInPartitions),
    *(Take, TakeInParts, TakeInPartitions, TakeInVain, TakeInABlock, Recover),
    *(Peek, PeekInPartitions, Info, SetStep, Configure, WaitForStep, ListenToEvents),
    *(Open, OpenAndClosePrivate, Delete),
    *(Publish, PublishInPartitions, PublishWhileACopyIsOnItsWay, PublishTheNext, PublishTheFirst),
    *(PublishTheFirstInPartitions, Latest, LatestInPartitions, LatestState, Wait, WaitInVain, Finish, DeleteParameters),
]
# The others differ less from those of their kind.
UNUSUAL_CALLS = (
    *(ApplyBuffered, ApplyInPartitions, TakeInParts, PeekInPartitions, Info, Configure, WaitForStep, LatestState),
    *(Stream, StreamInPartitions),
    *(PublishInPartitions, PublishTheNext, PublishTheFirst, LatestInPartitions, Wait, Finish),
)
WAYS = ("signal", "cancellation")
USUAL_CALLS = [kind for kind in CALLS if kind not in UNUSUAL_CALLS]


@pytest.fixture
def stage(proxy, real_client, monkeypatch) -> Callable[..., Any]:
    """Prepares a call that is interrupted by a signal, or cancelled."""
    # Small values count as large, which have partitions.
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)

    @contextlib.contextmanager
    def set_scene(call: Call, way: str, interrupt: type[BaseException] = Interrupt) -> Iterator[Scene]:
        real_client.flushall()
        with client_over(proxy.port, "tls" if way == "signal over TLS" else "tcp") as client:
            where = DrivenClient(client) if way == "cancellation" else client
            scene = Scene(proxy, real_client, where, interrupt)
            try:
                call.prepare(scene)
                yield scene
                scene.release()
                call.end(scene)
            finally:
                scene.release()
                scene.close()
                if where is not client:
                    where.close()
            assert leftovers(real_client) == []
            # At most one for commands, and one to listen on.
            assert len(client.connection_pool._in_use_connections) <= 2

    return set_scene


@contextlib.contextmanager
def client_over(port: int, wire: str) -> Iterator[redis.Redis]:
    """Yields a client that reaches a port over TCP, or over TLS."""
    if wire == "tcp":
        with redis.Redis(port=port) as client:
            yield client
        return
    certificate = authority().cert_pem.bytes().decode()
    with (
        tls_gateway(port) as gateway,
        redis.Redis("localhost", gateway, ssl=True, ssl_ca_data=certificate) as client,
    ):
        yield client


def moments(proxy: Proxy, stage: Any, call: Call, way: str) -> list[Fault]:
    """Returns the places where a call can be interrupted, found by letting it run."""
    # Once more, so that the server knows all scripts.
    for _ in range(2):
        with stage(call, way) as scene:
            proxy.arm(None)
            value = call.do(scene)
            lengths = {direction: len(found) for direction, found in proxy.lengths.items()}
            call.settle(scene)
            call.check(scene, value, is_over=False)
    faults = []
    for number in range(lengths["request"]):
        # The request never arrives; it arrives later; it was executed, and the reply is on its way.
        faults += [Fault("request", number, 0), Fault("request", number, 0, "late"), Fault("reply", number, 0, "hold")]
    return faults


@pytest.mark.parametrize(
    ("kind", "way"),
    thorough(
        itertools.product(CALLS, WAYS),
        # Half of the calls are cancelled, and the others are interrupted by a signal.
        usual=[(kind, WAYS[number % 2]) for number, kind in enumerate(USUAL_CALLS)],
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_call_that_is_interrupted_anywhere(proxy, stage, everything, kind, way):
    interrupt_everywhere(proxy, stage, kind(), way, Interrupt, everything=everything)


@pytest.mark.slow(keep="OSError")
@pytest.mark.parametrize("interrupt", LIKE_FAULTS)
@pytest.mark.parametrize(
    "kind", thorough(CALLS, usual=[ApplyInParts, Take, LatestInPartitions]), ids=lambda kind: kind.__name__
)
def test_what_a_handler_raises_ends_a_call_even_if_it_looks_like_a_fault(proxy, stage, everything, kind, interrupt):
    interrupt_everywhere(proxy, stage, kind(), "signal", interrupt, everything=everything)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", thorough(LIKE_FAULTS, usual=[TimeoutError]))
@pytest.mark.parametrize("kind", thorough([ApplyInParts, Take], usual=[Take]), ids=lambda kind: kind.__name__)
def test_it_ends_a_call_over_tls_as_well(proxy, stage, everything, kind, interrupt):
    """There, a pause of the server is a TimeoutError."""
    interrupt_everywhere(proxy, stage, kind(), "signal over TLS", interrupt, everything=everything)


def interrupt_everywhere(
    proxy: Proxy, stage: Any, call: Call, way: str, interrupt: type[BaseException], *, everything: bool
) -> None:
    """Interrupts a call at each place, one after the other, and checks what it leaves."""
    faults = moments(proxy, stage, call, way)
    if not everything:
        # Those at the last message, and some of the others.
        *rest, before, late, after = faults
        faults = [*rest[:: len(rest) // 3 + 1], before, late, after]
    number = 0
    for fault in faults:
        with stage(call, way, interrupt) as scene:
            is_over, value = scene.interrupted(lambda scene=scene: call.do(scene), fault)
            number += is_over
            try:
                call.settle(scene)
                scene.release()
                call.check(scene, value, is_over=is_over)
            except BaseException as error:
                error.add_note(f"{fault}, {'interrupted' if is_over else 'not interrupted'}")
                raise
    assert number
