"""The common base of an accumulator's scripts: its keys, and the refusals and numbers in their replies."""

from __future__ import annotations

import shlex
from typing import NoReturn

from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._format.weights import parse_weight
from redisacc._protocol.scripts.replication import wait_commands
from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.transport import Transport
from redisacc._text import EVICTED, QUOTED, printable, shown
from redisacc.errors import CorruptDataError, DataLossError, NotFoundError, RedisAccError


class StaleSequenceError(RedisAccError):
    """The server has already executed a later request of this session, so it refused this one and did not count it.

    The request was delayed for so long that its sender had given up on it.
    """


class ForgottenError(StaleSequenceError):
    """The server has forgotten this session. This copy of the request changed nothing.

    Attributes:
        now_ms: the server's clock in milliseconds since 1970.
    """

    def __init__(self, message: str, now_ms: int) -> None:
        super().__init__(message)
        self.now_ms = now_ms


class AccumulatorScripts:
    """The accumulator on which scripts run.

    Args:
        transport: the server.
        keys: the accumulator.
        incarnation: the incarnation that was opened.
        min_replicas: how many replicas must confirm; 0 asks none.
    """

    def __init__(self, transport: Transport, keys: Keys, *, incarnation: str = "", min_replicas: int = 0) -> None:
        self._transport = transport
        self.min_replicas = min_replicas
        # WAIT must follow on the connection of its script: after a failover another one would ask another server.
        self._replicate = wait_commands(min_replicas)
        self.bind(keys, incarnation)

    def bind(self, keys: Keys, incarnation: str, inline_bytes: int | None = None) -> None:
        """Binds the scripts to the accumulator that ``open`` found.

        Args:
            keys: its keys, with its partitions.
            incarnation: its incarnation.
            inline_bytes: gradients of this handle that are larger are sent in parts. None: as usual.
        """
        self._keys = keys
        self.incarnation = incarnation
        self.inline_bytes = buffered_format.INLINE_BYTES if inline_bytes is None else inline_bytes
        # Gradients of at least this many bytes are announced.
        self.announced_bytes = buffered_format.ANNOUNCED_INLINES * self.inline_bytes

    def _step(self, text: bytes) -> int:
        try:
            step = int(text)
        except ValueError:
            step = 2**63
        if not -(2**63) <= step < 2**63:
            raise CorruptDataError(f"{self._keys.record}: global_step is {shown(text)}, not an int64")
        return step

    def _number(self, text: bytes, what: str, *, least: int = 0) -> int:
        if not (text.isdigit() and len(text) <= 15 and int(text) >= least):
            raise CorruptDataError(
                f"{self._keys.record}: {what} is {shown(text)}, not a number from {least} to 10^15 - 1"
            )
        return int(text)

    def _weight(self, text: bytes) -> float:
        try:
            return parse_weight(text_of(text))
        except ValueError as error:
            raise CorruptDataError(f"{self._keys.record}: a weight is {shown(text)}: {error}") from None

    def _refuse(self, reply: list[bytes]) -> NoReturn:
        name = shown(self._keys.name)
        match reply:
            case [b"missing"]:
                raise NotFoundError(
                    f"there is no accumulator {name}: it was deleted, its owner is gone, or the server has lost its "
                    "data"
                )
            case [b"replaced"]:
                raise NotFoundError(f"accumulator {name} was deleted after this handle was opened. Open it again")
            case [b"superseded", sequence]:
                raise StaleSequenceError(
                    f"{name}: the server has already executed request {printable(sequence, QUOTED)} of this session, "
                    "so it refuses this one, which is not newer"
                )
            case [b"fenced", _, _]:
                raise StaleSequenceError(
                    f"{name}: this request was resolved as not executed, so the server refuses every copy of it"
                )
            case [b"forgotten", now]:
                raise ForgottenError(
                    f"{name}: this session was idle for so long that the server has forgotten it, and cannot tell "
                    "whether it has executed this request before",
                    self._number(now, "TIME"),
                )
            case [b"remains", key]:
                raise CorruptDataError(
                    f"the record of {name} is gone, but {printable(key, QUOTED)} still exists: keys were {EVICTED} "
                    "or removed by hand. No sum can be formed from the rest. To start over, remove the rest: "
                    f"redisacc gc {shlex.quote(printable(self._keys.name))}"
                )
            case [b"lost", sequence]:
                raise DataLossError(
                    f"{name}: the last request of this session that the server knows is "
                    f"{printable(sequence, QUOTED)}, but it has acknowledged a later one: it was restarted from "
                    "older data, failed over to a replica that lagged behind, or evicted keys. It "
                    "did not execute this request; it will execute later ones"
                )
            case [b"overflow", step]:
                raise RedisAccError(
                    f"{name}: the global step is {printable(step, QUOTED)}, the largest int64, and cannot grow"
                )
        raise corrupt(self._keys.record, reply)


def text_of(data: bytes) -> str:
    """Returns a server's reply as text, whatever bytes it contains."""
    return data.decode(errors="backslashreplace")
