"""The record: the plain-text hash that describes an accumulator."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from redisacc._arrays.dtypes import TABLE
from redisacc._arrays.spec import AccumulatorSpec, Missing, Normalize, Order, SparseMean
from redisacc._arrays.validation import Shape
from redisacc._arrays.weights import CONSTANT, INVERSE_SQRT, StalenessWeight
from redisacc._format.keys import Keys, parse_partitions
from redisacc._format.quorum import QUORUM_FIELDS, Quorum
from redisacc._format.stored_text import (
    LONGEST_SHAPE,
    MOST_STALENESS,
    foreign,
    of_ascii,
    parse_int64,
    parse_leaves,
    parse_number,
    parse_round_shape,
    parse_shape,
    parse_staleness,
    parse_time,
    parse_weight,
    parsed,
)
from redisacc._text import shown
from redisacc.errors import CorruptDataError, NotFoundError

Word = TypeVar("Word", bound=str)

# The version of the data model, in every record.
FORMAT = "4"


# How many bytes the buffered gradients of a round may have together, unless the creator says otherwise.
BUFFER_LIMIT = 256 * 2**20
# The same if sums follow the workers' numbers: as many as a record can hold. A round then has one gradient of each
# worker, and compacting them would change their order.
BUFFER_LIMIT_BY_WORKER = 10**15 - 1


@dataclass(frozen=True)
class Field:
    """A field of the record.

    Attributes:
        name: its name.
        parse: returns the value of its text, and raises ValueError if redisacc writes no such text.
        absent: the text that it stands for if a record lacks it; None means every record has it.
        option: the option by which the creator of the accumulator chooses it, such as "limits.buffer"; "": none does.
        default: the value that it gets if the creator leaves the option out; None means what is accumulated says it.
    """

    name: str
    parse: Callable[[str], Any]
    absent: str | None = None
    option: str = ""
    default: Any = None

    def chosen(self, options: Mapping[str, Any]) -> Any:
        """Returns the value that valid options choose; None means they leave it out."""
        group, _, part = self.option.partition(".")
        given = options[group]
        return getattr(given, part) if part and given is not None else given


def _text(text: str) -> str:
    if len(text) > LONGEST_SHAPE or not text.isascii():
        raise ValueError(text)
    return text


def _positive(text: str) -> int:
    number = parse_number(text)
    if not number:
        raise ValueError(text)
    return number


def _late(text: str) -> int:
    steps = parse_number(text)
    if steps > MOST_STALENESS:
        raise ValueError(text)
    return steps


def _one_of(*words: Word) -> Callable[[str], Word]:
    """Returns a parser of a field that is one of some words. It raises ValueError: redisacc did not write it."""

    def parse(text: str) -> Word:
        for word in words:
            if word == text:
                return word
        raise ValueError(text)

    return parse


# All fields but those that only a few read: docs/reference/keys.md has a row for each. What depends on several of them
# is parsed by ``Record``.
FIELDS = (
    Field("format", _text),
    Field("kind", _one_of("dense", "sparse", "tree"), option="kind"),
    *[Field(name, _text, option=name) for name in ("dtype", "shape")],
    Field("reduction_type", _one_of("MEAN", "SUM"), option="reduction_type"),
    Field("sparse_mean", _one_of("index", "round"), option="mean.rows"),
    Field("missing", _one_of("zero", "skip"), option="mean.missing"),
    Field("incarnation", _text),
    Field("round_shape", parse_round_shape),
    Field("global_step", parse_int64),
    *[Field(name, parse_number) for name in ("num_accumulated", "applied", "stale", "repeated", "duplicates", "takes")],
    Field("created_ms", parse_time),
    Field("buffered_bytes", parse_number),
    Field("chunk", _positive),
    Field("buffer_limit", parse_number, option="limits.buffer", default=BUFFER_LIMIT),
    Field("once_per_worker", lambda text: parse_number(text) != 0, option="once_per_worker", default=False),
    Field("max_staleness", _late, "0", option="staleness.most", default=0),
    Field("staleness", str, ""),
    Field("staleness_weight", _one_of(CONSTANT, INVERSE_SQRT), CONSTANT, option="staleness.weight", default=CONSTANT),
    Field("normalize", _one_of("weights", "count"), "weights", option="mean.by", default="weights"),
    Field("order", _one_of("arrival", "worker"), "arrival", option="order", default="arrival"),
    # No script writes "none": the weights of all gradients are 1.
    Field("total_weight", str, "none"),
    Field("partitions", parse_partitions, ""),
    *[Field(name, lambda text: text and str(parse_number(text)), "") for name in QUORUM_FIELDS],
)
# Those that the creator chooses, whatever is accumulated.
SETTINGS = tuple(field for field in FIELDS if field.default is not None)
# What the absence of a field means.
ABSENT = {field.name: field.absent.encode() for field in FIELDS if field.absent is not None}


def check_format(name: str, found: str) -> None:
    """Raises CorruptDataError unless a record has the version of the data model that this library reads."""
    if found != FORMAT:
        raise CorruptDataError(
            f"accumulator {shown(name)} has format {shown(found)} of the data model, but this version of redisacc "
            f"reads format {FORMAT!r}: finish its run with the version that created it, or delete its keys"
        )


@dataclass(frozen=True)
class RecordValues:
    """The values of the record that people see. ``AccumulatorInfo`` describes each of them."""

    name: str
    kind: Literal["dense", "sparse", "tree"]
    dtype: str
    shape: Shape
    num_leaves: int | None
    reduction_type: str
    sparse_mean: SparseMean
    missing: Missing
    incarnation: str
    global_step: int
    num_accumulated: int
    round_shape: tuple[int, ...] | None
    applied: int
    stale: int
    repeated: int
    duplicates: int
    takes: int
    buffered_bytes: int
    buffer_limit: int
    once_per_worker: bool
    max_staleness: int
    staleness: dict[int, int]
    staleness_weight: StalenessWeight
    normalize: Normalize
    order: Order
    total_weight: float
    partitions: tuple[int, ...]
    quorum: Quorum


class Record(RecordValues):
    """The record of an accumulator, parsed and checked. docs/reference/keys.md describes the fields.

    Args:
        keys: the keys of the accumulator.
        reply: the server's reply to ``command()``.

    Attributes:
        created_ms: when the accumulator was created, by the server's clock.
        chunk: the number of elements of a dense gradient in one field of the ``sums`` hash.
        given_weight: the sum of the weights of the gradients of the current round; None if all are 1.

    Raises:
        NotFoundError: there is no record.
        CorruptDataError: redisacc did not write the record.
    """

    _where: str
    created_ms: datetime.datetime
    chunk: int
    given_weight: float | None

    def __init__(self, keys: Keys, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) != len(FIELDS):
            raise CorruptDataError(f"{keys.record}: HMGET must reply {len(FIELDS)} values, not {shown(reply)}")
        if reply == [None] * len(reply):
            raise NotFoundError(f"there is no accumulator {shown(keys.name)}: it was never created, or it was deleted")
        if isinstance(reply[0], bytes):
            # First, because another version may have other fields.
            check_format(keys.name, reply[0].decode(errors="backslashreplace"))
        # Its own fields are set only here.
        values = vars(self)
        values.update(_where=keys.record, name=keys.name)

        def read(name: str, value: Any, parse: Callable[..., Any], *more: object) -> Any:
            return parsed(keys.record, name, value, lambda text: parse(of_ascii(text), *more))

        for field, value in zip(FIELDS, reply, strict=True):
            values[field.name] = read(field.name, field.absent if value is None else value, field.parse)
        late, shape, is_tree = self.max_staleness, values["shape"], self.kind == "tree"
        given = read("total_weight", values["total_weight"], self._total)
        values.update(
            staleness=read("staleness", self.staleness, parse_staleness, self.num_accumulated, late),
            given_weight=given,
            total_weight=float(self.num_accumulated) if given is None else given,
            quorum=Quorum.parse(values),
            shape=None if is_tree else read("shape", shape, parse_shape),
            num_leaves=read("shape", shape, parse_leaves) if is_tree else None,
        )

    def _total(self, text: str) -> float | None:
        if text == "none":
            return None
        if not self.num_accumulated:
            raise ValueError(text)
        return parse_weight(text)

    @staticmethod
    def command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads the record."""
        return ("HMGET", keys.record, *[field.name for field in FIELDS])

    def spec(self, tree: object = b"") -> AccumulatorSpec:
        """Returns the specification that the accumulator was created with.

        Args:
            tree: the server's reply to ``tree_command()``. Only the accumulator of a tree needs it.

        Raises:
            CorruptDataError: the schema is unknown to redisacc.
        """
        return replace(self._plain_spec(tree), normalize=self.normalize, order=self.order)

    def _plain_spec(self, tree: object) -> AccumulatorSpec:
        mean: Any = {"reduction_type": self.reduction_type, "sparse_mean": self.sparse_mean, "chunk": self.chunk}
        if self.kind != "tree":
            if self.dtype not in TABLE:
                raise foreign(self._where, "dtype", self.dtype)
            return AccumulatorSpec.of_array(self.kind, TABLE[self.dtype], self.shape, **mean)
        try:
            if not isinstance(tree, bytes):
                raise ValueError("the structure of the tree is missing")
            return AccumulatorSpec.parse(tree.decode(), missing=self.missing, **mean)
        except ValueError as error:
            raise foreign(self._where, "tree", tree, error) from None

    @staticmethod
    def tree_command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads the structure of a tree. It may be long, so only those who need it ask."""
        return ("HGET", keys.record, "tree")

    @staticmethod
    def wanted_command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads how many gradients the latest take that waited requires."""
        return ("HGET", keys.record, "wanted")

    @staticmethod
    def parse_wanted(reply: object) -> int:
        """Parses the reply to ``wanted_command``; 0 if no take has waited, or redisacc did not write it."""
        return int(reply) if isinstance(reply, bytes) and reply.isdigit() and len(reply) <= 15 else 0

    @property
    def state(self) -> tuple[object, ...]:
        """Values that change, at least one of them, whenever the aggregate changes."""
        return (self.incarnation, self.global_step, self.num_accumulated, self.applied, self.takes)
