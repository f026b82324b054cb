"""A discrete-event simulation of training steps: hosts with links, servers with one thread, and processes.

Work and bytes queue in order of arrival: at a process, at each direction of a host's link, and, if processes share
them, at cores. A transfer is cut into pieces, so that those which share a link take turns. Packet loss, the start of
TCP and the switch are left out.

Of many hosts, at most ``MOST`` are simulated. Each exchange between two of them stands for several: a worker's exchange
with a node for those with ``nodes / MOST`` nodes, the node's for those with ``workers / MOST`` workers. The load of
each process and each link is that of the whole crew, and the chief's and the leader's too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import simpy

from benchmarks.scale.costs import Costs
from benchmarks.scale.step import MOST_CHANNELS, Step

MOST = 24
# Bytes of a transfer that pass before another one has its turn.
PIECE = 64 * 1024
# Bytes of a message, of a small request, and of the reply to one.
SMALL = 250
# The chief's pause before it looks for parts again, in seconds.
PAUSE = 0.001

Events = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True)
class Network:
    """The hosts and their links.

    Attributes:
        gigabits: rate of each link in each direction, in Gbit/s; infinity: there are no links, as on one machine.
        latency: seconds until a message has arrived and wakes its receiver.
        cores: how many cores all processes share; None: each has one of its own.
        slowness: how much longer work takes, because programs that are not simulated use the cores, too.
    """

    gigabits: float
    latency: float = 100e-6
    cores: int | None = None
    slowness: float = 1.0


@dataclass(frozen=True)
class Arrangement:
    """Where nodes and their reducers run, and what is done otherwise than the library does it today.

    Attributes:
        step: what a step sends.
        beside: whether the nodes are on the workers' hosts; else, each has a host of its own.
        reducers: whether one runs beside each node; else, the chief updates everything.
        share: bytes on the wire as a share of float32.
        direct: nodes pass on announcements to their reducers with the message about the first part, so the leader tells
            only the chief of them.
        deaf: the chief does not listen to messages about parts.
        sweepers: reducers remove the parts that they have added.
    """

    step: Step
    beside: bool = False
    reducers: bool = True
    share: float = 1.0
    direct: bool = False
    deaf: bool = False
    sweepers: bool = False


class Queue:
    """Serves work in order of arrival, one piece after the other."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free = 0.0
        self.busy = 0.0

    def use(self, seconds: float) -> simpy.Event:
        """Returns the event that the work is done."""
        self.busy += seconds
        self._free = max(self._free, self._env.now) + seconds
        return self._env.timeout(self._free - self._env.now)


class Process:
    """A process with one thread that works; with ``cores``, it needs one of them meanwhile."""

    def __init__(self, env: simpy.Environment, host: Host, cores: simpy.Resource | None, slowness: float = 1.0) -> None:
        self._env = env
        self.host = host
        self._slowness = slowness
        self._cores = cores
        self._queue = Queue(env)
        self._lock = simpy.Resource(env) if cores is not None else None

    @property
    def busy(self) -> float:
        """Seconds that it has worked."""
        return self._queue.busy

    def work(self, seconds: float) -> Events:
        """Works for some seconds of processor time."""
        if self._cores is None or self._lock is None:
            yield self._queue.use(seconds)
            return
        self._queue.busy += seconds
        with self._lock.request() as mine:
            yield mine
            with self._cores.request() as core:
                yield core
                yield self._env.timeout(seconds * self._slowness)


class Host:
    """A host with a link."""

    def __init__(self, env: simpy.Environment, network: Network) -> None:
        self._env, self._network = env, network
        self.sends, self.receives = Queue(env), Queue(env)
        self._rate = network.gigabits * 1e9 / 8

    def send(self, to: Host, nbytes: float, *, times: float = 1, times_there: float = 1) -> Events:
        """Sends bytes. ``times`` and ``times_there``: how many such transfers it stands for here and there."""
        if to is not self and self._rate < math.inf:
            left, arrived = nbytes, None
            while left > 0:
                piece = min(left, PIECE)
                left -= piece
                yield self.sends.use(piece * times / self._rate)
                arrived = to.receives.use(piece * times_there / self._rate)
            if arrived is not None:
                yield arrived
        if self._network.latency:
            yield self._env.timeout(self._network.latency)


@dataclass(frozen=True)
class Outcome:
    """What a simulated training took.

    Attributes:
        seconds: of a step.
        busy: what was busy → its share of that time, the busiest first. Of several of a kind, the busiest one.
    """

    seconds: float
    busy: dict[str, float]

    @property
    def full(self) -> str:
        """What was the busiest."""
        return next(iter(self.busy))


class Simulation:
    """A training in an arrangement. ``run`` may be called once."""

    def __init__(self, arrangement: Arrangement, network: Network, costs: Costs) -> None:
        self.of, self.step, self.costs = arrangement, arrangement.step, costs
        self.env = env = simpy.Environment()
        cores = simpy.Resource(env, network.cores) if network.cores else None
        step = self.step
        workers, nodes = min(step.workers, MOST), min(step.partitions, MOST)
        # How many exchanges a simulated one stands for: at a node, and at a worker.
        self.crew, self.spread = step.workers / workers, step.partitions / nodes
        hosts = [Host(env, network) for _ in range(max(workers, nodes) if arrangement.beside else workers)]
        of_nodes = hosts[:nodes] if arrangement.beside else [Host(env, network) for _ in range(nodes)]
        self.workers = [Process(env, hosts[number], cores, network.slowness) for number in range(workers)]
        self.servers = [Process(env, host, cores, network.slowness) for host in of_nodes]
        self.reducers = [Process(env, host, cores, network.slowness) for host in of_nodes]
        self.leader = self.servers[0]
        self.chief = Process(env, hosts[0], cores, network.slowness)
        self.hosts = list(dict.fromkeys([*hosts, *of_nodes]))
        # Parts of a gradient at a node, and bytes of one on the wire.
        self.each = max(round(step.parts / step.partitions), 1)
        self.nbytes = step.nbytes / (self.each * step.partitions)
        self.wire = self.nbytes * arrangement.share
        self.scripts = ("register", "commit") if step.partitions > 1 else ("stage", "commit")
        self.listens = step.partitions <= MOST_CHANNELS
        self.number = -1
        self.ends: list[float] = []
        self._begin()

    def _begin(self) -> None:
        """Begins a step: nothing of it has happened."""
        env, self.number = self.env, self.number + 1
        nodes = range(len(self.servers))
        self.announced = {(worker, node): env.event() for worker in range(len(self.workers)) for node in nodes}
        self.counted: dict[tuple[int, int], int] = defaultdict(int)
        self.committed, self.all_committed = 0, env.event()
        self.updated = {(node, part): env.event() for node in nodes for part in range(self.each)}
        self.published = env.event()
        self.looked = dict.fromkeys(nodes, False)

    def run(self, steps: int = 5, first: int = 2) -> Outcome:
        """Simulates some steps. Those from ``first`` on count."""
        self._processes = [self.env.process(self._work(number, steps)) for number in range(len(self.workers))]
        self.env.process(self._lead(steps))
        before: dict[str, list[float]] = {}
        while len(self.ends) < steps:
            self.env.step()
            if len(self.ends) == first and not before:
                before = self._busy()
        taken = self.ends[-1] - self.ends[first - 1]
        after = self._busy()
        shares = {
            name: max([end - begin for begin, end in zip(before[name], after[name], strict=True)]) / taken
            for name in after
            if after[name]
        }
        each = [end - begin for begin, end in pairwise(self.ends[first - 1 :])]
        return Outcome(sum(each) / len(each), dict(sorted(shares.items(), key=lambda item: -item[1])))

    def _busy(self) -> dict[str, list[float]]:
        return {
            "leader's processor": [self.leader.busy],
            "another node's processor": [server.busy for server in self.servers[1:]],
            "chief's processor": [self.chief.busy],
            "a reducer's processor": [reducer.busy for reducer in self.reducers],
            "a worker's processor": [worker.busy for worker in self.workers],
            "leader's link, out": [self.leader.host.sends.busy],
            "leader's link, in": [self.leader.host.receives.busy],
            "a host's link, out": [host.sends.busy for host in self.hosts if host is not self.leader.host],
            "a host's link, in": [host.receives.busy for host in self.hosts if host is not self.leader.host],
        }

    # Requests

    def _script(
        self,
        client: Process,
        name: str,
        *,
        gradients: float = 0,
        times: float = 1,
        deliveries: float = 0,
        nbytes: float = 0,
    ) -> Events:
        """A client runs a script at the leader, which sends messages.

        Args:
            client: the client.
            name: the script.
            gradients: how many gradients it concerns.
            times: how many such requests arrive at the leader.
            deliveries: messages times their listeners, for one request.
            nbytes: of these together.
        """
        costs = self.costs
        fixed, each = costs.scripts.get(name, (0.0, 0.0))
        yield from client.work(costs.call)
        yield from client.host.send(self.leader.host, 2 * SMALL, times_there=times)
        seconds = costs.server_call + fixed + each * gradients
        seconds += deliveries * costs.delivery + nbytes * costs.delivery_byte
        yield from self.leader.work(times * seconds)
        yield from self.leader.host.send(client.host, SMALL, times=times)

    def _read_record(self, client: Process, times: float) -> Events:
        yield from client.work(self.costs.call)
        yield from client.host.send(self.leader.host, SMALL, times_there=times)
        yield from self.leader.work(times * self.costs.server_call)
        yield from self.leader.host.send(client.host, 2 * SMALL, times=times)

    def _hear(self, listener: Process, messages: float, *, times: float = 1, nbytes: float = SMALL) -> Events:
        """Messages of the leader reach a listener. ``times``: how many such listeners there are."""
        if listener.host is not self.leader.host:
            yield from self.leader.host.send(listener.host, messages * nbytes, times=times, times_there=1)
        yield from listener.work(messages * self.costs.message)

    # Workers

    def _work(self, worker: int, steps: int) -> Events:
        me, costs, env = self.workers[worker], self.costs, self.env
        nodes = range(len(self.servers))
        for _ in range(steps):
            yield from me.work(costs.worker)
            reducers = 0 if self.of.direct or not self.of.reducers else self.step.partitions
            told, size = 1 + reducers, self.step.announcement
            yield from self._script(me, self.scripts[0], times=self.crew, deliveries=told, nbytes=told * size)
            for node in nodes:
                env.process(self._announce(worker, node, 0 if self.of.direct else size))
            env.process(self._hear(self.chief, self.crew, nbytes=size))
            uploads = [env.process(self._upload(worker, node)) for node in nodes]
            ahead = [env.process(self._download(worker, node, part)) for node in nodes for part in range(self.each)]
            yield env.all_of(uploads)
            published = self.published
            yield from self._script(me, self.scripts[1], times=self.crew, deliveries=told, nbytes=told * SMALL)
            env.process(self._count())
            if reducers:
                for reducer in self.reducers:
                    env.process(self._hear(reducer, self.crew, times=self.spread))
            yield published
            yield from self._hear(me, 2, times=self.crew)
            yield from self._read_record(me, self.crew)
            yield env.all_of(ahead)

    def _announce(self, worker: int, node: int, size: float) -> Events:
        """The announcement of a gradient reaches a reducer."""
        announced = self.announced[worker, node]
        if size:
            yield from self._hear(self.reducers[node], self.crew, times=self.spread, nbytes=size)
        announced.succeed()

    def _upload(self, worker: int, node: int) -> Events:
        """A worker stores the parts of its gradient at a node."""
        me, server, costs, step = self.workers[worker], self.servers[node], self.costs, self.number
        if self.step.partitions > 1:
            yield from me.work(self.spread * costs.worker_node)
        hears = not self.of.deaf and self.listens
        for part in range(self.each):
            # SET, PERSIST, STRLEN, PUBLISH.
            yield from me.work(
                self.spread * (4 * costs.command + self.wire * costs.byte_out)
                + self.nbytes * self.spread * costs.worker_byte
            )
            yield from me.host.send(server.host, self.wire, times=self.spread, times_there=self.crew)
            seconds = 4 * costs.server_command + self.wire * costs.server_in + (1 + hears) * costs.delivery
            yield from server.work(self.crew * seconds)
            self.env.process(self._add(worker, node, part, step))
            if hears:
                self.env.process(self._tell_chief(server))
        yield from server.host.send(me.host, SMALL, times=self.crew, times_there=self.spread)
        yield from me.work(self.spread * costs.call)

    def _tell_chief(self, server: Process) -> Events:
        """A node tells the chief of parts that have arrived."""
        if server.host is not self.chief.host:
            yield from server.host.send(self.chief.host, SMALL, times=self.crew, times_there=self.crew * self.spread)
        yield from self.chief.work(self.crew * self.spread * self.costs.message)

    def _download(self, worker: int, node: int, part: int) -> Events:
        """A worker fetches a part of the next weights: when it hears of it, or when they are published."""
        me, server, costs = self.workers[worker], self.servers[node], self.costs
        yield self.updated[node, part] if self.listens else self.published
        yield from me.work(self.spread * (costs.command + costs.message * self.listens))
        yield from me.host.send(server.host, SMALL, times=self.spread, times_there=self.crew)
        yield from server.work(self.crew * (costs.server_call + self.wire * costs.server_out))
        yield from server.host.send(me.host, self.wire, times=self.crew, times_there=self.spread)
        yield from me.work(self.spread * self.wire * costs.byte_in)

    # Reducers

    def _add(self, worker: int, node: int, part: int, step: int) -> Events:
        """A reducer adds a part of a gradient, and updates the part of the weights when it has all of them."""
        server, costs = self.servers[node], self.costs
        me = self.reducers[node] if self.of.reducers else self.chief
        if self.of.reducers:
            yield self.announced[worker, node]
        yield from me.work(self.crew * (costs.message + costs.command))
        if me.host is not server.host:
            yield from me.host.send(server.host, SMALL)
        yield from server.work(self.crew * (costs.server_call + self.wire * costs.server_out))
        if me.host is not server.host:
            yield from server.host.send(me.host, self.wire * self.crew)
        seconds = self.wire * costs.byte_in + self.nbytes * costs.add
        yield from me.work(self.crew * seconds)
        self.counted[node, part] += 1
        if self.counted[node, part] < len(self.workers):
            return
        assert step == self.number
        if self.of.sweepers:
            yield from me.work(self.step.workers * costs.command)
            yield from server.work(self.step.workers * costs.server_command)
        sorts = self.of.share + self.step.slots + (self.of.share < 1)
        stored = self.nbytes * sorts
        yield from me.work(
            costs.call + costs.reducer / self.each + self.nbytes * costs.update + stored * costs.byte_out
        )
        if me.host is not server.host:
            yield from me.host.send(server.host, stored)
        deliveries = self.step.workers if self.listens else 0
        yield from server.work(costs.server_call + stored * costs.server_in + deliveries * costs.delivery)
        self.updated[node, part].succeed()
        if deliveries:
            # To workers, which fetch the part.
            yield server.host.sends.use(0)

    # The chief

    def _count(self) -> Events:
        """The leader has counted a gradient, and tells the chief."""
        yield from self._hear(self.chief, 2 * self.crew)
        self.committed += 1
        if self.committed == len(self.workers):
            self.all_committed.succeed()

    def _lead(self, steps: int) -> Events:
        """The chief's loop."""
        env, me, costs, step = self.env, self.chief, self.costs, self.step
        listeners = step.workers + step.partitions
        in_partitions = step.partitions > 1
        for _ in range(steps):
            yield self.all_committed
            yield from self._script(me, "take", gradients=step.workers)
            yield from me.work(costs.chief)
            yield from self._script(
                me, "register_version" if in_partitions else "", deliveries=listeners, nbytes=listeners * SMALL
            )
            if in_partitions:
                yield from self._look()
            while not all(part.triggered for part in self.updated.values()):
                yield env.timeout(PAUSE)
                if in_partitions or self.of.reducers:
                    yield from self._look()
            yield from self._script(
                me, "publish", gradients=step.workers, deliveries=listeners, nbytes=listeners * SMALL
            )
            self.ends.append(env.now)
            published = self.published
            self._begin()
            published.succeed()
            for reducer in self.reducers if self.of.reducers else ():
                env.process(self._refresh(reducer))
            yield from self._clean_up()

    def _refresh(self, reducer: Process) -> Events:
        yield from self._hear(reducer, 2, times=self.spread)
        yield from self._read_record(reducer, self.spread)

    def _look(self) -> Events:
        """The chief makes those parts of the version stay that were not there when it looked before."""
        commands = 2 * (1 + self.step.slots)
        missing = {node: commands * parts for node in range(len(self.servers)) if (parts := self._number_missing(node))}
        yield self.env.all_of([self.env.process(self._ask(self.servers[node], of)) for node, of in missing.items()])

    def _number_missing(self, node: int) -> int:
        looked, self.looked[node] = (
            self.looked[node],
            all(self.updated[node, part].triggered for part in range(self.each)),
        )
        return 0 if looked else self.each

    def _ask(self, server: Process, commands: float) -> Events:
        me, costs = self.chief, self.costs
        yield from me.work(self.spread * (costs.node + costs.call + commands * costs.command))
        yield from me.host.send(server.host, SMALL, times=self.spread)
        yield from server.work(costs.server_call + commands * costs.server_command)
        yield from server.host.send(me.host, SMALL, times_there=self.spread)

    def _clean_up(self) -> Events:
        """The chief removes the parts of the round."""
        step = self.step
        if step.partitions == 1:
            # They were removed with the round.
            return
        calls = step.sweeps
        for call in range(calls):
            gradients = step.workers / (calls - 1)
            yield from self._script(self.chief, "sweep", gradients=gradients)
            if call < calls - 1 and not self.of.sweepers:
                commands = self.each * gradients
                yield self.env.all_of([self.env.process(self._ask(server, commands)) for server in self.servers])
        # Of the parts of earlier versions.
        yield from self._script(self.chief, "sweep", gradients=1)
        yield from self._read_record(self.chief, 1)


def simulate(arrangement: Arrangement, network: Network, costs: Costs, steps: int = 5) -> Outcome:
    """Returns what a step takes in an arrangement."""
    return Simulation(arrangement, network, costs).run(steps)


def busiest(outcomes: Sequence[Outcome]) -> str:
    """Returns what is the busiest in the first of some outcomes where anything takes most of the time."""
    return next((outcome.full for outcome in outcomes if outcome.busy[outcome.full] > 0.5), "nothing")
