"""Reads a round: the current one, or one that was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from redisacc import _fetching, _parked
from redisacc._dtypes import DType
from redisacc._fetching import SMALL_FIELDS, add_parked
from redisacc._keys import Keys, RoundKeys
from redisacc._link import PATIENCE, Link
from redisacc._parked import Parked
from redisacc._shapes import round_shape_of
from redisacc._wire import Command
from redisacc.errors import CorruptDataError

# Fields asked for in one HSCAN. The server holds everybody up while it collects them.
SCAN_FIELDS = 1000

# Parts that one call of a script removes: a thousand took it more than half a millisecond.
BATCH = 250

Fields = dict[bytes, bytes]


G_co = TypeVar("G_co", covariant=True)


@dataclass(frozen=True)
class Round(Generic[G_co]):
    """What gradients of one step add up to.

    Attributes:
        gradient: dense: an array. Sparse: ``IndexedSlices`` with sorted unique indices. None where nothing has been
            accumulated, which only ``peek()`` can find.
        global_step: the step that the take closed; from ``peek()``, the current one.
        num_accumulated: how many gradients are in it.
        workers: from whom they came: worker's name → number.
    """

    gradient: G_co
    global_step: int
    num_accumulated: int
    workers: dict[str, int] = field(default_factory=dict)


class Total(_fetching.Total, Protocol):
    """Where a round is added up: ``DenseTotal`` or ``SparseTotal``."""

    def add_sums(self, fields: Fields) -> None:
        """Adds what was summed in place."""


def scan_command(key: str, cursor: int = 0) -> Command:
    """The command that reads a piece of a hash."""
    return ("HSCAN", key, cursor, "COUNT", SCAN_FIELDS)


def scan_rest(link: Link, key: str, reply: Any, *, patience: float = PATIENCE) -> Fields:
    """All fields of a hash, of which ``reply`` is the first piece. A field may come twice: the last one counts."""
    if reply == _EMPTY:
        return {}
    cursor, fields = _fields(key, reply)
    while cursor:
        cursor, more = _fields(key, link.call(*scan_command(key, cursor), patience=patience))
        fields.update(more)
    return fields


# What HSCAN says of a hash that isn't there.
_EMPTY = [b"0", []]


def _fields(key: str, reply: Any) -> tuple[int, Fields]:
    """A reply to HSCAN: where to go on, 0 at the end, and the fields that it brought."""
    match reply:
        case [bytes() | int() as cursor, list(flat)] if len(flat) % 2 == 0:
            each = iter(flat)
            return int(cursor), dict(zip(each, each, strict=True))
    raise CorruptDataError(f"{key}: HSCAN replied {reply!r:.100}")


def scan(link: Link, key: str, *, patience: float = PATIENCE) -> Fields:
    """All fields of a hash, read in pieces."""
    return scan_rest(link, key, link.call(*scan_command(key), patience=patience), patience=patience)


def all_rounds(link: Link, keys: Keys, *, patience: float = PATIENCE) -> list[RoundKeys]:
    """The hashes of the current round, and of those that were taken and not acknowledged."""
    taken = scan(link, keys.taken, patience=patience)
    return [keys.current, *(keys.taken_round(token.decode(errors="replace")) for token in taken)]


def parse_workers(fields: Fields, where: str) -> dict[str, int]:
    """Worker's name → number of gradients."""
    workers = {}
    for name, count in fields.items():
        if not (count.isdigit() and len(count) <= 15):
            raise CorruptDataError(f"{where}: {name[:64]!r} has contributed {count[:64]!r} gradients")
        workers[name.decode(errors="backslashreplace")] = int(count)
    return dict(sorted(workers.items()))


@dataclass(slots=True)
class Contents:
    """A round's hashes. ``parked`` names the gradients that are held whole, ``small`` holds some of the small ones.

    The others, and all parts of large ones, are still to be fetched.
    """

    of: RoundKeys
    sums: Fields
    parked: list[Parked]
    small: Fields
    workers: dict[str, int]


def read_commands(of: RoundKeys) -> list[Command]:
    """The commands that read a round's hashes; where they are small they are read whole."""
    return [
        ("HSCAN", of.sums, 0, "COUNT", SCAN_FIELDS),
        ("HSCAN", of.parked, 0, "COUNT", SCAN_FIELDS),
        ("HSCAN", of.workers, 0, "COUNT", SCAN_FIELDS),
        ("HSCAN", of.small, 0, "COUNT", SMALL_FIELDS),
    ]


class Reader:
    """Adds up rounds of one accumulator, and begins with a round while it still grows.

    Args:
        total: makes what adds up gradients of a round shape (``DenseTotal`` or ``SparseTotal``).
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        dtype: DType,
        sparse: bool,
        total: Callable[[tuple[int, ...]], Total],
    ) -> None:
        self._link = link
        self._keys = keys
        self._dtype = dtype
        self._sparse = sparse
        self._make_total = total
        self.forget()

    def forget(self) -> None:
        """Begins anew: the round that was begun with is over."""
        self._shape: tuple[int, ...] | None = None
        self._total: Total | None = None
        # Ids of the parked gradients that have been added, in order of arrival.
        self._added: dict[str, None] = {}

    def look_ahead(self, ids: Sequence[str] | None) -> None:
        """Adds gradients that were parked in the current round, in order of arrival, as announced.

        Args:
            ids: what was announced since the last time; None: announcements may have been missed, so look at all.
        """
        current = self._keys.current.parked
        if ids is None:
            shape, first = self._link.pipeline([("HGET", self._keys.record, "round_shape"), scan_command(current)])
            entries = scan_rest(self._link, current, first)
        else:
            shape, found = self._link.pipeline([("HGET", self._keys.record, "round_shape"), ("HMGET", current, *ids)])
            entries = {name.encode(): entry for name, entry in zip(ids, found, strict=True) if entry is not None}
        round_shape = round_shape_of(self._keys, (shape or b"").decode(errors="replace"))
        if round_shape != self._shape:
            self.forget()
            self._shape = round_shape
        if round_shape is None:
            return
        new = [parked for parked in self._parse(entries, round_shape) if parked.id not in self._added]
        if new:
            self._add(self._keys.current, new, round_shape)

    def _add(
        self, of: RoundKeys, parked: list[Parked], shape: tuple[int, ...], known: Mapping[bytes, bytes] | None = None
    ) -> Total:
        if self._total is None:
            self._total = self._make_total(shape)
        add_parked(self._link, self._keys, of, parked, total=self._total, known=known or {})
        self._added.update((gradient.id, None) for gradient in parked)
        return self._total

    def _parse(self, entries: Fields, shape: tuple[int, ...]) -> list[Parked]:
        return _parked.parse(self._keys, entries, dtype=self._dtype, sparse=self._sparse, round_shape=shape)

    def contents(self, of: RoundKeys, pieces: list[Any], shape: tuple[int, ...]) -> Contents:
        """What the replies to ``read_commands`` say, and the further pieces that they promise."""
        return Contents(
            of=of,
            sums=scan_rest(self._link, of.sums, pieces[0]),
            parked=self._parse(scan_rest(self._link, of.parked, pieces[1]), shape),
            small=_fields(of.small, pieces[3])[1],
            workers=parse_workers(scan_rest(self._link, of.workers, pieces[2]), of.workers),
        )

    def add_up(self, contents: Contents, shape: tuple[int, ...]) -> Total:
        """Everything in a round, in order of arrival, and last what was summed in place.

        Raises:
            PartMissing: a parked gradient isn't there (any more).
        """
        left = contents.parked
        if self._added:
            if shape != self._shape or not self._added.keys() <= {parked.id for parked in left}:
                # Another taker had the round that was begun with, or what was added has been folded since.
                self.forget()
            left = [parked for parked in left if parked.id not in self._added]
        total = self._add(contents.of, left, shape, contents.small) if left else self._total or self._make_total(shape)
        total.add_sums(contents.sums)
        self.forget()
        return total


def batches(items: list[str]) -> Iterator[list[str]]:
    """Pieces of a list, at least one."""
    for start in range(0, max(len(items), 1), BATCH):
        yield items[start : start + BATCH]
