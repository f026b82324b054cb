"""The reducer: a process next to the server that adds up large gradients while they are being uploaded."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable
from functools import partial

from redisacc._arrays import validation
from redisacc._clock import clock, durations
from redisacc._format.keys import Keys
from redisacc._format.record import Record
from redisacc._handles.base import host_and_process
from redisacc._protocol.updates.reduction import LONGEST_IDLE, Reduction
from redisacc._protocol.waiting.lifetime import Closing
from redisacc._text import printable, shown
from redisacc._wire import forks
from redisacc._wire.connect import connect
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.pubsub import PubSub, pubsub_everywhere, pubsub_of
from redisacc._wire.transport import Transport, limited
from redisacc.errors import InvalidArgumentError, NotFoundError, RedisAccError, ServerUnavailableError

logger = logging.getLogger("redisacc")

# How many accumulators a reducer works on at a time, unless the caller says otherwise.
MAX_ACCUMULATORS = 16
# While others have work, an accumulator is worked on for about this long, in seconds.
TURN = 0.02
# The longest pause of the worker, in seconds.
LONGEST_PAUSE = 1.0
# The shortest one, while something is due that cannot be done yet.
SHORTEST_PAUSE = 0.001
# How long a call tries to reach the server, in seconds; and how long all leases may take to be given back at the end.
WORK_TIMEOUT = 1.5
CLOSING_TIMEOUT = 3.0
# How long a look at an accumulator tries to reach the server, in seconds. Takers call again.
CALL_TIMEOUT = 3.0

# The most partitions, of all accumulators, on which a reducer works: each takes a thread and a connection.
MOST_REDUCTIONS = 256
# How many calls are remembered until they are looked at. Takers call again, so the others are not lost.
MOST_CALLS = 1000

_ADDRESS = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[0-9A-Za-z_.-]+):[0-9]{1,5}")
_CALLS = re.compile(r"redisacc:\{([^{}]+)\}:calls")


class Reducer(Closing):
    """Adds up large gradients next to the server while workers upload them, so that a taker fetches only their sum.

    It only saves time. It changes no accumulator and keeps no state: if it is killed, takers do its work. The results
    are the same, bit for bit. Several reducers may run for the same accumulators; one of them works on each, and the
    others stand by.

    It works on an accumulator when a waiting taker calls for it, until nothing has happened there for 10 minutes. A
    taker calls if gradients of at least 512 KiB arrive whose dense arrays have, for as many gradients as it requires,
    more than 1.25 times the bytes of their sum. A reducer needs the memory of one sum for each accumulator, and a
    few MiB. In Redis, it stores at most two sums for each, which expire after 60 seconds.

    On a Redis Cluster, run one next to each node, with ``node=``: it adds up what this node stores: whole gradients, or
    the parts in its partitions. Takers rely on reducers if each partition has one.

    Example:
        >>> with redisacc.Reducer("model*", redis="unix:///run/redis.sock") as reducer:  # doctest: +SKIP
        ...     reducer.run()

    Args:
        pattern: the names of the accumulators, as a glob of the server: ``*``, ``?``, ``[ab]``.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        max_accumulators: how many accumulators it works on at the same time, at least 1. The others get no reducer
            until one of these has been idle for 10 seconds.
        node: the address "host:port" of a node of a Redis Cluster, as the cluster announces it: it works on what this
            node stores, whichever slots it has. While the cluster announces no such node, or the node does not answer,
            it waits. None means all nodes.

    Raises:
        InvalidArgumentError: an argument is invalid, or ``node`` is given without a cluster.
    """

    def __init__(
        self,
        pattern: str = "*",
        *,
        redis: object = None,
        max_accumulators: int = MAX_ACCUMULATORS,
        node: str | None = None,
    ) -> None:
        self._pattern = validation.text(pattern, "pattern", max_bytes=512)
        self._most = validation.integer(max_accumulators, "max_accumulators", low=1)
        self._transport = connect(redis)
        self._node = None if node is None else _checked_node(self._transport, node)
        self._holder = secrets.token_hex(8)
        self._lock = forks.lock()
        # The names of accumulators for which takers have called.
        self._called: dict[str, None] = {}
        self._reductions: dict[tuple[str, int | None], Reduction] = {}
        self._alarm = self._transport.waits.alarm()
        self._closed = forks.event()
        self._running = forks.lock()
        # The accumulators whose server cannot be reached.
        self._outages: set[str] = set()
        # Whether the server was seen to be no node of a cluster.
        self._looked = False
        # Name of an accumulator → the last problem with it that was logged.
        self._problems: dict[str, str] = {}

    def __repr__(self) -> str:
        node = "" if self._node is None else f", node={self._node!r}"
        return f"Reducer({self._pattern!r}, server={self._transport.address}{node})"

    def run(self) -> None:
        """Blocks, and works until ``close`` is called from another thread, or a signal raises.

        While the server cannot be reached, or its node of a cluster, it logs a warning and keeps trying.

        Raises:
            InvalidArgumentError: it is already running in another thread; or ``redis`` leads to one node of a Redis
                Cluster.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidArgumentError("this reducer is already running")
        try:
            calls = Keys(self._pattern).calls
            pubsub = pubsub_everywhere(self._transport)
            with pubsub.listen_to_pattern(calls, self._hear_call):
                self._work(pubsub)
        finally:
            deadline = clock.now() + CLOSING_TIMEOUT
            answers = True
            for key in list(self._reductions):
                answers = self._leave(key, give_back=answers and clock.now() < deadline)
            self._running.release()

    def close(self) -> None:
        """Ends ``run``. Closing twice does nothing."""
        self._closed.set()
        self._alarm.set()

    def _hear_call(self, channel: str, text: str | None) -> None:
        """Notes that a taker calls for reducers, in the thread that listens."""
        match = _CALLS.fullmatch(channel)
        if text is None or match is None:
            return
        with self._lock:
            if len(self._called) >= MOST_CALLS:
                return
            self._called[match[1]] = None
        self._alarm.set()

    def _work(self, pubsub: PubSub) -> None:
        while not self._closed.is_set():
            self._alarm.clear()
            if pubsub.refusal:
                raise NotPermittedError(
                    "the server's access control list does not let this user subscribe to calls of "
                    f"{shown(self._pattern)}: {pubsub.refusal}. `redisacc acl reducer` prints rules that suffice; give "
                    "the reducer the same pattern as these"
                )
            with self._lock:
                called, self._called = list(self._called), {}
            for name in called:
                if not self._closed.is_set():
                    self._attempt("", partial(self._answer, name))
            pause = LONGEST_PAUSE
            if not self._reductions:
                # Nothing else would notice that the server cannot be reached, or refuses this user.
                self._attempt("", self._look_at_server)
            # Those of an accumulator whose node has just not answered would wait for it, too.
            silent: set[str] = set()
            for key, reduction in list(self._reductions.items()):
                if reduction.is_over or reduction.is_idle(LONGEST_IDLE) or not self._is_ours(reduction):
                    self._leave(key)
                    continue
                name, has_work = key[0], reduction.has_work or reduction.due <= clock.now()
                work = partial(reduction.work, self._interrupts(reduction))
                if has_work and name not in silent and not self._attempt(name, work):
                    silent.add(name)
                pause = min(pause, reduction.due - clock.now())
            if not any(reduction.has_work for reduction in self._reductions.values()):
                self._alarm.wait(max(pause, SHORTEST_PAUSE))

    def _look_at_server(self) -> None:
        """Asks the server for something small.

        Raises:
            InvalidArgumentError: it is a node of a cluster, whose messages this client does not hear.
            ServerUnavailableError: it cannot be reached, or the cluster announces no such node at the moment.
        """
        if self._node is not None:
            known = [str(address) for address in self._transport.slot_map().nodes]
            if self._node not in known:
                raise ServerUnavailableError(
                    f"the cluster announces no node {self._node}, but {', '.join(known) or 'none at all'}"
                )
            self._transport.ask(self._node, "TIME")
            return
        if self._transport.cluster is not None or self._looked:
            self._transport.call("TIME")
            return
        info = self._transport.call("INFO", "cluster")
        if b"cluster_enabled:1" in info:
            raise InvalidArgumentError(
                f"the server at {self._transport.address} is a node of a Redis Cluster: give redis= a URL "
                "redis+cluster://HOST:PORT, or a redis.RedisCluster, and the node as node="
            )
        self._looked = True

    def _answer(self, name: str) -> None:
        """Begins to work on an accumulator, as far as it is on the node and not yet worked on."""
        try:
            record = Record(Keys(name), self._transport.call(*Record.command(Keys(name))))
        except NotFoundError:
            return
        except ServerUnavailableError:
            raise
        except RedisAccError as error:
            self._leave_alone(name, str(error))
            return
        keys = Keys(name, record.partitions)
        new = [
            position
            for position in keys.positions
            if (name, position) not in self._reductions and self._stores(keys.home(position))
        ]
        if not new or not self._has_room(name):
            return
        if len(self._reductions) + len(new) > MOST_REDUCTIONS:
            self._leave_alone(
                name,
                f"its {len(new)} partitions here and those that the reducer serves already are more than "
                f"{MOST_REDUCTIONS}, and each needs a thread and a connection. Use fewer partitions, or a reducer "
                "next to each node",
            )
            return
        for position in new:
            reduction = Reduction(
                self._transport,
                keys,
                position,
                holder=self._holder,
                who=host_and_process(os.getpid()),
            )
            for channel in reduction.channels:
                heard = pubsub_of(self._transport, channel).listen(channel, partial(self._hear, reduction, channel))
                reduction.listening.enter_context(heard)
            self._reductions[name, position] = reduction

    def _leave_alone(self, name: str, why: str) -> None:
        """Logs once why the reducer does not work on an accumulator. The taker calls every second."""
        if self._problems.get(name) != why and len(self._problems) < MOST_CALLS:
            self._problems[name] = why
            logger.warning("%s: the reducer leaves it alone: %s", printable(name), why)

    def _has_room(self, name: str) -> bool:
        """Returns whether to work on an accumulator as well, and leaves one that is idle if it takes its place."""
        names = {known for known, _ in self._reductions}
        if name in names or len(names) < self._most:
            return True
        for other in names:
            parts = [key for key in self._reductions if key[0] == other]
            reductions = [self._reductions[key] for key in parts]
            if all(one.is_idle(durations.idle) or one.is_left_alone for one in reductions):
                for key in parts:
                    self._leave(key)
                return True
        return False

    def _hear(self, reduction: Reduction, channel: str, text: str | None) -> None:
        """Handles a message, in the thread that listens."""
        if reduction.hear(channel, text):
            self._alarm.set()

    def _stores(self, home: str) -> bool:
        """Returns whether the node of this reducer stores the keys of a slot."""
        with limited(CALL_TIMEOUT):
            return self._node is None or self._transport.owner_of(home) == self._node

    def _is_ours(self, reduction: Reduction) -> bool:
        """Returns whether the node still stores it, as far as that can be found out. Looks once a second."""
        now = clock.now()
        if now < reduction.look_at:
            return True
        reduction.look_at = now + LONGEST_PAUSE
        try:
            return self._stores(reduction.keys.home(reduction.position))
        except ServerUnavailableError:
            # It notices when it works.
            return True

    def _leave(self, key: tuple[str, int | None], *, give_back: bool = True) -> bool:
        """Stops working on an accumulator, or on a partition. Returns whether the server answered, if it was asked."""
        reduction = self._reductions.pop(key)
        reduction.listening.close()
        if not give_back:
            return False
        with limited(WORK_TIMEOUT):
            return reduction.release()

    def _attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Does something with the server. Returns False, and logs it once, if it cannot be reached.

        Args:
            name: the accumulator that it concerns; "": none in particular.
            work: does it.
        """
        where = f"{printable(name)}: " if name else ""
        try:
            # All accumulators have the same thread, and their leases last for 3 seconds.
            with limited(WORK_TIMEOUT):
                work()
        except ServerUnavailableError as error:
            if name not in self._outages:
                logger.warning("%sthe reducer cannot reach the server, and keeps trying: %s", where, error)
                self._outages.add(name)
            return False
        if name in self._outages:
            self._outages.remove(name)
            logger.warning("%sthe server is back", where)
        return True

    def _interrupts(self, working: Reduction) -> Callable[[], bool]:
        """Returns the function that says whether ``working`` has to stop, because others have work."""
        until = clock.now() + TURN

        def interrupted() -> bool:
            if self._closed.is_set():
                return True
            if clock.now() < until:
                return False
            if self._called:
                return True
            return any(other.has_work for other in self._reductions.values() if other is not working)

        return interrupted


def _checked_node(transport: Transport, node: object) -> str:
    """Returns the address of a node of a cluster. Nothing is sent: it may not be up yet.

    Raises:
        InvalidArgumentError: it is not such an address, or the server is not a cluster.
    """
    if transport.cluster is None:
        raise InvalidArgumentError(
            f"node={shown(node)} names a node of a Redis Cluster, but {transport.address} is a single server: "
            "leave it out"
        )
    if not isinstance(node, str) or not _ADDRESS.fullmatch(node):
        raise InvalidArgumentError(f"node must be HOST:PORT, as the cluster announces it, not {shown(node)}")
    return node
