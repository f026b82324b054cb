"""The record: the plain-text hash that describes an accumulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redisacc._data.dtypes import TABLE
from redisacc._data.spec import AccumulatorSpec, ArraySpec, Normalize, Order, SparseMean
from redisacc._data.tree.spec import TreeSpec
from redisacc._data.weights import CONSTANT
from redisacc._format.keys import Keys
from redisacc._format.partitions import parse_partitions
from redisacc._format.quorum import QUORUM_FIELDS, Quorum
from redisacc._format.shapes import LONGEST_SHAPE, parse_leaves, parse_shape, round_shape_of
from redisacc._format.staleness import MOST_STALENESS, parse_staleness
from redisacc._format.weights import parse_rule, parse_weight
from redisacc._text import printable, shown
from redisacc.errors import CorruptDataError, NotFoundError

_TEXTS = ("kind", "dtype", "shape", "reduction_type", "sparse_mean", "missing", "incarnation", "round_shape")
_NUMBERS = (
    "num_accumulated",
    "applied",
    "stale",
    "repeated",
    "duplicates",
    "takes",
    "created_ms",
    "buffered_bytes",
    "buffer_limit",
    "chunk",
    "once_per_worker",
    "max_staleness",
)
# Fields that a record has only if the accumulator uses them, and what their absence means.
_ABSENT = {
    "max_staleness": b"0",
    "staleness": b"",
    "staleness_weight": CONSTANT.encode(),
    "normalize": b"weights",
    "order": b"arrival",
    "total_weight": b"",
    "partitions": b"",
    **dict.fromkeys(QUORUM_FIELDS, b""),
}


# The version of the data model, in every record.
FORMAT = "4"


def parse_order(text: str) -> Order:
    """Parses the field ``order``.

    Raises:
        ValueError: redisacc did not write it.
    """
    if text not in ("arrival", "worker"):
        raise ValueError(text)
    return "worker" if text == "worker" else "arrival"


def parse_normalize(text: str) -> Normalize:
    """Parses the field ``normalize``.

    Raises:
        ValueError: redisacc did not write it.
    """
    if text not in ("weights", "count"):
        raise ValueError(text)
    return "count" if text == "count" else "weights"


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
        normalize: the divisor of means: "weights" or "count", not yet checked.
        order: the order in which the gradients of a round are added: "arrival" or "worker".
        given_weight: the sum of the weights of the gradients of the current round; None if all are 1.
        partitions: the numbers of the slots that hold the parts of gradients; empty if that is the slot of the record.
        quorum: what a take waits for that passes no ``num_required``.

    Raises:
        NotFoundError: there is no record.
        CorruptDataError: redisacc did not write the record.
    """

    FIELDS = (
        *("format", "global_step", *_TEXTS, *_NUMBERS, "staleness", "partitions", *QUORUM_FIELDS),
        *("staleness_weight", "normalize", "order", "total_weight"),
    )

    def __init__(self, keys: Keys, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) != len(self.FIELDS):
            raise CorruptDataError(f"{keys.record}: HMGET must reply {len(self.FIELDS)} values, not {shown(reply)}")
        if reply == [None] * len(reply):
            raise NotFoundError(f"there is no accumulator {shown(keys.name)}: it was never created, or it was deleted")
        fields: dict[str, Any] = {
            name: _ABSENT.get(name) if value is None else value for name, value in zip(self.FIELDS, reply, strict=True)
        }
        if isinstance(fields["format"], bytes):
            # First, because another version may have other fields.
            check_format(keys.name, fields["format"].decode(errors="backslashreplace"))
        for name, value in fields.items():
            if not isinstance(value, bytes) or not _right(name, value):
                raise CorruptDataError(f"{keys.record}: {name} holds {shown(value)}, which redisacc did not write")
        self._where = keys.record
        texts = {name: value.decode() for name, value in fields.items()}
        self.global_step = int(texts["global_step"])
        self.kind, self.dtype, self.shape_text, self.reduction_type, self.sparse_mean, self.missing = (
            texts[name] for name in _TEXTS[:6]
        )
        self.incarnation, round_shape = texts["incarnation"], texts["round_shape"]
        self.num_accumulated, self.applied, self.stale, self.repeated, self.duplicates, self.takes = (
            int(texts[f]) for f in _NUMBERS[:6]
        )
        self.created_ms, self.buffered_bytes, self.buffer_limit, self.chunk = (int(texts[f]) for f in _NUMBERS[6:10])
        self.once_per_worker = texts["once_per_worker"] != "0"
        self.max_staleness = int(texts["max_staleness"])
        if self.max_staleness > MOST_STALENESS:
            raise self._foreign("max_staleness", texts["max_staleness"])
        try:
            self.staleness = parse_staleness(texts["staleness"], self.num_accumulated, self.max_staleness)
        except ValueError:
            raise self._foreign("staleness", texts["staleness"]) from None
        self.normalize = texts["normalize"]
        try:
            self.order = parse_order(texts["order"])
        except ValueError:
            raise self._foreign("order", texts["order"]) from None
        try:
            self.staleness_weight = parse_rule(texts["staleness_weight"], self.max_staleness)
        except ValueError:
            raise self._foreign("staleness_weight", texts["staleness_weight"]) from None
        self.given_weight = self._parse_total(None if reply[-1] is None else texts["total_weight"])
        try:
            self.partitions = parse_partitions(texts["partitions"])
        except ValueError:
            raise self._foreign("partitions", texts["partitions"]) from None
        self.quorum = Quorum.parse(texts)
        is_tree = self.kind == "tree"
        self.shape = None if is_tree else parse_shape(keys, self.shape_text)
        self.num_leaves = parse_leaves(keys, self.shape_text) if is_tree else None
        self.round_shape = round_shape_of(keys, round_shape)

    def _parse_total(self, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            total = parse_weight(text)
        except ValueError:
            raise self._foreign("total_weight", text) from None
        if not self.num_accumulated:
            raise self._foreign("total_weight", text)
        return total

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the gradients of the current round."""
        return float(self.num_accumulated) if self.given_weight is None else self.given_weight

    @classmethod
    def command(cls, keys: Keys) -> tuple[str, ...]:
        """Returns the command that reads the record."""
        return ("HMGET", keys.record, *cls.FIELDS)

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
        try:
            normalize = parse_normalize(self.normalize)
        except ValueError:
            raise self._foreign("normalize", self.normalize) from None
        return replace(self._plain_spec(tree), normalize=normalize, order=self.order)

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

    def _foreign(self, name: str, text: str) -> CorruptDataError:
        return CorruptDataError(f"{self._where}: {name} holds {shown(text)}, which redisacc did not write")

    @property
    def state(self) -> tuple[object, ...]:
        """Values that change, at least one of them, whenever the aggregate changes."""
        return (self.incarnation, self.global_step, self.num_accumulated, self.applied, self.takes)


def _right(name: str, value: bytes) -> bool:
    if name == "global_step":
        digits = value.removeprefix(b"-")
        return digits.isdigit() and len(digits) <= 19 and -(2**63) <= int(value) < 2**63
    if name in _NUMBERS:
        return value.isdigit() and len(value) <= 15
    if name in QUORUM_FIELDS:
        return not value or (value.isdigit() and len(value) <= 15)
    if name in ("staleness", "staleness_weight", "partitions"):
        return value.isascii()
    return len(value) <= LONGEST_SHAPE and value.isascii()
