"""The table of faults: each lets an operation meet one boundary of its exchange with the server, through a proxy.

Boundaries are found by doing the operation once. A fault says which of them it can be put at, and how the operation has
ended, as far as its caller knows.
"""

import asyncio
import contextlib
import gc
import signal
import threading
from dataclasses import dataclass
from types import ModuleType

import redis
import valkey
from operations import Outcome
from support.child_processes import PATIENCE, Child
from support.clients import ALL as CLIENTS
from support.clients import ClientKind
from support.driven import DrivenClient
from support.leaks import leftovers
from support.proxy import ClusterProxy, Fault, all_faults
from support.suspension import SECONDS, collect_garbage, suspend
from support.until import until

# The kinds of clients that operations usually meet faults with, in turn.
USUAL_CLIENTS = (
    "url",
    "client",
    "redis-py-tcp-blocking_pool-decode-retries",
    "valkey-py-tcp-plain_pool",
    "redis-py-tls-two_pool-retries",
    "valkey-py-sentinel-plain_pool-decode-retries",
)
CLUSTER_CLIENTS = ("client", "valkey client")


class Scene:
    """A server that is reached directly, and through a proxy.

    Args:
        proxy: the proxy.
        client: a client of the server.
        url: the server's.
        clock: the clock that processes follow.

    Attributes:
        where: what the handles get as ``redis=`` that reach the server through the proxy.
        late: how many requests were handed to the server late.
    """

    def __init__(self, proxy, client, url, clock):
        self.proxy = proxy
        self.client = client
        self.url = url
        self.clock = clock
        self.where = None
        self.late = 0
        self.closing = contextlib.ExitStack()

    def connect(self, kind="client"):
        """Sets ``where`` to a client of this kind."""
        where = self.proxy.where
        if isinstance(self.proxy, ClusterProxy):
            where = self.proxy.client(valkey if kind == "valkey client" else redis)
            self.closing.callback(where.close)
        elif kind == "client":
            where = self.closing.enter_context(redis.Redis(port=self.proxy.port))
        elif kind == "TLS":
            where = self.closing.enter_context(ClientKind("redis-py", "tls").connected(self.proxy.port))
        elif kind == "asyncio":
            where = DrivenClient(redis.Redis(port=self.proxy.port))
            self.closing.callback(where.close)
        elif kind != "url":
            where = self.closing.enter_context(CLIENTS[kind].connected(self.proxy.port))
        self.where = where

    def open(self, kind, *args, **options):
        """Opens a handle that meets faults."""
        options["redis"] = self.where
        driven = isinstance(self.where, DrivenClient)
        handle = self.where.open(kind, *args, **options) if driven else kind(*args, **options)
        self.closing.callback(handle.close)
        return handle

    def open_directly(self, kind, *args, **options):
        """Opens a handle that meets none."""
        handle = kind(*args, redis=self.client, **options)
        self.closing.callback(handle.close)
        return handle

    def has_happened(self, operation):
        """Returns whether the fault has happened, as far as an operation has to have as many messages as before."""
        # Connections to some nodes of a cluster are opened on the way, and not each client says as much.
        return operation.is_timed or isinstance(self.proxy, ClusterProxy) or self.proxy.happened()

    def release(self):
        """Lets everything pass that was held, and hands the server the requests that are late."""
        self.proxy.arm(None)
        self.proxy.resume()
        self.late += self.proxy.deliver_late()

    def time(self):
        """Lets leases run out while somebody waits in the block, if processes follow a clock."""
        return contextlib.nullcontext() if self.clock is None else self.clock.running()

    def pass_time(self):
        """Lets the leases of processes that are gone run out, if there may be any."""
        if self.clock is not None:
            self.clock.jump(SECONDS)

    def leftovers(self):
        """Returns the keys that nothing uses, apart from those in partitions that only `doctor --fix` finds."""
        found = leftovers(self.client)
        if found and self.late and all(":partition:" in line for line in found):
            # The part was written when its attempt had been given up.
            collect_garbage(self.url)
            found = leftovers(self.client)
        return found


class FaultKind:
    """A kind of fault.

    Attributes:
        needs_clock: whether time passes.
        number: at how many places it is tried, unless all are.
    """

    needs_clock = False
    number = 3

    @property
    def without(self):
        """How an operation that is done without a fault finds the places."""
        return self

    def places(self, lengths):
        """Returns where it can happen in exchanges whose messages have these lengths."""
        raise NotImplementedError

    def meet(self, scene, operation, place, client):
        """Lets an operation meet it at a place. None: only does the operation."""
        raise NotImplementedError


class Broken(FaultKind):
    """The connection breaks, before, in or after a message."""

    def places(self, lengths):
        return [fault for fault in all_faults(lengths) if fault.action != "late"]

    def meet(self, scene, operation, place, client):
        scene.connect(client)
        operation.enter(scene)
        scene.proxy.arm(place)
        value = operation.do(scene)
        assert place is None or scene.has_happened(operation)
        return Outcome("done", value)


class Late(Broken):
    """The connection breaks before a request, which arrives when it was sent again, and much else has happened."""

    number = 4

    def places(self, lengths):
        return [Fault("request", number, 0, "late") for number in range(len(lengths["request"]))]


class Bytewise(Broken):
    """Replies arrive byte by byte."""

    def places(self, lengths):
        return [Fault("request", 0, 0, "pass")]

    def meet(self, scene, operation, place, client):
        scene.proxy.bytewise = place is not None
        try:
            return super().meet(scene, operation, place, client)
        finally:
            scene.proxy.bytewise = False


class Flushed(Broken):
    """The server forgets all scripts before a request."""

    def places(self, lengths):
        return [Fault("request", number, 0, "pass") for number in range(len(lengths["request"]))]

    def meet(self, scene, operation, place, client):
        scene.proxy.when_it_happens = scene.client.script_flush
        try:
            return super().meet(scene, operation, place, client)
        finally:
            scene.proxy.when_it_happens = lambda: None


class Interrupt(BaseException):
    """What a signal handler raises."""


class Interrupted(FaultKind):
    """A signal handler raises, or the task is cancelled, when a message has got to a place.

    Args:
        kind: what the handler raises. Calls know some errors from sockets, where they mean that the connection broke.
        client: the kind of client.
    """

    number = 6

    def __init__(self, kind=Interrupt, client="client"):
        self._kind = kind
        self._client = client
        self._raised = None
        self._armed = False

    def places(self, lengths):
        # The request never arrives; it arrives later; it was executed, and the reply is on its way.
        return [
            fault
            for number in range(len(lengths["request"]))
            for fault in (
                Fault("request", number, 0),
                Fault("request", number, 0, "late"),
                Fault("reply", number, 0, "hold"),
            )
        ]

    def meet(self, scene, operation, place, client):
        scene.connect(self._client)
        operation.enter(scene)
        interrupt, happens = self._interrupter(scene), threading.Event()
        before = signal.signal(signal.SIGUSR1, self._on_signal)
        scene.proxy.when_it_happens = lambda: (happens.set(), interrupt())
        self._raised = None
        outcome = Outcome("over")
        try:
            self._armed = True
            scene.proxy.arm(place)
            outcome = Outcome("done", operation.do(scene))
            self._armed = False
        except BaseException as error:
            if error is not self._raised and not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._armed = False
            if place is not None:
                # What the proxy keeps for later is complete. From here on, everything passes, except for what is held.
                assert not happens.is_set() or scene.proxy.happened()
                scene.proxy.arm(None)
            scene.proxy.when_it_happens = lambda: None
            signal.signal(signal.SIGUSR1, before)
        assert outcome.how == "over" or self._raised is None, "the call has swallowed what the signal handler raised"
        return outcome

    def _interrupter(self, scene):
        if isinstance(scene.where, DrivenClient):
            return scene.where.canceller()
        ident = threading.main_thread().ident
        assert ident == threading.get_ident()
        return lambda: signal.pthread_kill(ident, signal.SIGUSR1)

    def _on_signal(self, *_):
        if self._armed:
            self._armed = False
            self._raised = self._kind()
            raise self._raised


@dataclass(frozen=True)
class Stop:
    """Where a process stops, and whether its connections break while it does not run."""

    fault: Fault
    breaks: bool

    @property
    def number(self):
        """That of the message."""
        return self.fault.number


class Killed(FaultKind):
    """The process is killed. The requests that it had sent still arrive, or don't."""

    needs_clock = True

    @property
    def without(self):
        # The messages are the same without a process.
        return Broken()

    def places(self, lengths):
        return [
            Stop(Fault(direction, number, offset, "stall"), breaks=breaks)
            for direction in ("request", "reply")
            for number, length in enumerate(lengths[direction])
            for offset in (0, length // 2, None)
            for breaks in (False, True)
        ]

    def meet(self, scene, operation, place, client):
        def work():
            scene.connect("client" if isinstance(scene.proxy, ClusterProxy) else "url")
            operation.enter(scene)
            yield "ready"
            yield operation.do(scene)

        others = self.connections(scene)
        child = Child(work)
        scene.closing.callback(child.close)
        child.value()
        scene.proxy.arm(place.fault)
        child.go()
        until(lambda: scene.proxy.happened(0) or child.has_value, PATIENCE)
        assert scene.has_happened(operation)
        outcome = self.stop(scene, operation, child, breaks=place.breaks)
        # What had been passed on is executed before the outcome is looked at.
        until(lambda: self.connections(scene) <= others, PATIENCE)
        return outcome

    def connections(self, scene):
        """Returns how many connections the server has."""
        return scene.client.info("clients")["connected_clients"]

    def stop(self, scene, operation, child, *, breaks):
        """Does to a process what the fault is, while all that it sends is held."""
        child.kill()
        self.let_pass(scene, breaks=breaks)
        scene.proxy.cut_all()
        # It may have said that it was done before.
        with contextlib.suppress(EOFError):
            return Outcome("done", child.value())
        return Outcome("gone")

    def let_pass(self, scene, *, breaks):
        if breaks:
            scene.proxy.cut_all()
        scene.proxy.resume()


class Stopped(Killed):
    """The process is stopped for a moment."""

    def places(self, lengths):
        return [place for place in super().places(lengths) if not place.breaks]

    def stop(self, scene, operation, child, *, breaks):
        child.signal(signal.SIGSTOP)
        self.meanwhile(scene, operation)
        self.let_pass(scene, breaks=breaks)
        child.signal(signal.SIGCONT)
        outcome = Outcome("done", child.value())
        child.kill()
        return outcome

    def meanwhile(self, scene, operation):
        """What happens while it does not run."""


class Suspended(Stopped):
    """The process does not run for longer than any lease, and others clean up meanwhile.

    Args:
        others: what else they do; it gets the operation.
        number: of places.
    """

    def __init__(self, others=lambda operation: None, number=3):
        self._others = others
        self.number = number

    def places(self, lengths):
        # Nothing, or half of a pipeline, was executed; or all was, and the reply is on its way.
        return [place for place in Killed.places(self, lengths) if place.fault.offset == 0]

    def meanwhile(self, scene, operation):
        suspend(scene.clock, scene.url)
        self._others(operation)


class Forked(FaultKind):
    """A call waits for its reply, and a child that another thread forks uses the same handle."""

    @property
    def without(self):
        return Broken()

    def places(self, lengths):
        return [Fault("reply", number, 0, "hold") for number in range(len(lengths["reply"]))]

    def meet(self, scene, operation, place, client):
        scene.connect(client)
        operation.enter(scene)
        scene.proxy.arm(place)

        def work():
            operation.look(scene)
            yield None

        def fork():
            assert scene.has_happened(operation)
            child = Child(work)
            try:
                used.append(child.value())
            finally:
                child.close()
                scene.proxy.resume()

        used = []
        thread = threading.Thread(target=fork)
        thread.start()
        value = operation.do(scene)
        thread.join(PATIENCE)
        assert used
        return Outcome("done", value)


class ForkedWhileLocked(Broken):
    """Another thread holds every lock when a child is forked, which does the operation with the same handle."""

    def places(self, lengths):
        # One for each kind of client.
        return [Fault("request", 0, 0, "pass")] * 12

    @property
    def without(self):
        return Broken()

    def meet(self, scene, operation, place, client):
        scene.connect(client)
        operation.enter(scene)

        def work():
            yield operation.do(scene)

        with all_locks_held() as number:
            child = Child(work)
        scene.closing.callback(child.close)
        # A pool alone has two locks, and each handle has some.
        assert number > 20
        # The handle of this process has done nothing.
        operation.through = operation.direct
        return Outcome("done", child.value())


@contextlib.contextmanager
def all_locks_held():
    """Lets another thread hold every lock of redisacc and of client libraries that is free. Yields their number."""
    holding, let_go = threading.Event(), threading.Event()
    # What was there before the tests is frozen, and would not be found.
    gc.unfreeze()
    found = list(_locks())
    gc.freeze()
    held = []

    def hold():
        held.extend(lock for lock in found if lock.acquire(blocking=False))
        holding.set()
        let_go.wait()
        for lock in held:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait()
    try:
        yield len(held)
    finally:
        let_go.set()
        holder.join()


def _locks():
    kinds = type(threading.Lock()), type(threading.RLock())
    for thing in gc.get_objects():
        kind = type(thing)
        name = thing.__name__ if isinstance(thing, ModuleType) else kind.__module__
        # The __module__ of some built-in classes is a descriptor. An alarm is held as its way to wait, and the lock of
        # embedded servers by the fork itself.
        if str(name).partition(".")[0] not in ("redisacc", "redis", "valkey"):
            continue
        if kind.__name__ == "ThreadAlarm" or str(name).startswith("redisacc.embedded"):
            continue
        for value in list(getattr(thing, "__dict__", {}).values()):
            if isinstance(value, kinds):
                yield value
            elif isinstance(value, threading.Event):
                yield value._cond._lock


LIKE_FAULTS = (TimeoutError, ConnectionResetError, OSError)
FAULTS = {
    "broken": Broken(),
    "late": Late(),
    "bytewise": Bytewise(),
    "flushed": Flushed(),
    "interrupted": Interrupted(),
    **{f"interrupted by {kind.__name__}": Interrupted(kind) for kind in LIKE_FAULTS},
    **{f"interrupted by {kind.__name__} over TLS": Interrupted(kind, "TLS") for kind in LIKE_FAULTS},
    "cancelled": Interrupted(client="asyncio"),
    "killed": Killed(),
    "stopped": Stopped(),
    "suspended": Suspended(),
    "forked": Forked(),
    "forked while locked": ForkedWhileLocked(),
}
