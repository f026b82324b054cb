"""The transport: sends commands, and sends them again if a connection breaks.

Everything that redisacc sends may be sent twice: reads, plain SETs of bytes that do not change, and scripts that
recognize a request that they have seen. So a broken connection becomes an error only when the server has been silent
for as long as a call may take.

The retry has a time limit instead of a number of tries, and is the same for every client. Beneath it is either one
server (``node.py``) or a cluster (``cluster.py``), which both offer single attempts.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from redis.backoff import ExponentialBackoff

from redisacc._clock import durations, running_time
from redisacc._text import shown
from redisacc._wire.cluster import Cluster, UnreachableNodeError
from redisacc._wire.faults import (
    FAULTS,
    PASSING,
    NotPermittedError,
    RejectedError,
    ReplyError,
    SilentError,
    reason_of,
    refusal_of,
    rejection_of,
    remedy_for,
)
from redisacc._wire.node import Node, Send
from redisacc._wire.replies import check_form
from redisacc._wire.script_loader import Script
from redisacc._wire.slot_map import SlotMap, key_slot
from redisacc._wire.sockets import VALUES, A, Argument, Arrivals, Command, Connection, PackedCommands
from redisacc._wire.waits import BLOCKING, Waits, in_parallel
from redisacc.errors import CorruptDataError, ServerUnavailableError

logger = logging.getLogger("redisacc")

Answer = TypeVar("Answer")

# A call that tries for longer than this logs its first retry.
PATIENT = 10.0

_BACKOFF = ExponentialBackoff(cap=1.0, base=0.01)


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds for how long a thread's calls wait for a server that does not answer, whatever their timeouts are.

    Attributes:
        call: how long a single call tries to reach the server, in seconds.
        outage: how long a wait continues while the server cannot be reached, in seconds.
    """

    call: float = math.inf
    outage: float = math.inf


_UNLIMITED = Limits()
# They are in effect in whatever the code that sets them calls, however deep that is.
LIMITS: ContextVar[Limits] = ContextVar("redisacc limits", default=_UNLIMITED)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limits how long each call in the block tries to reach the server, if that is not limited more already."""
    limits = LIMITS.get()
    token = LIMITS.set(Limits(min(seconds, limits.call), limits.outage))
    try:
        yield
    finally:
        LIMITS.reset(token)


_BYTES = frozenset((bytes,))
# A fake server, and a client that decodes, return strings.
_ITEMS = frozenset((bytes, str, int))


class Hint(tuple[Argument, ...]):
    """A command that only saves time, so it may fail. If it publishes a message, that goes to a channel of its slot.

    Attributes:
        script: the script that it runs, if any.
    """

    script: Script | None = None

    @classmethod
    def running(cls, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Hint:
        """Returns the call of a script."""
        hint = cls(("EVALSHA", script.sha, str(len(keys)), *keys, *args))
        hint.script = script
        return hint

    def sharded(self) -> Hint:
        """Returns the same for a cluster with sharded channels."""
        if self.script is None:
            return Hint(("SPUBLISH" if self[0] == "PUBLISH" else self[0], *self[1:]))
        hint = Hint((self[0], self.script.sharded.sha, *self[2:]))
        hint.script = self.script.sharded
        return hint


class Transport:
    """The way to a server, or to a cluster, through one client. Threads and, after a fork, processes may share it.

    Commands that are sent together travel over one connection, as long as their keys are in one slot.

    Attributes:
        where: the client of redis-py or valkey-py, or the URL, that leads here.
        address: where that is, without a password.
        cluster: the cluster; None if it is a single server.
        is_local: whether it is a single server on this machine.
        waits: how its calls wait.
        losses: counts the exchanges that broke off, as ``lost`` says.
        blocking: another transport to the same place, whose calls block, for threads and for objects that end; itself
            if its own calls block.
    """

    def __init__(
        self,
        where: Any,
        server: Node | Cluster,
        *,
        waits: Waits = BLOCKING,
        blocking: Transport | None = None,
    ) -> None:
        """Initializes the transport.

        Args:
            where: the client or the URL.
            server: the way there.
            waits: how its calls wait.
            blocking: another transport to the same place, if the calls of this one do not block.
        """
        self.waits = waits
        self._blocking = blocking
        self.where = where
        self._server = server
        self.cluster = server if isinstance(server, Cluster) else None
        self.losses = server.losses
        self.address = server.address
        self.is_local = isinstance(server, Node) and server.is_local

    def __repr__(self) -> str:
        return f"Transport({self.address})"

    @property
    def blocking(self) -> Transport:
        return self._blocking or self

    def close(self) -> None:
        """Closes its connections. No call may be under way, and none may follow."""
        self._server.close()

    @property
    def lost(self) -> int:
        """The number of exchanges that broke off, in any thread.

        The server may have executed what was sent, or may yet. If the number is the same before and after a request, no
        stray copy of that request can still arrive.
        """
        return self.losses.count

    def call(self, *command: Argument, beside: str | None = None) -> Any:
        """Returns the reply to one command. Bytes are never decoded.

        Args:
            *command: the command.
            beside: a key. In a cluster, a command without a key goes to the owner of this one; None means to any node.
        """
        return _checked([command], self._exchange([command], beside), self.address)[0]

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Returns the replies to several commands that travel together. The first that is an error is raised.

        Hints among them may fail.
        """
        if self.cluster is not None:
            commands = self._sharded(commands)
        return _checked(commands, self._tolerated(commands, self._exchange(commands)), self.address)

    def scatter(self, batches: Sequence[Sequence[Command]], *, after: Sequence[Command] = ()) -> list[list[Any]]:
        """Returns the replies to several batches of commands, which go to all nodes at the same time.

        All commands for a node travel together, in order, over one connection. If slots move meanwhile, only the
        commands of a batch stay together. The first reply that is an error is raised when all batches have ended.

        Args:
            batches: the keys of each are in one slot. Commands without a key go along with the others.
            after: commands without keys, which each node gets once, after its batches; or, if slots move meanwhile,
                after each of them.

        Returns:
            The replies to each batch, each followed by its node's replies to ``after``.
        """
        if self.cluster is None:
            replies = iter(self.pipeline([*chain.from_iterable(batches), *after]))
            found = [list(islice(replies, len(batch))) for batch in batches]
            at_the_end = list(replies)
            return [[*of_batch, *at_the_end] for of_batch in found]
        batches = [self._sharded(batch) for batch in batches]
        by_node = self._persist(partial(self.cluster.group_by_node, batches))
        attempt, limits = self.cluster.exchange_together, LIMITS.get()

        def exchange(numbers: Sequence[int]) -> list[list[Any]]:
            LIMITS.set(limits)
            of_node = [batches[number] for number in numbers]
            replies = self._persist(partial(attempt, of_node, after))
            return [
                _checked([*batch, *after], self._tolerated(batch, of), self.address)
                for batch, of in zip(of_node, replies, strict=True)
            ]

        found_at: dict[int, list[Any]] = {}
        each = in_parallel([partial(exchange, numbers) for numbers in by_node], self.waits)
        for numbers, replies_of in zip(by_node, each, strict=True):
            found_at.update(zip(numbers, replies_of, strict=True))
        return [found_at[number] for number in range(len(batches))]

    def ask(self, node: str, *command: Argument) -> Any:
        """Returns the reply of one node of a cluster, given its address, to a command without keys."""
        assert self.cluster is not None, "a single server has no nodes"
        replies = self._persist(partial(self.cluster.exchange_at, node, [command]))
        return _checked([command], replies, node)[0]

    def on_masters(
        self, commands: Sequence[Command], *, reachable: bool = False
    ) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """Sends commands without keys to every master of a cluster, or to the single server.

        Args:
            commands: the commands.
            reachable: whether masters that do not answer within 3 seconds are left out. Otherwise, the call raises, as
                it does if a single server does not answer.

        Returns:
            Address → the replies; and address → the reason, for masters that were left out.
        """
        if self.cluster is None:
            return {self.address: self.pipeline(commands)}, {}
        attempt = partial(self.cluster.exchange_with_masters, commands, reachable=reachable)
        replies, silent = self._persist(attempt)
        return {address: _checked(commands, found, address) for address, found in replies.items()}, silent

    def run_and_read(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
    ) -> tuple[list[bytes], list[Any]]:
        """Runs a script, with commands before and after it in the same round trip.

        Returns:
            The script's reply, and the replies to the commands ``after`` it.
        """
        if self.cluster is not None and self.has_sharded_channels():
            script = script.sharded
            before = self._sharded(before)
        commands = [*before, ("EVALSHA", script.sha, str(len(keys)), *keys, *args), *after]
        return self._run(script, commands, len(before))

    def prepare(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, after: Sequence[Command] = ()
    ) -> PackedCommands:
        """Returns what ``run_and_read`` would send, for ``repeat`` to send."""
        if self.cluster is not None and self.has_sharded_channels():
            script = script.sharded
        packed = PackedCommands((("EVALSHA", script.sha, str(len(keys)), *keys, *args), *after))
        packed.script = script
        return packed

    def repeat(self, packed: PackedCommands, *, timeout: float) -> tuple[list[bytes], list[Any]]:
        """Sends prepared commands as ``run_and_read`` does, and tries for ``timeout`` seconds to reach the server.

        ``timeout`` is a parameter because ``limited`` would cost each poll more than all else here.
        """
        return self._run(packed.script, packed, 0, timeout)

    def _run(
        self, script: Script, commands: Sequence[Command], here: int, timeout: float = math.inf
    ) -> tuple[list[bytes], list[Any]]:
        """Exchanges commands. The one at ``here`` runs a script."""
        # As in _persist(), whose call would cost a small command more time than a retry ever saves.
        deadline = running_time() + min(timeout, LIMITS.get().call, durations.call)
        try:
            replies = self._server.exchange(commands, deadline)
        except FAULTS as error:
            replies = self._again(partial(self._server.exchange, commands), deadline, error)
        if not VALUES.issuperset(map(type, replies)):
            replies = self._load_and_run(script, commands, here, replies)
        reply = replies[here]
        if not isinstance(reply, list) or not reply:
            raise CorruptDataError(f"script {script.name} replied {shown(reply)}")
        if not _BYTES.issuperset(map(type, reply)):
            if not _ITEMS.issuperset(map(type, reply)):
                raise CorruptDataError(f"script {script.name} replied with something other than strings and numbers")
            reply = [item if isinstance(item, bytes) else str(item).encode() for item in reply]
        return reply, replies[here + 1 :]

    def _load_and_run(self, script: Script, commands: Sequence[Command], here: int, replies: list[Any]) -> list[Any]:
        """Returns the replies to commands after some were refused. A missing script is sent whole.

        Raises:
            RedisAccError: a refusal of something other than a hint or a missing script.
        """
        replies = self._tolerated(commands[:here], replies)
        if isinstance(replies[here], ReplyError) and replies[here].code == "NOSCRIPT":
            # The server is new, was restarted, or its script cache was flushed. The commands that follow are sent
            # again: WAIT has to travel behind the script, over its connection. Without replicas, that takes twice as
            # long, this one time.
            whole = ("EVAL", script.text, *commands[here][2:])
            replies[here:] = self._exchange([whole, *commands[here + 1 :]])
            if (
                isinstance(replies[here], ReplyError)
                and replies[here].code == "NOPERM"
                and "'eval'" in str(replies[here])
            ):
                raise NotPermittedError(
                    f"the server at {self.address} does not have the script {shown(script.name)}, and this user may "
                    f"not load it: run `redisacc acl --load` as a user who may ({reason_of(replies[here])})"
                ) from replies[here]
        _raise_first(replies)
        return replies

    def _sharded(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Returns the same commands with their hints as a cluster with sharded channels needs them, if this is one."""
        if not any(isinstance(command, Hint) for command in commands) or not self.has_sharded_channels():
            return commands
        return [command.sharded() if isinstance(command, Hint) else command for command in commands]

    def _tolerated(self, commands: Sequence[Command], replies: list[Any]) -> list[Any]:
        """Returns the replies with None in place of the errors of hints, which are among the first commands."""
        if not VALUES.issuperset(map(type, replies)):
            for number, command in enumerate(commands):
                if isinstance(command, Hint) and isinstance(replies[number], ReplyError):
                    self._note_refused(command, replies[number])
                    replies[number] = None
        return replies

    def _note_refused(self, hint: Hint, error: ReplyError) -> None:
        logger.debug("%s refused %s: %s", self.address, hint[0], reason_of(error))
        if hint.script is not None and error.code == "NOSCRIPT":
            # For the next time. A user who may not load it does without.
            self._exchange([("SCRIPT", "LOAD", hint.script.text)], str(hint[3]))

    def fetch(self, arrivals: Arrivals[A]) -> None:
        """GETs strings straight into the memory where they are used.

        If they have several lanes, and the server is on another machine, they arrive over several connections. Strings
        of several nodes arrive from all of them at once.

        Args:
            arrivals: says which, and where to. If it raises, the error passes through and the connection is closed.
        """
        self._persist(partial(self._server.fetch, arrivals))

    def converse(self, key: str, talk: Callable[[Send], Answer]) -> Answer:
        """Returns what ``talk`` makes of the replies to commands that it sends one by one, over a single connection.

        A connection leads to one server process, so all replies are that process's own. If it breaks, or the key moves
        to another node, ``talk`` is called again from its beginning, so it must only read.

        Args:
            key: the key of all commands.
            talk: gets the function that sends a command and returns the reply.
        """
        return self._persist(partial(self._server.converse, key, talk, min(LIMITS.get().call, durations.call)))

    def converse_with_all(self, talk: Callable[[Send], Answer]) -> list[Answer]:
        """Does the same with every master of a cluster, for commands without keys; or with the single server."""
        return self._persist(partial(self._server.converse_with_all, talk, min(LIMITS.get().call, durations.call)))

    def has_sharded_channels(self) -> bool:
        """Returns whether channels belong to slots, and messages to the nodes that own these (SPUBLISH, SSUBSCRIBE).

        So it is in clusters from version 7. In others, every node gets every message, and blocks for none of them.
        """
        if self.cluster is None:
            return False
        known = self.cluster.has_sharded_channels
        return self._persist(self.cluster.find_version) if known is None else known

    def slot_map(self) -> SlotMap:
        """Returns the owners of a cluster's slots at this moment."""
        assert self.cluster is not None, "a single server has no slots"
        return self._persist(self.cluster.slot_map)

    def owner_of(self, key: str) -> str:
        """Returns the address of the node of a cluster that owns a key, as far as it is known here."""
        assert self.cluster is not None, "a single server owns every key"
        return self._persist(partial(self.cluster.owner_of, key))

    def place_of(self, channel: str) -> int | None:
        """Returns what channels must have in common if one connection is to listen to them: the slot in a cluster."""
        return None if self.cluster is None else key_slot(channel)

    def subscriber(self, place: int | None, tick: float) -> contextlib.AbstractContextManager[Connection]:
        """Yields a connection on which the messages of some channels arrive, and disconnects it.

        Args:
            place: what ``place_of`` says of the channels; None means every node passes their messages on.
            tick: how long the connection listens before it returns without a message, in seconds.
        """
        return self._server.subscriber(place, tick)

    def _exchange(self, commands: Sequence[Command], beside: str | None = None) -> list[Any]:
        """Sends commands until they are answered or the time is up. Replies may be errors."""
        if beside is not None and self.cluster is not None:
            return self._persist(partial(self.cluster.exchange_beside, beside, commands))
        return self._persist(partial(self._server.exchange, commands))

    def _persist(self, attempt: Callable[[float], Answer]) -> Answer:
        """Repeats an attempt, which gets its deadline, until it succeeds or the time is up."""
        deadline = running_time() + min(LIMITS.get().call, durations.call)
        try:
            return attempt(deadline)
        except FAULTS as error:
            return self._again(attempt, deadline, error)

    def _again(self, attempt: Callable[[float], Answer], deadline: float, error: Exception) -> Answer:
        """Does the same after a first attempt, which has failed with an error."""
        failures, reason = 0, ""
        try:
            while True:
                failures += 1
                if not reason or not isinstance(error, SilentError):
                    reason = self._unavailable(error)
                self._pause_or_raise(error, reason, failures, deadline)
                try:
                    return attempt(deadline)
                except FAULTS as again:
                    error = again
        finally:
            # It would keep this frame, and a gradient with it.
            del error

    def _pause_or_raise(self, error: Exception, reason: str, failures: int, deadline: float) -> None:
        """Raises the error for a failed attempt, or pauses before the next one.

        Args:
            error: how the attempt failed.
            reason: the reason to report when the time is up. If the last attempt merely timed out, the one before it
                tells more: the server may have answered it, for example that it is loading.
            failures: how many attempts have failed.
            deadline: when the time is up, on ``running_time()``'s clock.
        """
        if isinstance(error, RejectedError):
            raise rejection_of(error, self.address) from error
        if isinstance(error, ReplyError) and error.code not in PASSING:
            raise refusal_of(error) from error
        # Beyond 1,023 of them, it would raise OverflowError.
        pause = _BACKOFF.compute(min(failures, 9))
        if failures == 2 and deadline - running_time() > PATIENT:
            # The first attempt may have met a connection that had been idle for too long. Polls are brief, and their
            # callers log outages themselves.
            logger.warning("%s: %s; trying again for %.0f s", self.address, reason_of(error), deadline - running_time())
        if running_time() + pause >= deadline:
            # The reason is in the message. The client library chains two or three errors more, which say the same.
            raise ServerUnavailableError(reason) from None
        logger.debug("%s: %s; trying again in %.2f s", self.address, reason_of(error), pause)
        self.waits.sleep(pause)

    def _unavailable(self, error: BaseException) -> str:
        if isinstance(error, UnreachableNodeError):
            return reason_of(error)
        if isinstance(error, ReplyError) and error.code in PASSING:
            return f"the server at {self.address} {PASSING[error.code]} ({reason_of(error)})"
        reason = reason_of(error)
        remedy = remedy_for(error, reason, tls=self._server.tls, cluster=self.cluster is not None)
        return f"no Redis server answers at {self.address} ({reason})" + (f". {remedy}" if remedy else "")


def _checked(commands: Sequence[Command], replies: list[Any], address: str) -> list[Any]:
    """Returns the replies to commands if each of them has the form that its command promises.

    Raises:
        RedisAccError: the first error among them.
        CorruptDataError: a reply has another form.
    """
    _raise_first(replies)
    for command, reply in zip(commands, replies, strict=True):
        if not isinstance(command, Hint):
            check_form(command, reply, address)
    return replies


def _raise_first(replies: Sequence[Any]) -> None:
    """Raises the first of the replies that is an error."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise refusal_of(reply) from reply
