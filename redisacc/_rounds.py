"""Reads a round: the current one, or one that was taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from redisacc import _parked
from redisacc._arguments import Array
from redisacc._dtypes import DType
from redisacc._keys import Keys, RoundKeys
from redisacc._link import PATIENCE, Link
from redisacc._parked import Gradient, Parked
from redisacc._slices import IndexedSlices
from redisacc._wire import Command
from redisacc.errors import CorruptDataError

# Fields asked for in one HSCAN. The server holds everybody up while it collects them.
SCAN_FIELDS = 1000

# Keys given to one command.
BATCH = 1000

Fields = dict[bytes, bytes]


@dataclass(frozen=True)
class Round:
    """What gradients of one step add up to.

    Attributes:
        gradient: dense: an array. Sparse: ``IndexedSlices`` with sorted unique indices. None where nothing has been
            accumulated, which only ``peek()`` can find.
        global_step: the step that the take closed; from ``peek()``, the current one.
        num_accumulated: how many gradients are in it.
        workers: from whom they came: worker's name → number.
    """

    gradient: Array | IndexedSlices | None
    global_step: int
    num_accumulated: int
    workers: dict[str, int] = field(default_factory=dict)


class Total(Protocol):
    """Where a round is added up: ``DenseTotal`` or ``SparseTotal``."""

    def add_sums(self, fields: Fields) -> None:
        """Adds what was summed in place."""

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient that was held whole."""


def scan_command(key: str, cursor: int = 0) -> Command:
    """The command that reads a piece of a hash."""
    return ("HSCAN", key, cursor, "COUNT", SCAN_FIELDS)


def scan_rest(link: Link, key: str, reply: Any, *, patience: float = PATIENCE) -> Fields:
    """All fields of a hash, of which ``reply`` is the first piece. A field may come twice: the last one counts."""
    fields: Fields = {}
    while True:
        match reply:
            case [bytes() | int() as cursor, list(flat)] if len(flat) % 2 == 0:
                fields.update(zip(flat[::2], flat[1::2], strict=True))
            case _:
                raise CorruptDataError(f"{key}: HSCAN replied {reply!r:.100}")
        if int(cursor) == 0:
            return fields
        reply = link.call(*scan_command(key, int(cursor)), patience=patience)


def scan(link: Link, key: str, *, patience: float = PATIENCE) -> Fields:
    """All fields of a hash, read in pieces."""
    return scan_rest(link, key, link.call(*scan_command(key), patience=patience), patience=patience)


def parse_workers(fields: Fields, where: str) -> dict[str, int]:
    """Worker's name → number of gradients."""
    workers = {}
    for name, count in fields.items():
        if not (count.isdigit() and len(count) <= 15):
            raise CorruptDataError(f"{where}: {name[:64]!r} has contributed {count[:64]!r} gradients")
        workers[name.decode(errors="backslashreplace")] = int(count)
    return dict(sorted(workers.items()))


@dataclass(frozen=True)
class Contents:
    """A round's hashes. ``parked`` names the gradients that are held whole; their parts are still to be fetched."""

    sums: Fields
    parked: list[Parked]
    workers: dict[str, int]


def read_contents(
    link: Link, keys: Keys, of: RoundKeys, *, dtype: DType, sparse: bool, round_shape: tuple[int, ...]
) -> Contents:
    """Reads a round's hashes, for small ones in a single round trip."""
    replies = link.pipeline([scan_command(key) for key in (of.sums, of.parked, of.workers)])
    return parse_contents(link, keys, of, replies, dtype=dtype, sparse=sparse, round_shape=round_shape)


def parse_contents(
    link: Link,
    keys: Keys,
    of: RoundKeys,
    replies: list[Any],
    *,
    dtype: DType,
    sparse: bool,
    round_shape: tuple[int, ...],
) -> Contents:
    """What the first pieces of a round's hashes say, and the further pieces that they promise."""
    return Contents(
        sums=scan_rest(link, of.sums, replies[0]),
        parked=_parked.parse(
            keys, scan_rest(link, of.parked, replies[1]), dtype=dtype, sparse=sparse, round_shape=round_shape
        ),
        workers=parse_workers(scan_rest(link, of.workers, replies[2]), of.workers),
    )


def add_up(link: Link, keys: Keys, contents: Contents, total: Total) -> None:
    """Fetches what is parked and adds everything: first what was summed in place, then in order of arrival."""
    total.add_sums(contents.sums)
    for gradient in _parked.fetch(link, keys, contents.parked):
        total.add(gradient)


def batches(items: list[str]) -> Iterator[list[str]]:
    """Pieces of a list, at least one."""
    for start in range(0, max(len(items), 1), BATCH):
        yield items[start : start + BATCH]
