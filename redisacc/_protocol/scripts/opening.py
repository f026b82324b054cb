"""Opens an accumulator, or creates it: ``lua/open.lua``, and what a user who may only read does instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from redisacc._clock import durations
from redisacc._data.spec import Normalize, Order
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import DELETING
from redisacc._format.partitions import parse_partitions, partitions_text
from redisacc._format.record import check_format, parse_normalize, parse_order
from redisacc._protocol.scripts.base import AccumulatorScripts, text_of
from redisacc._redis.reply_errors import NotPermittedError
from redisacc._redis.script_loader import load
from redisacc._text import shown
from redisacc.errors import CorruptDataError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Schema:
    """The specification an accumulator was created with, all as text (``AccumulatorSpec.schema``)."""

    format: str
    kind: str
    dtype: str
    shape: str
    reduction_type: str
    sparse_mean: str
    missing: str
    tree: str


# The fields of the record that describe an accumulator, in the order in which the script replies their values.
_FIELDS = (
    "incarnation",
    *(field.name for field in fields(Schema)),
    *("chunk", "lease_ms", "buffer_limit", "once_per_worker", "max_staleness", "staleness_weight", "normalize"),
    *("order", "partitions", "takes", "losses"),
)
# Those that a record may lack, and what that means.
_DEFAULTS = {
    "max_staleness": "0",
    "staleness_weight": CONSTANT,
    "normalize": "weights",
    "order": "arrival",
    "partitions": "",
    "takes": "0",
    "losses": "0",
}


@dataclass(frozen=True)
class Opened:
    """An accumulator as ``open`` found or created it.

    Attributes:
        now_ms: the server's clock in milliseconds since 1970; 0 if the script couldn't run.
        incarnation: the incarnation that the handle uses from now on.
        schema: the specification it was created with.
        chunk: elements of a row of a dense gradient.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
        buffer_limit: bytes that the buffered gradients of a round may have in total.
        once_per_worker: whether a round accepts one gradient of each worker only.
        max_staleness: by how many steps a gradient may be late.
        staleness_weight: how staleness changes weights, as text.
        normalize: the divisor of means, as text.
        order: the order in which the gradients of a round are added.
        partitions: the numbers of the slots that hold the parts of gradients; empty if that is the slot of the record.
        can_add_in_place: whether the server's Lua can add.
        takes: how many rounds it had granted.
        losses: how often it was seen to have gone back to older data.
    """

    now_ms: int
    incarnation: str
    schema: Schema
    chunk: int
    lease_ms: int
    buffer_limit: int
    once_per_worker: bool
    max_staleness: int
    staleness_weight: str
    normalize: Normalize
    order: Order
    partitions: tuple[int, ...]
    can_add_in_place: bool
    takes: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Deleting:
    """The name is being deleted, by a client that may have died."""

    incarnation: str


class OpenScript(AccumulatorScripts):
    """Runs the script that opens an accumulator."""

    def open(
        self,
        *,
        incarnation: str,
        schema: Schema,
        chunk: int,
        lease_ms: int,
        buffer_limit: int,
        once_per_worker: bool,
        max_staleness: int,
        staleness_weight: str = CONSTANT,
        normalize: str = "weights",
        order: str = "arrival",
        partitions: tuple[int, ...] = (),
        create: bool = True,
    ) -> Opened | Deleting:
        """Opens or creates the accumulator.

        Args:
            incarnation: a random id, which the accumulator gets if this call creates it.
            schema: the specification to create it with. An existing accumulator keeps its own.
            chunk: elements of a row of a dense gradient.
            lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
            buffer_limit: bytes that the buffered gradients of a round may have in total.
            once_per_worker: whether a round accepts one gradient of each worker only.
            max_staleness: by how many steps a gradient may be late.
            staleness_weight: how staleness changes weights, as text.
            normalize: the divisor of means: "weights" or "count".
            order: the order in which the gradients of a round are added: "arrival" or "worker".
            partitions: the numbers of the slots that hold the parts of gradients; empty: the slot of the record.
            create: whether to create the accumulator if there is none.

        Raises:
            CorruptDataError: the record belongs to another version of the data model.
        """
        current = self._keys.current
        try:
            reply = self._transport.run(
                *load("open").bind(
                    keys={
                        "record": self._keys.record,
                        "sums": current.sums,
                        "buffered": current.buffered,
                        "inline": current.inline,
                        "workers": current.workers,
                        "sessions": self._keys.sessions,
                    },
                    args={
                        "incarnation": incarnation,
                        "format": schema.format,
                        "kind": schema.kind,
                        "dtype": schema.dtype,
                        "shape": schema.shape,
                        "reduction_type": schema.reduction_type,
                        "sparse_mean": schema.sparse_mean,
                        "missing": schema.missing,
                        "tree": schema.tree,
                        "chunk": chunk,
                        "lease_ms": lease_ms,
                        "buffer_limit": buffer_limit,
                        "once_per_worker": int(once_per_worker),
                        "max_staleness": max_staleness,
                        "staleness_weight": staleness_weight,
                        "normalize": normalize,
                        "order": order,
                        "partitions": partitions_text(partitions),
                        "create": int(create),
                    },
                ),
                timeout=durations.opening,
            )
        except NotPermittedError:
            # An observer may read but not run scripts. The server refuses everything else that it tries as well.
            found = self._open_read_only()
            if found is None:
                raise
            return found
        match reply:
            case [b"opened", struct, now, *values]:
                opened = self._opened(values, now_ms=self._number(now, "TIME"), can_add_in_place=struct == b"yes")
                if opened is not None:
                    return opened
            case [b"deleting", incarnation_]:
                return Deleting(text_of(incarnation_))
            case [b"other_format", format_]:
                check_format(self._keys.name, text_of(format_))
        self._refuse(reply)

    def _open_read_only(self) -> Opened | None:
        """Reads what ``open`` would find, without the script; None if there is nothing that can be used."""
        reply = self._transport.call("HMGET", self._keys.record, *_FIELDS, timeout=durations.opening)
        match reply:
            case [_, bytes() as format_, *_]:
                check_format(self._keys.name, text_of(format_))
        match reply:
            case [bytes() as incarnation, *_] if not incarnation.startswith(DELETING.encode()):
                return self._opened(reply)
        return None

    def _opened(self, values: Sequence[object], *, now_ms: int = 0, can_add_in_place: bool = False) -> Opened | None:
        """Returns what the values of ``_FIELDS`` describe; None if one is missing that every record has."""
        if len(values) != len(_FIELDS):
            return None
        found: dict[str, bytes] = {}
        for name, value in zip(_FIELDS, values, strict=True):
            if isinstance(value, bytes):
                found[name] = value
            elif value is None and name in _DEFAULTS:
                found[name] = _DEFAULTS[name].encode()
            else:
                return None
        return Opened(
            now_ms=now_ms,
            incarnation=text_of(found["incarnation"]),
            schema=Schema(*[text_of(found[field.name]) for field in fields(Schema)]),
            chunk=self._number(found["chunk"], "chunk", least=1),
            lease_ms=self._number(found["lease_ms"], "lease_ms"),
            buffer_limit=self._number(found["buffer_limit"], "buffer_limit"),
            once_per_worker=bool(self._number(found["once_per_worker"], "once_per_worker")),
            max_staleness=self._number(found["max_staleness"], "max_staleness"),
            staleness_weight=text_of(found["staleness_weight"]),
            normalize=self._parsed("normalize", found["normalize"], parse_normalize),
            order=self._parsed("order", found["order"], parse_order),
            partitions=self._parsed("partitions", found["partitions"], parse_partitions),
            can_add_in_place=can_add_in_place,
            takes=self._number(found["takes"], "takes"),
            losses=self._number(found["losses"], "losses"),
        )

    def _parsed(self, name: str, text: bytes, parse: Callable[[str], Value]) -> Value:
        try:
            return parse(text.decode(errors="replace"))
        except ValueError:
            raise CorruptDataError(
                f"{self._keys.record}: {name} is {shown(text)}, which redisacc did not write"
            ) from None
