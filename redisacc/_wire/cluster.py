"""A Redis Cluster: which node a batch of commands goes to, and what happens when slots move or nodes fail.

All keys of an accumulator are in one slot, so a batch goes to one node, over one connection. A method
here is one attempt: the transport repeats it until its deadline. Redirections are followed within the attempt.

- MOVED: the slot has another owner. The map is read again, and the batch continues at the owner, from the refused
  command on. A later command that was executed is sent again, in its turn.
- ASK: the slot is moving key by key, and this key has left already, or never existed. The command is sent to the node
  that gets the slot, after an ASKING, which lasts for one command. The batch continues at the owner.
- TRYAGAIN, CLUSTERDOWN, or a node that fails: the attempt fails. The next one begins by reading the map again, from
  another node if possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NoReturn, TypeVar

from redisacc._clock import running_time
from redisacc._wire.clients import Endpoint, GivenPool, endpoint_of
from redisacc._wire.faults import (
    FAULTS,
    REDIRECTIONS,
    BrokenError,
    RejectedError,
    ReplyError,
    SilentError,
    SlotMovedError,
    reason_of,
)
from redisacc._wire.node import Losses, Node, Send, fetch_from_nodes
from redisacc._wire.replies import parse_info
from redisacc._wire.slot_map import Address, SlotMap, key_slot, redirection, slot_of, slots_of
from redisacc._wire.sockets import VALUES, A, Arrivals, Command, Connection, fetch_together
from redisacc._wire.waits import BLOCKING, Waits
from redisacc.errors import ServerError

Answer = TypeVar("Answer")

# How long a node may be silent before the map is read again and the batch is sent again, in seconds. It is more than
# any of our commands takes. Without it, a call would wait for a dead node until its own deadline, and never notice that
# a replica was promoted meanwhile.
SILENCE = 10.0
# How long a node may take to return the map, in seconds.
_MAP_TIMEOUT = 3.0
# How often a command is redirected before the attempt fails. A map that is up to date needs one redirection at most.
_MOST_REDIRECTIONS = 5

# How many seeds an address lists.
_LISTED = 3
_ASKING = ("ASKING",)


class UnreachableNodeError(BrokenError):
    """A node cannot be reached at the address that the cluster announces for it. The text says so, and the remedy."""


class Cluster:
    """The way to all nodes of a cluster. Threads and, after a fork, processes may share it.

    Args:
        seeds: where to ask for the map at first, and whenever no other node answers.
        way_to: returns where connections to a node lead, given its address.
        remap: turns an address that a node announces into the one at which it is reached from here.
        waits: how calls wait.

    Attributes:
        address: the seeds, as text.
        losses: the exchanges that broke off, with any node.
        has_sharded_channels: whether channels belong to slots, from version 7; None as long as it is unknown.
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        way_to: Callable[[Address], Endpoint | GivenPool],
        remap: Callable[[Address], Address] = lambda address: address,
        *,
        waits: Waits = BLOCKING,
    ) -> None:
        self._seeds = tuple(seeds)
        self._way_to = way_to
        self._remap = remap
        self._waits = waits
        self.address = ",".join(map(str, seeds[:_LISTED])) + (",…" if len(seeds) > _LISTED else "")
        self.losses = Losses()
        self.has_sharded_channels: bool | None = None
        # Threads replace these as a whole; two that read the map at the same time do no harm.
        self._map: SlotMap | None = None
        self._stale = False
        # Which node to ask for it first, if one is known to be right.
        self._informed: Address | None = None
        self._nodes: dict[Address, Node] = {}
        # When a node last failed. Others are asked for the map first.
        self._failed_at: dict[Address, float] = {}

    @property
    def tls(self) -> bool:
        """Whether connections to its nodes speak TLS."""
        return self._node(self._seeds[0]).tls

    def close(self) -> None:
        """Closes the connections to all nodes. No call may be under way, and none may follow."""
        for node in self._nodes.values():
            node.close()

    # Single attempts

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Sends commands to the node that owns their slot and returns the replies, which may be errors.

        Commands in different slots have no order. Commands without a key go with the others, or to any node.

        Args:
            commands: the commands.
            deadline: when the cluster has to have replied, on ``running_time()``'s clock.

        Raises:
            ReplyError: a reply is a refusal that passes by itself, or no node owns the slot.
            BrokenError: a connection broke, or could not be made.
            RejectedError: a node refuses the connection.
            ServerError: the server is not a node of a cluster.
        """
        if len(commands) == 1:
            return self._exchange_in(slot_of(commands[0]), commands, deadline)
        slots = slots_of(commands)
        if len(slots) > 1:
            return self._exchange_in_several(commands, deadline)
        return self._exchange_in(slots.pop() if slots else None, commands, deadline)

    def exchange_beside(self, key: str, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Does the same for commands without keys, at the node that owns the slot of a key."""
        return self._exchange_in(key_slot(key), commands, deadline)

    def exchange_at(self, address: str, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Does the same for commands without keys, at the node of an address."""
        return self._exchange_with(self._node(_parsed(address)), commands, _soon(deadline))

    def exchange_with_masters(
        self, commands: Sequence[Command], deadline: float, *, reachable: bool = False
    ) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """Sends commands without keys to every master.

        Args:
            commands: the commands.
            deadline: when the cluster has to have replied, on ``running_time()``'s clock.
            reachable: whether masters that fail within 3 seconds are left out. Otherwise, the first failure is raised.

        Returns:
            Address → the replies; and address → the reason, for masters that were left out.
        """
        found, silent = {}, {}
        for node in self._masters(deadline):
            until = min(deadline, running_time() + _MAP_TIMEOUT) if reachable else _soon(deadline)
            try:
                found[node.address] = self._exchange_with(node, commands, until)
            except FAULTS as error:
                if not reachable:
                    raise
                silent[node.address] = reason_of(error)
        return found, silent

    def group_by_node(self, batches: Sequence[Sequence[Command]], deadline: float) -> list[list[int]]:
        """Returns the numbers of the batches whose slots have the same owner, for each owner."""
        groups: dict[str, list[int]] = {}
        for number, batch in enumerate(batches):
            slots = slots_of(batch)
            node = self._owner(min(slots) if slots else None, deadline)
            groups.setdefault(node.address, []).append(number)
        return list(groups.values())

    def exchange_together(
        self, batches: Sequence[Sequence[Command]], after: Sequence[Command], deadline: float
    ) -> list[list[Any]]:
        """Sends batches whose slots have the same owner, over one connection, and then commands without keys.

        So ``WAIT`` at the end covers the writes of all batches. If slots have moved, that connection may
        not have written everything: then each batch is sent again by itself, with its own copy of these commands.

        Args:
            batches: the keys of each are in one slot. ``group_by_node`` has just grouped them.
            after: the commands without keys.
            deadline: when the cluster has to have replied, on ``running_time()``'s clock.

        Returns:
            The replies to each batch, each followed by the replies to ``after``. They may be errors.
        """
        slots = [min(slots_of(batch), default=None) for batch in batches]
        owners = {node.address: node for node in [self._owner(slot, deadline) for slot in slots]}
        if len(owners) == 1:
            (node,) = owners.values()
            together = [command for batch in batches for command in batch]
            replies = self._exchange_with(node, [*together, *after], _soon(deadline))
            if _first_redirected(replies) is None:
                each = iter(replies[: len(together)])
                return [[*islice(each, len(batch)), *replies[len(together) :]] for batch in batches]
        return [self._exchange_in(slot, [*batch, *after], deadline) for slot, batch in zip(slots, batches, strict=True)]

    def fetch(self, arrivals: Arrivals[A], deadline: float) -> None:
        """GETs strings straight into the memory where they are used.

        They are in one slot, or each of their lanes is.
        """
        wanted = arrivals.wanted()
        if not wanted:
            return
        try:
            if arrivals.homes:
                self._fetch_from_several([key_slot(home) for home in arrivals.homes], arrivals, deadline)
                return
            node = self._owner(key_slot(wanted[0].key), deadline)
            with self._failures_noted(node):
                node.fetch(arrivals, _soon(deadline))
        except ReplyError as error:
            if error.code not in REDIRECTIONS:
                raise
            # Slots move rarely. Meanwhile, the strings are fetched a few at a time.
            fetch_together(self, arrivals, deadline)

    def _fetch_from_several(self, slots: Sequence[int], arrivals: Arrivals[A], deadline: float) -> None:
        """GETs strings in several slots, one slot for each lane."""
        nodes: dict[str, Node] = {}
        owners = []
        for slot in slots:
            node = self._owner(slot, deadline)
            nodes.setdefault(node.address, node)
            owners.append(node.address)
        if not all(node.gathers for node in nodes.values()):
            fetch_together(self, arrivals, deadline)
            return
        addresses = list(nodes)
        routes = [addresses.index(address) for address in owners]
        try:
            fetch_from_nodes(list(nodes.values()), routes, arrivals, _soon(deadline))
        except FAULTS:
            # It is not known which one failed. The next attempt begins by reading the map.
            self._stale = True
            raise

    def converse(self, key: str, talk: Callable[[Send], Answer], timeout: float, deadline: float) -> Answer:
        """Returns what ``talk`` makes of the replies to commands about one key, over one connection to its owner."""
        slot = key_slot(key)
        node, asking = self._owner(slot, deadline), False
        for _ in range(_MOST_REDIRECTIONS):
            try:
                with self._failures_noted(node):
                    return node.converse(key, talk, timeout, _soon(deadline), asking=asking)
            except ReplyError as error:
                if error.code not in REDIRECTIONS:
                    raise
                refusal = error
            target = self._redirected(refusal, node, deadline)
            asking = refusal.code == "ASK"
            node = target if asking else self._owner(slot, deadline)
        raise _unsettled(refusal)

    def converse_with_all(self, talk: Callable[[Send], Answer], timeout: float, deadline: float) -> list[Answer]:
        """Returns what ``talk`` makes of the replies of each master to commands without keys."""
        found = []
        for node in self._masters(deadline):
            with self._failures_noted(node):
                found.append(node.converse("", talk, timeout, _soon(deadline)))
        return found

    @contextlib.contextmanager
    def subscriber(self, place: int | None, tick: float) -> Iterator[Connection]:
        """Yields a connection to the node that owns a slot, and disconnects it.

        None means the master that has been well for the longest time.
        """
        node = self._owner(place, running_time() + _MAP_TIMEOUT)
        try:
            with node.subscriber(place, tick) as connection:
                yield connection
        except (SlotMovedError, ReplyError):
            # A node that has given a slot away knows the new owner before other nodes do.
            self._informed = _parsed(node.address)
            self._stale = True
            raise
        except FAULTS:
            # Nothing else may notice.
            self._note_failure(node)
            raise

    def find_version(self, deadline: float) -> bool:
        """Learns whether channels belong to slots, and returns that."""
        reply = self._exchange_in(None, [("INFO", "server")], deadline)[0]
        major = parse_info(None if isinstance(reply, ReplyError) else reply).get("redis_version", "").partition(".")[0]
        # A user who may not run INFO has access rules, and servers with access rules are mostly version 7 or later.
        self.has_sharded_channels = not major.isdigit() or int(major) >= 7
        return self.has_sharded_channels

    def slot_map(self, deadline: float) -> SlotMap:
        """Returns the map as some node knows it now."""
        self._read_map(deadline)
        assert self._map is not None
        return self._map

    def owner_of(self, key: str, deadline: float) -> str:
        """Returns the address of the node that owns a key, by the map that is in use."""
        return self._owner(key_slot(key), deadline).address

    # Redirections

    def _exchange_in_several(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        replies: list[Any] = [None] * len(commands)
        groups: dict[int | None, list[int]] = {}
        for number, command in enumerate(commands):
            groups.setdefault(slot_of(command), []).append(number)
        for slot, numbers in groups.items():
            found = self._exchange_in(slot, [commands[number] for number in numbers], deadline)
            for number, reply in zip(numbers, found, strict=True):
                replies[number] = reply
        return replies

    def _exchange_in(self, slot: int | None, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Exchanges commands with the owner of a slot, or with any node."""
        node = self._owner(slot, deadline)
        replies = self._exchange_with(node, commands, _soon(deadline))
        # The most frequent case costs one comparison.
        if VALUES.issuperset(map(type, replies)):
            return replies
        done: list[Any] = []
        redirections = 0
        while (at := _first_redirected(replies)) is not None:
            # Commands after a refused one are sent again, even if they were executed: order matters.
            done += replies[:at]
            commands = commands[at:]
            refusal: ReplyError = replies[at]
            target = self._redirected(refusal, node, deadline)
            if refusal.code == "ASK":
                asked = list(takewhile(_same_redirection(refusal), replies[at:]))
                answers = self._ask(target, commands[: len(asked)], deadline)
                settled = _first_redirected(answers)
                done += answers[:settled]
                commands = commands[len(answers[:settled]) :]
                if settled is None:
                    redirections = 0
                if not commands:
                    return done
            redirections += 1
            if redirections > _MOST_REDIRECTIONS:
                raise _unsettled(refusal)
            node = self._owner(slot, deadline)
            replies = self._exchange_with(node, commands, _soon(deadline))
        return done + replies

    def _ask(self, node: Node, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Exchanges commands with a node that is about to get their slot. Each needs its own ASKING."""
        pairs = [one for command in commands for one in (_ASKING, command)]
        return self._exchange_with(node, pairs, _soon(deadline))[1::2]

    def _redirected(self, refusal: ReplyError, node: Node, deadline: float) -> Node:
        """Returns the node that a refusal names. If the slot has a new owner, the map is read again, from that one."""
        asked = _parsed(node.address)
        target = self._remap(redirection(refusal, asked))
        if refusal.code == "MOVED":
            self._read_map(deadline, target)
        return self._node(target)

    # Nodes and the map

    def _owner(self, slot: int | None, deadline: float) -> Node:
        """Returns the node that owns a slot, or any master."""
        slot_map = self._map
        if slot_map is None or self._stale:
            informed, self._informed = self._informed, None
            self._read_map(deadline, informed)
            slot_map = self._map
            assert slot_map is not None
        if slot is None:
            return self._node(min(slot_map.masters, key=self._failure))
        owner = slot_map.owner(slot)
        if owner is None:
            self._stale = True
            raise ReplyError(f"CLUSTERDOWN no node of the cluster owns slot {slot}")
        return self._node(owner)

    def _masters(self, deadline: float) -> list[Node]:
        """Returns all masters. The map is read again, because nothing would report a master that has been added."""
        return [self._node(address) for address in self.slot_map(deadline).masters]

    def _read_map(self, deadline: float, first: Address | None = None) -> None:
        """Reads the map from the first node that has one.

        Args:
            deadline: until when to try.
            first: the node to ask first.

        Raises:
            BrokenError, ReplyError, RejectedError: no node has one. This is how the last of them failed.
            ServerError: the server is not a node of a cluster.
        """
        known = self._map.nodes if self._map is not None else ()
        others = sorted(dict.fromkeys([*known, *self._seeds]), key=self._failure)
        failure: Exception | None = None
        for address in dict.fromkeys([first, *others] if first else others):
            if failure is not None and running_time() >= deadline:
                break
            try:
                node = self._node(address)
                until = min(deadline, running_time() + _MAP_TIMEOUT)
                reply = self._exchange_with(node, [("CLUSTER", "SLOTS")], until)[0]
                self._use(self._map_of(reply, address))
                return
            except FAULTS as error:
                failure = error
        assert failure is not None
        raise failure

    def _map_of(self, reply: Any, asked: Address) -> SlotMap:
        """Returns the map in a reply to CLUSTER SLOTS. Raises if the node has none."""
        if isinstance(reply, ReplyError):
            if "cluster support disabled" in str(reply):
                scheme = "rediss" if self.tls else "redis"
                raise ServerError(
                    f"the server at {asked} is not a node of a Redis Cluster: give redis= a URL {scheme}://{asked}, or "
                    "a redis.Redis"
                )
            raise reply
        slot_map = SlotMap.of_reply(reply, asked, self._remap)
        if not slot_map.masters:
            # It was taken out of the cluster, or has not been taken in yet.
            raise ReplyError(f"CLUSTERDOWN the node {asked} knows no owner of any slot")
        return slot_map

    def _use(self, slot_map: SlotMap) -> None:
        """Replaces the map, and forgets the nodes that are no longer in it. Calls that use them continue."""
        kept = {*slot_map.nodes, *self._seeds}
        self._nodes = {address: node for address, node in list(self._nodes.items()) if address in kept}
        self._failed_at = {address: at for address, at in list(self._failed_at.items()) if address in kept}
        self._map, self._stale = slot_map, False

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            # If another thread has just made one, that one is used.
            made = Node(self._way_to(address), self.losses, str(address), waits=self._waits)
            node = self._nodes.setdefault(address, made)
        return node

    def _failure(self, address: Address) -> float:
        return self._failed_at.get(address, 0.0)

    def _exchange_with(self, node: Node, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Exchanges commands with a node."""
        # A context manager would cost a small command too much.
        try:
            return node.exchange(commands, deadline)
        except FAULTS as error:
            self._raise_noted(node, error)

    @contextlib.contextmanager
    def _failures_noted(self, node: Node) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            self._raise_noted(node, error)

    def _raise_noted(self, node: Node, error: Exception) -> NoReturn:
        """Raises the error of an attempt with the node's address. The next attempt begins by reading the map."""
        if isinstance(error, BrokenError):
            self._note_failure(node)
            raise self._described(node, error) from error
        if isinstance(error, RejectedError):
            raise RejectedError(
                f"{reason_of(error).rstrip('.')} (node {node.address}; every node needs the same users and passwords)"
            ) from error
        if isinstance(error, ReplyError) and error.code not in REDIRECTIONS:
            self._note_failure(node)
        raise error

    def _note_failure(self, node: Node) -> None:
        self._failed_at[_parsed(node.address)] = running_time()
        self._stale = True

    def _described(self, node: Node, error: Exception) -> BrokenError:
        if not node.reached and _parsed(node.address) not in self._seeds:
            return UnreachableNodeError(
                f"the cluster at {self.address} announces a node at {node.address}, which cannot be reached from here "
                f"({reason_of(error)}). If the node is running, it announces a wrong address: set cluster-announce-ip, "
                "or cluster-announce-hostname with cluster-preferred-endpoint-type hostname, and cluster-announce-port "
                "on it"
            )
        kind = SilentError if isinstance(error, SilentError) else BrokenError
        return kind(f"node {node.address}: {reason_of(error)}")


def cluster_of(client: Any) -> Cluster:
    """Returns the cluster that a redis-py or valkey-py client leads to.

    Its settings, such as passwords and TLS, are used for our own connections. Its map of slots is not: how that is read
    and when it is renewed differs between versions, and so does what happens to a refused command.
    """
    manager = client.nodes_manager
    # valkey-py has another name for it.
    make_node = getattr(manager, "create_redis_node", None) or manager.create_valkey_node
    and_then = client.user_on_connect_func

    def connect(pooled: Any) -> None:
        pooled.on_connect()
        if and_then is not None:
            and_then(pooled)

    def way_to(address: Address) -> Endpoint | GivenPool:
        way = endpoint_of(make_node(address.host, address.port, **manager.connection_kwargs).connection_pool)
        # The client's own function would give connections the client's parser.
        return way.having(redis_connect_func=connect) if isinstance(way, Endpoint) else way

    def remap(address: Address) -> Address:
        return Address(*manager.remap_host_port(*address))

    known = [*manager.startup_nodes.values(), *client.get_nodes()]
    seeds = dict.fromkeys(Address(node.host, int(node.port)) for node in known)
    return Cluster(tuple(seeds), way_to, remap)


def _parsed(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return Address(host.strip("[]"), int(port))


def _soon(deadline: float) -> float:
    """Returns when a node counts as silent."""
    return min(deadline, running_time() + SILENCE)


def _first_redirected(replies: Sequence[Any]) -> int | None:
    """Returns the place of the first MOVED or ASK, if any."""
    for place, reply in enumerate(replies):
        if isinstance(reply, ReplyError) and reply.code in REDIRECTIONS:
            return place
    return None


def _same_redirection(refusal: ReplyError) -> Callable[[Any], bool]:
    return lambda reply: isinstance(reply, ReplyError) and str(reply) == str(refusal)


def _unsettled(refusal: ReplyError) -> ReplyError:
    # A refusal that passes by itself: the nodes will agree at some time.
    return ReplyError(f"TRYAGAIN the nodes do not agree on who owns the slot: {refusal}")
