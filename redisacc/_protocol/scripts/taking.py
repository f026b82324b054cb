"""Takes rounds, acknowledges them, and recovers the rounds of takers that died."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redisacc._format.weights import weight_text
from redisacc._protocol.scripts.base import AccumulatorScripts, text_of
from redisacc._protocol.scripts.replication import confirmed
from redisacc._protocol.scripts.sessions import Session
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Command
from redisacc._redis.transport import TIMEOUT
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(slots=True)
class Granted:
    """A round that belongs to the taker.

    Attributes:
        token: the token that holds the round.
        global_step: the step that the round closed.
        num_accumulated: the gradients in the round.
        round_shape: the shape that they share, as text.
        staleness: how stale they were, as text; "" if the accumulator does not count that.
        given_weight: the sum of their weights; None if all are 1.
        replicas: how many replicas have the grant, if they were asked.
    """

    token: str
    global_step: int
    num_accumulated: int
    round_shape: str
    staleness: str = ""
    given_weight: float | None = None
    replicas: int = 0


@dataclass(slots=True)
class Queued:
    """A place in the queue of takers, behind ``ahead`` others.

    ``grace_left_ms`` is the remaining grace in milliseconds if nothing else is missing; otherwise 0.
    ``total_weight`` is the sum of the weights of the gradients.
    ``required`` is the quorum of the accumulator; None if the take came with its own.
    """

    global_step: int
    num_accumulated: int
    ahead: int
    grace_left_ms: int = 0
    total_weight: float = 0.0
    required: TakeRequirement | None = None


@dataclass(slots=True)
class GoneBack:
    """The accumulator has gone back to older data. The take is not in the queue.

    Attributes:
        sequence: the last request of the session that the server knows; 0: none.
        takes: how many rounds the accumulator has granted, as far as it knows.
        losses: how often it was noticed that it had gone back, this time included.
    """

    sequence: int
    takes: int
    losses: int


class Take(Protocol):
    """A take that may have to be tried several times."""

    def __call__(self, *, timeout: float = TIMEOUT) -> tuple[Granted | Queued | GoneBack, list[Any]]:
        """Takes the round, or a place in the queue.

        Args:
            timeout: how long to try to reach the server, in seconds.

        Returns:
            The round, the place, or why the take needs another session; and the replies to the commands that read the
            round.

        Raises:
            StaleSequenceError: this take is over.
            InvalidArgumentError: the accumulator has no quorum, or no longer. The take has left the queue.
        """


class TakeScripts(AccumulatorScripts):
    """Runs the scripts that concern a round as a whole. Raises the errors of ``RequestScripts``."""

    def take(
        self,
        *,
        token: str,
        session: Session,
        sequence: int,
        required: TakeRequirement | None,
        min_weight: float = 0.0,
        lease_ms: int,
        taker: str,
        takes: int = 0,
        losses: int = 0,
        read: Sequence[Command] = (),
    ) -> Take:
        """Returns a take, to be called until it is granted.

        Args:
            token: id of the take: the session's id and the sequence number. The same one again gets the same round.
            session: the session that sends it.
            sequence: its number.
            required: the gradients that the round has to have. None: the quorum of the accumulator, as it is at each
                attempt.
            min_weight: what their weights have to add up to at least; 0 for any sum.
            lease_ms: the taker loses its place in the queue unless it asks again within this time, in milliseconds.
            taker: name of the taker.
            takes: the most rounds that the accumulator has granted, as far as the sender knows.
            losses: how often it has gone back to older data, as far as the sender knows.
            read: commands that read the round if it is granted. They travel along.
        """
        keys, current, taken = self._keys, self._keys.current, self._keys.taken_round(token)
        given = required or TakeRequirement(0, 0)
        call = self._transport.prepare(
            *load("take").bind(
                keys={
                    "record": keys.record,
                    "sums": current.sums,
                    "buffered": current.buffered,
                    "inline": current.inline,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                    "queue": keys.queue,
                    "takers": keys.takers,
                    "taken": keys.taken,
                    "taken_sums": taken.sums,
                    "taken_buffered": taken.buffered,
                    "taken_inline": taken.inline,
                    "taken_workers": taken.workers,
                },
                args={
                    "incarnation": self.incarnation,
                    "token": token,
                    "num_required": str(given.num_required),
                    "min_weight": weight_text(min_weight) if min_weight else "0",
                    "most": str(given.most),
                    "grace_ms": str(given.grace_ms),
                    "lease_ms": str(lease_ms),
                    "taker": taker,
                    "session": session.id,
                    "sequence": str(sequence),
                    "acknowledged": str(session.acknowledged),
                    "takes": str(takes),
                    "losses": str(losses),
                },
            ),
            after=read,
        )

        def attempt(*, timeout: float = TIMEOUT) -> tuple[Granted | Queued | GoneBack, list[Any]]:
            reply, pieces = self._transport.repeat(call, timeout=timeout)
            match reply:
                case [b"waiting", step, count, ahead, grace_left, weight, least, most, grace]:
                    number = self._number(count, "num_accumulated")
                    queued = Queued(
                        self._step(step),
                        number,
                        self._number(ahead, "queue"),
                        self._number(grace_left, "grace_left_ms"),
                        # 0 is no weight, but the sum of none.
                        self._weight(weight) if number else 0.0,
                    )
                    if required is None:
                        queued.required = TakeRequirement(
                            self._number(least, "num_required", least=1),
                            self._number(most, "most", least=1),
                            self._number(grace, "grace_ms"),
                        )
                    return queued, pieces
                case [b"gone_back", known, granted, noticed]:
                    return (
                        GoneBack(
                            self._number(known, "sessions"),
                            self._number(granted, "takes"),
                            self._number(noticed, "losses"),
                        ),
                        pieces,
                    )
                case [b"unset"]:
                    raise InvalidArgumentError(
                        f"num_required is missing, and {shown(self._keys.name)} has no quorum, or no longer: give it, "
                        "or set the quorum by set_quorum() or `redisacc set`"
                    )
            return self._granted(token, reply), pieces

        return attempt

    def leave(self, *, token: str, timeout: float = TIMEOUT, replicated: bool = False) -> Granted | None:
        """Leaves the queue.

        Args:
            token: id of the take.
            timeout: how long to try to reach the server, in seconds.
            replicated: whether replicas have to confirm.

        Returns:
            The round if it was granted in the meantime, else None.
        """
        keys = self._keys
        reply, replicas = self._transport.run_and_read(
            *load("leave").bind(
                keys={"record": keys.record, "queue": keys.queue, "takers": keys.takers, "taken": keys.taken},
                args={"token": token, "confirm": int(replicated)},
            ),
            after=self._replicate if replicated else (),
            timeout=timeout,
        )
        return None if reply == [b"left"] else self._granted(token, reply, replicas)

    def acknowledge(
        self, *, token: str, parts: Sequence[str], attempts: Sequence[str] = (), metrics: str = "", more: bool
    ) -> bool:
        """Removes a round, or some of its parts.

        Args:
            token: token of the round.
            parts: keys of parts to remove.
            attempts: gradients in partitions, as "ATTEMPT parts": the leader lists them until their parts are removed.
            metrics: the means of its metrics, as ``metrics_text`` makes them; "": there are none.
            more: whether calls with further parts follow.

        Returns:
            False if there is no such round.
        """
        taken = self._keys.taken_round(token)
        reply = self._transport.run(
            *load("acknowledge").bind(
                keys={
                    "record": self._keys.record,
                    "taken": self._keys.taken,
                    "taken_sums": taken.sums,
                    "taken_buffered": taken.buffered,
                    "taken_inline": taken.inline,
                    "taken_workers": taken.workers,
                    "attempts": self._keys.attempts,
                    "parts": parts,
                },
                args={"token": token, "more": "1" if more else "0", "metrics": metrics, "attempts": attempts},
            )
        )
        match reply:
            case [b"acknowledged"]:
                return True
            case [b"unknown"]:
                return False
        self._refuse(reply)

    def recover(self, *, old: str, token: str, taker: str) -> Granted | None:
        """Moves a granted round to a new token.

        Args:
            old: the token that holds the round now.
            token: the new token.
            taker: name of the new taker.

        Returns:
            The round; None if there is no such round.
        """
        keys, before, after = self._keys, self._keys.taken_round(old), self._keys.taken_round(token)
        reply, replicas = self._transport.run_and_read(
            *load("recover").bind(
                keys={
                    "record": keys.record,
                    "taken": keys.taken,
                    "recovered": keys.recovered,
                    "old_sums": before.sums,
                    "old_buffered": before.buffered,
                    "old_inline": before.inline,
                    "old_workers": before.workers,
                    "new_sums": after.sums,
                    "new_buffered": after.buffered,
                    "new_inline": after.inline,
                    "new_workers": after.workers,
                },
                args={"incarnation": self.incarnation, "old": old, "token": token, "taker": taker},
            ),
            after=self._replicate,
        )
        return None if reply == [b"unknown"] else self._granted(token, reply, replicas)

    def _granted(self, token: str, reply: list[bytes], replicas: Sequence[Any] = ()) -> Granted:
        match reply:
            case [b"granted", step, count, shape, staleness, weight]:
                return Granted(
                    token,
                    self._step(step),
                    self._number(count, "num_accumulated"),
                    text_of(shape),
                    text_of(staleness) if staleness else "",
                    self._weight(weight) if weight else None,
                    confirmed(self._keys.record, replicas) if replicas else 0,
                )
        self._refuse(reply)
