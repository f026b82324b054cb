"""Runs the scripts in ``lua/`` on the keys of one name, by what their headers say.

The header of a script describes what it does, its keys and arguments, and every reply. ``scripts.NAME(...)`` gets the
arguments by those names, and returns the reply with its values by theirs. A refusal becomes an exception.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from redisacc._arrays.weights import LEAST_WEIGHT, MOST_WEIGHT
from redisacc._clock import durations
from redisacc._format.keys import PartitionedKeys
from redisacc._format.stored_text import parse_weight
from redisacc._text import EVICTED, QUOTED, printable, shown
from redisacc._wire.script_loader import load
from redisacc._wire.sockets import Argument, Command
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import (
    CorruptDataError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    NotReplicatedError,
    RedisAccError,
)


class StaleSequenceError(RedisAccError):
    """The server has already executed a later request of this session, so it refused this one and did not count it.

    The request was delayed for so long that its sender had given up on it.
    """


class ForgottenError(StaleSequenceError):
    """The server has forgotten this session. This copy of the request changed nothing.

    Attributes:
        now_ms: the server's clock in milliseconds since 1970.
    """

    now_ms: int = 0


# Outcome -> its error, and the text of that, in which the values of the reply stand by their names.
Refusals = Mapping[str, tuple[type[RedisAccError], str]]

CORRUPT: Refusals = {
    "corrupt": (CorruptDataError, "{record}: {where} holds {text!r}, which redisacc does not write there"),
}
OF_ACCUMULATORS: Refusals = {
    **CORRUPT,
    "missing": (
        NotFoundError,
        "there is no accumulator {name}: it was deleted, its owner has ended, or the server has lost its data",
    ),
    "replaced": (NotFoundError, "accumulator {name} was deleted after this handle was opened. Open it again"),
    "superseded": (
        StaleSequenceError,
        "{name}: the server has already executed request {sequence} of this session, so it refuses this one, which is "
        "not newer",
    ),
    "forgotten": (
        ForgottenError,
        "{name}: this session was idle for so long that the server has forgotten it, and does not know whether it "
        "has executed this request before",
    ),
    "lost": (
        DataLossError,
        "{name}: the last request of this session that the server knows is {sequence}, but it has acknowledged a later "
        "one: it was restarted from older data, failed over to a replica that lagged behind, or evicted keys. It "
        "did not execute this request; it will execute later ones",
    ),
    "remains": (
        CorruptDataError,
        f"the record of {{name}} is missing, but {{key}} still exists: keys were {EVICTED} or removed by hand. No sum "
        "can be formed from the rest. To start over, remove the rest: redisacc doctor --fix {quoted}",
    ),
    "fenced": (
        StaleSequenceError,
        "{name}: this request was resolved as not executed, so the server refuses every copy of it",
    ),
    "shape_mismatch": (
        InvalidArgumentError,
        "a gradient for {name} must have the shape of the other gradients in the current round, {bound}, not "
        "{round_shape}",
    ),
    "unweighable": (
        InvalidArgumentError,
        "a gradient for {name} cannot be counted: its weight would be {weight} and the total of the round "
        f"{{total_weight}}, and both must be in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}]. Nothing was changed",
    ),
    "conflict": (
        InvalidArgumentError,
        "the quorum of {name} would be least={quorum}, most={quorum_most}, grace={quorum_grace_ms} ms: most must be at "
        "least least and needs a grace, and both need least. Change them together",
    ),
    "unset": (
        InvalidArgumentError,
        "num_required is missing, and {name} has no quorum, or no longer: give it, or set the quorum by set_quorum() "
        "or `redisacc set`",
    ),
    "overflow": (RedisAccError, "{name}: the global step is {global_step}, the largest int64, and cannot grow"),
}
OF_PARAMETERS: Refusals = {
    **CORRUPT,
    "missing": (
        NotFoundError,
        "there are no parameters {name} any longer: they were deleted, or the server has lost its data",
    ),
    "replaced": (
        NotFoundError,
        "parameters {name} were deleted and published again after this handle had seen them. Open them again",
    ),
}
OF_CREWS: Refusals = {
    **CORRUPT,
    "missing": (NotFoundError, "{name} was deleted, and its leases with it"),
}

# The values of replies that are not text.
_STEPS = ("global_step", "step")
_WEIGHTS = ("weight", "total_weight")
_NUMBERS = (
    *("num_accumulated", "ahead", "grace_left_ms", "num_required", "most", "grace_ms", "buffered_bytes"),
    *(
        "buffer_limit",
        "sequence",
        "takes",
        "losses",
        "now_ms",
        "number",
        "left_ms",
        "known",
        "chunk",
        "lease_ms",
        "max_staleness",
    ),
)
_LONGEST_NUMBER = 15

# What a request did, if it was counted.
COUNTED = frozenset(("applied", "stale", "repeated", "set", "lowered", "quorum", "taken"))


class Reply(SimpleNamespace):
    """What a script replied, and the values that its header names.

    Attributes:
        outcome: the first word of the reply.
        read: the replies to the commands that were sent after the script.
        replicas: how many replicas have confirmed it, if that was waited for; else 0.
    """

    outcome: str
    read: list[Any]
    replicas: int


@dataclass(frozen=True)
class _Form:
    """A reply as a header describes it: its values by name, and which of them are what.

    Attributes:
        outcome: its first word.
        names: the names of its values.
        length: how many items it has, at least.
        listed: the name of the list of all further items; "": there are none.
        numbers, steps, weights, texts: the names of the values of each kind.
    """

    outcome: str
    names: tuple[str, ...]
    length: int
    listed: str
    numbers: tuple[str, ...]
    steps: tuple[str, ...]
    weights: tuple[str, ...]
    texts: tuple[str, ...]


@cache
def _forms(script: str) -> dict[bytes, _Form]:
    """Returns the replies of a script, by their first words."""
    found = {}
    for outcome, names in load(script).replies.items():
        listed = names[-1].removesuffix("...") if names and names[-1].endswith("...") else ""
        single = tuple(name for name in names if not name.endswith("..."))
        kinds = {name: kind for kind in (_NUMBERS, _STEPS, _WEIGHTS) for name in single if name in kind}
        of = [tuple(name for name in single if kinds.get(name) is kind) for kind in (_NUMBERS, _STEPS, _WEIGHTS, None)]
        found[outcome.encode()] = _Form(outcome, single, 1 + len(single), listed, *of)
    return found


class _Runner:
    """Runs scripts on the keys of one name, and reads their replies, for ``Scripts``."""

    def __init__(self, transport: Transport, keys: PartitionedKeys, refusals: Refusals, min_replicas: int) -> None:
        self.transport, self._keys, self._refusals = transport, keys, refusals
        # WAIT must follow on the connection of its script: after a failover another one would ask another server.
        self._wait = wait_commands(min_replicas)

    def run(
        self,
        bound: Callable[..., Any],
        script: str,
        *,
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
        replicated: bool = False,
        allowed: Collection[str] = (),
        **values: Any,
    ) -> Reply:
        """Runs a script.

        Args:
            bound: makes what is sent of its arguments.
            script: its name.
            before: commands that travel before it, in the same round trip.
            after: commands that travel after it, whatever it replies.
            replicated: whether replicas have to confirm what it did.
            allowed: refusals that are returned, and not raised.
            values: its arguments.
        """
        waits = self._wait if replicated else ()
        reply, read = self.transport.run_and_read(
            *bound(**values), before=before, after=(*after, *waits) if waits else after
        )
        replicas = confirmed(self._keys.record, [read.pop()]) if waits else 0
        return self.reply(script, reply, read, replicas=replicas, allowed=allowed, given=values)

    def reply(
        self,
        script: str,
        reply: Sequence[Any],
        read: list[Any],
        *,
        replicas: int = 0,
        allowed: Collection[str] = (),
        given: Mapping[str, Any] = {},
    ) -> Reply:
        form = _forms(script).get(reply[0])
        if form is None or len(reply) < form.length or (len(reply) > form.length and not form.listed):
            raise CorruptDataError(f"{self._keys.record}: a script gave the unexpected reply {shown(reply)}")
        if form.listed:
            return Reply(outcome=form.outcome, read=read, replicas=replicas, **{form.listed: list(reply[1:])})
        values: dict[str, Any] = dict(zip(form.names, reply[1:], strict=True))
        if form.outcome in self._refusals and form.outcome not in allowed:
            error = refused(self._refusals[form.outcome], self._keys, **{**given, **values})
            if isinstance(error, ForgottenError):
                error.now_ms = self.number("now_ms", reply[1])
            raise error
        self._convert(form, values)
        return Reply(outcome=form.outcome, read=read, replicas=replicas, **values)

    def _convert(self, form: _Form, values: dict[str, Any]) -> None:
        """Turns the values of a reply, which are bytes, into what they mean."""
        for name in form.numbers:
            value = values[name]
            # Calling self.number() for each would take longer than all else.
            if not (value.isdigit() and len(value) <= _LONGEST_NUMBER):
                self.number(name, value)
            values[name] = int(value)
        for name in form.steps:
            try:
                values[name] = step = int(values[name])
            except ValueError:
                step = 2**63
            if not -(2**63) <= step < 2**63:
                raise CorruptDataError(f"{self._keys.record}: {name} is {shown(values[name])}, not an int64")
        for name in form.weights:
            # "": none was given. "0": the sum of none.
            if values[name] in (b"", b"0"):
                values[name] = 0.0 if values[name] else None
                continue
            try:
                values[name] = parse_weight(text_of(values[name]))
            except ValueError as error:
                where = self._keys.record
                raise CorruptDataError(f"{where}: a weight is {shown(values[name])}: {error}") from None
        for name in form.texts:
            values[name] = values[name].decode(errors="backslashreplace")

    def number(self, name: str, value: bytes) -> int:
        """Returns a number from 0 to 10^15 - 1, as text of the server; CorruptDataError: it is none."""
        if not (value.isdigit() and len(value) <= _LONGEST_NUMBER):
            raise CorruptDataError(f"{self._keys.record}: {name} is {shown(value)}, not a number from 0 to 10^15 - 1")
        return int(value)


class Scripts:
    """The scripts on the keys of one name.

    Every call raises the errors of ``Transport.run_and_read``, those of ``refusals``, and CorruptDataError if a key, a
    field or a reply holds what redisacc never writes.

    Args:
        transport: the way to the server.
        keys: the keys of the name.
        refusals: the outcomes that raise.
        base: the key that stands for ``redisacc:{NAME}`` in the headers; None means that of the name.
        min_replicas: how many replicas a call with ``replicated=True`` waits for; 0: none.
        fixed: arguments, and keys, that are the same in all calls.

    Attributes:
        transport, min_replicas: as above.
        incarnation: the argument of this name, if it is fixed; else "".
    """

    def __init__(
        self,
        transport: Transport,
        keys: PartitionedKeys,
        refusals: Refusals = CORRUPT,
        *,
        base: str | None = None,
        min_replicas: int = 0,
        **fixed: Argument,
    ) -> None:
        self.transport, self.min_replicas, self._name = transport, min_replicas, keys.name
        self.incarnation = str(fixed.get("incarnation", ""))
        self._runner = _Runner(transport, keys, refusals, min_replicas)
        self._base = keys.base if base is None else base
        self._fixed, self._bounds = fixed, dict[str, Callable[..., Any]]()

    def __getattr__(self, name: str) -> Callable[..., Reply]:
        if name.startswith("_"):
            raise AttributeError(name)
        # It refers to the runner: a cycle would keep connections after the last handle is gone, until a collection.
        call = partial(self._runner.run, self._bound(name), name)
        setattr(self, name, call)
        return call

    def _bound(self, name: str) -> Callable[..., Any]:
        """Returns a function that makes what is sent of the arguments of a script that are not fixed."""
        bound = self._bounds.get(name)
        if bound is None:
            script = load(name)
            known = {field.name for field in (*script.keys, *script.args)}
            bound = script.on(self._base, **{name: value for name, value in self._fixed.items() if name in known})
            self._bounds[name] = bound
        return bound

    def prepare(self, script: str, *, after: Sequence[Command] = (), **values: Any) -> Callable[..., Reply]:
        """Returns a call that may be made several times, and gets its ``timeout``."""
        call = self._runner.transport.prepare(*self._bound(script)(**values), after=after)

        def again(*, timeout: float) -> Reply:
            reply, read = self._runner.transport.repeat(call, timeout=timeout)
            return self._runner.reply(script, reply, read)

        return again

    def hint(self, script: str, **values: Any) -> Hint:
        """Returns a call whose reply is not needed, to be sent before another."""
        return Hint.running(*(self._bounds.get(script) or self._bound(script))(**values))

    def parse(self, script: str, reply: Sequence[Any], **given: Any) -> Reply:
        """Returns what a reply of a script to these arguments says, or raises what it refuses."""
        return self._runner.reply(script, reply, [], given=given)

    def check_replicated(self, replicas: int, done: str, advice: str = "") -> None:
        """Raises NotReplicatedError if fewer than ``min_replicas`` replicas have confirmed a write.

        Args:
            replicas: how many replicas confirmed it in time.
            done: the write, as a clause: "the gradient was counted".
            advice: what else the message says.
        """
        if replicas < self.min_replicas:
            raise NotReplicatedError(
                f"{shown(self._name)}: {done}, but only {replicas} of the {self.min_replicas} replicas that should "
                f"have it confirmed it in time{advice}",
                replicas=replicas,
                min_replicas=self.min_replicas,
            )


def refused(refusal: tuple[type[RedisAccError], str], keys: PartitionedKeys, **values: Any) -> RedisAccError:
    """Returns the error of a refusal.

    Args:
        refusal: an item of ``OF_ACCUMULATORS`` or the like.
        keys: the keys of the name.
        values: the arguments of the script, and the values of its reply.
    """
    kind, text = refusal
    printed = {name: printable(value, QUOTED) for name, value in values.items() if isinstance(value, str | bytes)}
    quoted = shlex.quote(printable(keys.name))
    return kind(text.format(record=keys.record, name=shown(keys.name), quoted=quoted, **printed))


def text_of(data: bytes) -> str:
    """Returns a server's reply as text, whatever bytes it contains."""
    return data.decode(errors="backslashreplace")


def wait_commands(min_replicas: int) -> list[Command]:
    """Returns the command that waits until this many replicas have its connection's writes; 0: no command."""
    return [("WAIT", min_replicas, round(durations.replication * 1000))] if min_replicas else []


def confirmed(where: str, replies: Sequence[object]) -> int:
    """Returns how many replicas the reply to ``wait_commands`` counts; 0 if there was no command.

    Args:
        where: the key that was written, for errors.
        replies: the reply, if there was a command.

    Raises:
        CorruptDataError: it is no number.
    """
    match replies:
        case []:
            return 0
        case [int(replicas)]:
            return replicas
    raise CorruptDataError(f"{where}: WAIT replied {shown(replies)}, not a number of replicas")
