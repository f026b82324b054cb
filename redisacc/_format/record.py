"""The record: the plain-text hash that describes an accumulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from redisacc._data.dtypes import TABLE
from redisacc._data.spec import AccumulatorSpec, ArraySpec, Normalize, Order, SparseMean
from redisacc._data.tree.spec import TreeSpec
from redisacc._data.validation import Shape
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import Keys
from redisacc._format.partitions import parse_partitions
from redisacc._format.quorum import QUORUM_FIELDS, Quorum
from redisacc._format.shapes import LONGEST_SHAPE, parse_leaves, parse_shape, round_shape_of
from redisacc._format.staleness import MOST_STALENESS, parse_staleness
from redisacc._format.weights import parse_rule, parse_weight
from redisacc._text import printable, shown
from redisacc.errors import CorruptDataError, NotFoundError

Word = TypeVar("Word", bound=str)

# The version of the data model, in every record.
FORMAT = "4"


@dataclass(frozen=True)
class Field:
    """A field of the record.

    Attributes:
        name: its name.
        parse: returns the value of its text, and raises ValueError if redisacc writes no such text.
        absent: the text that it stands for if a record lacks it; None: every record has it.
    """

    name: str
    parse: Callable[[str], Any]
    absent: str | None = None


def _text(text: str) -> str:
    if len(text) > LONGEST_SHAPE or not text.isascii():
        raise ValueError(text)
    return text


def _number(text: str) -> int:
    if not (text.isdigit() and text.isascii() and len(text) <= 15):
        raise ValueError(text)
    return int(text)


def _step(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isdigit() and digits.isascii() and len(digits) <= 19 and -(2**63) <= int(text) < 2**63):
        raise ValueError(text)
    return int(text)


def _late(text: str) -> int:
    steps = _number(text)
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


parse_order: Callable[[str], Order] = _one_of("arrival", "worker")
parse_normalize: Callable[[str], Normalize] = _one_of("weights", "count")


# All fields but those that only a few read: docs/reference/keys.md has a row for each. What depends on several of them
# is parsed by ``Record``.
FIELDS = (
    *[Field(name, _text) for name in ("format", "kind", "dtype", "shape", "reduction_type", "sparse_mean", "missing")],
    *[Field(name, _text) for name in ("incarnation", "round_shape")],
    Field("global_step", _step),
    *[Field(name, _number) for name in ("num_accumulated", "applied", "stale", "repeated", "duplicates", "takes")],
    *[Field(name, _number) for name in ("created_ms", "buffered_bytes", "buffer_limit", "chunk")],
    Field("once_per_worker", lambda text: _number(text) != 0),
    Field("max_staleness", _late, "0"),
    Field("staleness", str, ""),
    Field("staleness_weight", str, CONSTANT),
    Field("normalize", parse_normalize, "weights"),
    Field("order", parse_order, "arrival"),
    # No script writes "none": the weights of all gradients are 1.
    Field("total_weight", str, "none"),
    Field("partitions", parse_partitions, ""),
    *[Field(name, lambda text: text and str(_number(text)), "") for name in QUORUM_FIELDS],
)
# What the absence of a field means.
ABSENT = {field.name: field.absent.encode() for field in FIELDS if field.absent is not None}


def check_format(name: str, found: str) -> None:
    """Raises CorruptDataError unless a record has the version of the data model that this library reads."""
    if found != FORMAT:
        raise CorruptDataError(
            f"accumulator {shown(name)} has format {shown(found)} of the data model, but this version of redisacc "
            f"reads format {FORMAT!r}: finish its training with the version that created it, or delete its keys"
        )


class Record:
    """The record of an accumulator, parsed and checked. docs/reference/keys.md describes the fields.

    Args:
        keys: the keys of the accumulator.
        reply: the server's reply to ``command()``.

    Attributes:
        global_step: the current step.
        kind: "dense", "sparse" or "tree", not yet checked.
        dtype: name of the element type, not yet checked. For a tree, all names with commas between them.
        shape_text: the declared shape, or how many leaves a tree has, not yet checked.
        shape: the declared shape. None for a tree.
        num_leaves: how many leaves a tree has; None for another kind.
        reduction_type: "MEAN" or "SUM", not yet checked.
        sparse_mean: "index" or "round", not yet checked.
        missing: "zero" or "skip", not yet checked.
        incarnation: random id given at creation.
        round_shape: the shape that binds the current round; None while it is empty.
        num_accumulated: gradients in the current round.
        applied: gradients accepted since creation.
        stale: gradients dropped because their step had passed.
        repeated: gradients dropped because the round had one of their worker.
        duplicates: requests that were recognised as repeated.
        takes: rounds granted.
        created_ms: when the accumulator was created, in milliseconds of the server's clock.
        buffered_bytes: the size of the buffered gradients of the current round.
        buffer_limit: the largest size that they may have.
        chunk: the number of elements of a dense gradient in one field of the ``sums`` hash.
        once_per_worker: whether a round accepts one gradient of each worker only.
        max_staleness: by how many steps a gradient may be late.
        staleness: how stale the gradients of the current round were: staleness → number of gradients.
        staleness_weight: how staleness changes weights: "constant", "inverse_sqrt", or a factor for each staleness.
        normalize: the divisor of means: "weights" or "count".
        order: the order in which the gradients of a round are added: "arrival" or "worker".
        total_weight: the sum of the weights of the gradients of the current round.
        given_weight: the sum of the weights of the gradients of the current round; None if all are 1.
        partitions: the numbers of the slots that hold the parts of gradients; empty if that is the slot of the record.
        quorum: what a take waits for that passes no ``num_required``.

    Raises:
        NotFoundError: there is no record.
        CorruptDataError: redisacc did not write the record.
    """

    global_step: int
    kind: str
    shape: Shape
    num_leaves: int | None
    round_shape: tuple[int, ...] | None
    staleness: dict[int, int]
    staleness_weight: str | tuple[float, ...]
    total_weight: float
    quorum: Quorum
    dtype: str
    reduction_type: str
    sparse_mean: str
    missing: str
    incarnation: str
    num_accumulated: int
    applied: int
    stale: int
    repeated: int
    duplicates: int
    takes: int
    created_ms: int
    buffered_bytes: int
    buffer_limit: int
    chunk: int
    once_per_worker: bool
    max_staleness: int
    normalize: Normalize
    order: Order
    partitions: tuple[int, ...]

    def __init__(self, keys: Keys, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) != len(FIELDS):
            raise CorruptDataError(f"{keys.record}: HMGET must reply {len(FIELDS)} values, not {shown(reply)}")
        if reply == [None] * len(reply):
            raise NotFoundError(f"there is no accumulator {shown(keys.name)}: it was never created, or it was deleted")
        if isinstance(reply[0], bytes):
            # First, because another version may have other fields.
            check_format(keys.name, reply[0].decode(errors="backslashreplace"))
        self._where = keys.record
        values: dict[str, Any] = {}
        for field, value in zip(FIELDS, reply, strict=True):
            text = field.absent if value is None else value
            values[field.name] = self._parsed(field.name, text, field.parse)
        vars(self).update(values)
        late = self.max_staleness
        self.staleness = self._parsed("staleness", values["staleness"], parse_staleness, self.num_accumulated, late)
        self.staleness_weight = self._parsed("staleness_weight", values["staleness_weight"], parse_rule, late)
        self.given_weight = self._parsed("total_weight", values["total_weight"], self._total)
        self.quorum = Quorum.parse(values)
        self.shape_text, is_tree = values["shape"], self.kind == "tree"
        self.shape = None if is_tree else parse_shape(keys, self.shape_text)
        self.num_leaves = parse_leaves(keys, self.shape_text) if is_tree else None
        self.round_shape = round_shape_of(keys, values["round_shape"])
        self.total_weight = float(self.num_accumulated) if self.given_weight is None else self.given_weight

    def _parsed(self, name: str, text: object, parse: Callable[..., Any], *more: object) -> Any:
        """Returns what a parser makes of a field. Its error becomes one that names the field."""
        try:
            return parse(text.decode("ascii") if isinstance(text, bytes) else text, *more)
        except (ValueError, AttributeError, TypeError):
            raise self._foreign(name, text) from None

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
        if self.reduction_type not in ("MEAN", "SUM"):
            raise self._foreign("reduction_type", self.reduction_type)
        if self.sparse_mean not in ("index", "round"):
            raise self._foreign("sparse_mean", self.sparse_mean)
        if self.missing not in ("zero", "skip"):
            raise self._foreign("missing", self.missing)
        if self.chunk < 1:
            raise self._foreign("chunk", str(self.chunk))
        return replace(self._plain_spec(tree), normalize=self.normalize, order=self.order)

    def _plain_spec(self, tree: object) -> AccumulatorSpec:
        sparse_mean: SparseMean = "round" if self.sparse_mean == "round" else "index"
        if self.kind == "tree":
            return self._tree_spec(tree, sparse_mean)
        if self.dtype not in TABLE:
            raise self._foreign("dtype", self.dtype)
        if self.kind not in ("dense", "sparse"):
            raise self._foreign("kind", self.kind)
        return ArraySpec.of(
            "sparse" if self.kind == "sparse" else "dense",
            TABLE[self.dtype],
            self.shape,
            reduction_type=self.reduction_type,
            sparse_mean=sparse_mean,
            chunk=self.chunk,
        )

    def _tree_spec(self, tree: object, sparse_mean: SparseMean) -> TreeSpec:
        try:
            if not isinstance(tree, bytes):
                raise ValueError("the structure of the tree is missing")
            return TreeSpec.parse(
                tree.decode(),
                reduction_type=self.reduction_type,
                sparse_mean=sparse_mean,
                missing="skip" if self.missing == "skip" else "zero",
                chunk=self.chunk,
            )
        except ValueError as error:
            raise CorruptDataError(
                f"{self._where}: tree holds what redisacc did not write: {printable(str(error), 300)}"
            ) from None

    @staticmethod
    def tree_command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads the structure of a tree. It may be long, so only those who need it ask."""
        return ("HGET", keys.record, "tree")

    @staticmethod
    def partitions_command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads the partitions, for those who need nothing else of the record."""
        return ("HGET", keys.record, "partitions")

    @staticmethod
    def wanted_command(keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads how many gradients the latest take that waited requires."""
        return ("HGET", keys.record, "wanted")

    @staticmethod
    def parse_wanted(reply: object) -> int:
        """Parses the reply to ``wanted_command``; 0 if no take has waited, or redisacc did not write it."""
        return int(reply) if isinstance(reply, bytes) and reply.isdigit() and len(reply) <= 15 else 0

    def _foreign(self, name: str, text: object) -> CorruptDataError:
        return CorruptDataError(f"{self._where}: {name} holds {shown(text)}, which redisacc did not write")

    @property
    def state(self) -> tuple[object, ...]:
        """Values that change, at least one of them, whenever the aggregate changes."""
        return (self.incarnation, self.global_step, self.num_accumulated, self.applied, self.takes)
