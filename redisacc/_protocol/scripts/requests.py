"""Requests that the server counts once, however often they arrive, and the scripts that concern these alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redisacc._data.validation import shape_text
from redisacc._data.weights import LEAST_WEIGHT, MOST_WEIGHT
from redisacc._format.weights import weight_text
from redisacc._protocol.scripts.base import AccumulatorScripts
from redisacc._protocol.scripts.replication import confirmed
from redisacc._protocol.scripts.sessions import Session
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Argument
from redisacc._redis.transport import TIMEOUT
from redisacc._text import QUOTED, printable, shown
from redisacc.errors import InvalidArgumentError

Outcome = Literal["applied", "stale", "repeated", "set", "lowered", "quorum", "taken"]
# What a request did. "fenced": it was not executed and never will be. "unknown": the server can no longer tell.
Fate = Literal[Outcome, "fenced", "unknown"]


@dataclass(slots=True, eq=False)
class Request:
    """A request that the server counts once, and what its sender knows about it.

    Attributes:
        session: the session that sends it, and sends nothing else until its outcome is known.
        sequence: its number. The same number again changes nothing.
        worker: the name of the sender.
        fate: its outcome; None while that is unknown.
        abandoned: whether an interrupt ended the call that sent it.
        retried: whether the caller has an error whose ``settle()`` sends it again, so that its session is not free.
    """

    session: Session
    sequence: int
    worker: str
    fate: Fate | None = field(default=None, init=False)
    abandoned: bool = field(default=False, init=False)
    retried: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class GradientRequest(Request):
    """A request to count a gradient under the name of a worker.

    Attributes:
        local_step: the step for which the gradient was computed.
        round_shape: the shape of a dense gradient, or of the rows of a sparse one. All gradients of a round share it.
        once: whether the gradient is dropped if the round has one of this worker.
        notes: what is noted of it for takers, separated by spaces: the traceparent of the span that applies it, and its
            metrics; "" if there is nothing.
        weight: factor applied to the gradient, before its staleness counts.
        order: its place in the order of the round, if that follows the workers' numbers; else "".
    """

    local_step: int
    round_shape: tuple[int, ...]
    once: bool = False
    notes: str = ""
    weight: float = 1.0
    order: str = ""


_OUTCOMES: dict[bytes, Outcome] = {
    b"applied": "applied",
    b"stale": "stale",
    b"repeated": "repeated",
    b"set": "set",
    b"lowered": "lowered",
    b"quorum": "quorum",
    b"taken": "taken",
}


@dataclass(slots=True)
class Counted:
    """The outcome of a request, and the accumulator right after it.

    Attributes:
        outcome: the effect of the request.
        global_step: the step after it.
        num_accumulated: the gradients in the round after it.
        replicas: how many replicas have it, if the handle was opened with min_replicas.
    """

    outcome: Outcome
    global_step: int
    num_accumulated: int
    replicas: int = 0


class RequestScripts(AccumulatorScripts):
    """Runs the scripts that count, resolve and forget requests.

    Every function raises the errors of `Transport.run`, and the refusals of its script:

    - NotFoundError: The accumulator doesn't exist, or is no longer the incarnation that was opened.
    - StaleSequenceError: The session has moved on, or resolve has fenced the request.
    - ForgottenError: The server has forgotten the session.
    - DataLossError: The server has lost an outcome that the session knows.
    - CorruptDataError: A key, a field or a reply holds what redisacc never writes.
    """

    def set_global_step(self, request: Request, new_global_step: int) -> Counted:
        """Sets the global step.

        Args:
            request: the request, with its session.
            new_global_step: the step to set.
        """
        reply = self._transport.run(
            *load("set_global_step").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args={**self._sender(request), "new_global_step": new_global_step},
            )
        )
        return self._counted(reply, ())

    def set_quorum(self, request: Request, change: Mapping[str, str]) -> Counted:
        """Changes the quorum.

        Args:
            request: the request, with its session.
            change: what gets which value, as ``quorum_change`` returns it.

        Raises:
            InvalidArgumentError: the numbers that stay do not go together with the new ones.
        """
        reply = self._transport.run(
            *load("set_quorum").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions, "queue": self._keys.queue},
                args={**self._sender(request), **change},
            )
        )
        match reply:
            case [b"conflict", least, most, grace]:
                raise InvalidArgumentError(
                    f"the quorum of {shown(self._keys.name)} would be least={printable(least, QUOTED)}, "
                    f"most={printable(most, QUOTED)}, grace={printable(grace, QUOTED)} ms: most must be at least "
                    "least and needs a grace, and both need least. Change them together"
                )
        return self._counted(reply, ())

    def resolve(self, request: Request, *, timeout: float = TIMEOUT) -> Counted | None:
        """Learns the outcome of a request whose reply was lost, and fences the request if it was not executed.

        Args:
            request: the request.
            timeout: how long to try to reach the server, in seconds.

        Returns:
            The outcome; None if the request was not executed, and no copy of it ever will be.
        """
        reply = self._transport.run(
            *load("resolve").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args=self._sender(request),
            ),
            timeout=timeout,
        )
        return None if reply[0] == b"fenced" else self._counted(reply, ())

    def forget_worker(self, *, session: str, worker: str) -> bool:
        """Forgets that a session has sent gradients for a worker.

        Args:
            session: id of the session.
            worker: name of the worker.

        Returns:
            Whether the session's last request was for this worker.
        """
        reply = self._transport.run(
            *load("forget_worker").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args={"incarnation": self.incarnation, "session": session, "worker": worker},
            )
        )
        match reply:
            case [b"cleared"]:
                return True
            case [b"unknown"]:
                return False
        self._refuse(reply)

    def _sender(self, request: Request) -> dict[str, Argument]:
        """Returns the arguments of every request that is executed once."""
        session = request.session
        return {
            "incarnation": self.incarnation,
            "session": session.id,
            "sequence": str(request.sequence),
            "acknowledged": str(session.acknowledged),
            "worker": request.worker,
        }

    def _of(self, request: GradientRequest) -> dict[str, Argument]:
        """Returns the arguments of every request that concerns a gradient."""
        shape = request.round_shape
        return {
            **self._sender(request),
            "local_step": str(request.local_step),
            "once": "1" if request.once else "0",
            "round_shape": shape_text(shape) if shape else "[]",
            "weight": "1" if request.weight == 1 else weight_text(request.weight),
        }

    def _counted(self, reply: list[bytes], round_shape: tuple[int, ...], replicas: Sequence[Any] = ()) -> Counted:
        match reply:
            case [outcome, step, count] if outcome in _OUTCOMES:
                return Counted(
                    _OUTCOMES[outcome],
                    self._step(step),
                    self._number(count, "num_accumulated"),
                    confirmed(self._keys.record, replicas) if replicas else 0,
                )
            case [b"shape_mismatch", bound]:
                raise InvalidArgumentError(
                    f"a gradient for {shown(self._keys.name)} must have the shape of the other gradients in the "
                    f"current round, {printable(bound, QUOTED)}, not {shape_text(round_shape)}"
                )
            case [b"unweighable", weight, total]:
                raise InvalidArgumentError(
                    f"a gradient for {shown(self._keys.name)} cannot be counted: its weight would be "
                    f"{printable(weight, QUOTED)} and the total of the round {printable(total, QUOTED)}, and "
                    f"both must be in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}]. Nothing was changed"
                )
        self._refuse(reply)
