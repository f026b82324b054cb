"""The options that all kinds of accumulators have, stated once: their names, types, defaults and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, cast

from redisacc._arrays import validation
from redisacc._arrays.encodings import Encoding, checked_encoding
from redisacc._arrays.spec import AccumulatorSpec, Kind, Missing, Normalize, Order, SparseMean
from redisacc._arrays.weights import StalenessWeight, checked_staleness_weight
from redisacc._format.keys import MOST_PARTITIONS
from redisacc._format.stored_text import MOST_STALENESS
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

Init = TypeVar("Init", bound=Callable[..., Any])
Group = TypeVar("Group", "Limits", "Mean")


@dataclass(frozen=True)
class Staleness:
    """Which late gradients an accumulator accepts, and their weights. The server decides, for all handles.

    A gradient is late by ``global_step - local_step`` steps, as of the step at which it arrives.

    Example:
        >>> import redisacc
        >>> late = redisacc.Staleness(2, weight="inverse_sqrt")
        >>> acc = redisacc.ConditionalAccumulator("float32", [], staleness=late)
        >>> acc.set_global_step(2)
        >>> acc.apply_grad(1.0, local_step=0).outcome
        'applied'

    Args:
        most: a gradient that is late by at most this many steps is accepted, from 0 to 1000. 0 is TensorFlow's rule.
        weight: the factor by which the weight of a late gradient is multiplied: "constant" (1), or "inverse_sqrt"
            (1 / sqrt(1 + staleness)). None means "constant", or as the accumulator was created.
    """

    most: int
    weight: StalenessWeight | None = None


@dataclass(frozen=True)
class Mean:
    """The divisor of means, for an accumulator with ``reduction_type="MEAN"``.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [], mean=redisacc.Mean(by="count"))
        >>> results = [acc.apply_grad(value, weight=0.5) for value in (2.0, 4.0)]
        >>> float(acc.take_grad(2))
        1.5

    Args:
        by: "weights" for the sum of the weights of gradients; "count" for their number, so that gradients of less
            weight move the result less. None means "weights", or as the accumulator was created.
        rows: the divisor of a sparse row: "index" for the gradients that held the index, as TensorFlow does; "round"
            for the same as a dense array, which data-parallel training needs. None means "round" in a tree, else
            "index".
        missing: the divisor of a leaf of a tree if some gradients of the round lack it: "zero" for all gradients, as if
            the leaf had been zero there; "skip" for those that have the leaf, and then a leaf that none of them has is
            None in the result. Sums are the same for both. None means "zero".
    """

    by: Normalize | None = None
    rows: SparseMean | None = None
    missing: Missing | None = None


@dataclass(frozen=True)
class Limits:
    """How gradients are stored until they are taken.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], limits=redisacc.Limits(in_place=0, buffer=2**20))
        >>> acc.apply_grad([1.0, 2.0]).num_accumulated, acc.info().buffered
        (1, 1)

    Args:
        in_place: gradients of more elements than this, where each row counts for 24 more, are buffered and added up by
            the taker instead of by the server. In a tree, each sparse leaf and each dtype of dense leaves counts for 72
            more, except for the first. 0 buffers all. None means 1,280, which was measured. It applies to the gradients
            of this handle.
        buffer: how many bytes the buffered gradients of a round may have together, given at creation and for all
            handles. Beyond it, clients compact; with ``order="worker"``, gradients are refused (AccumulatorFullError).
            None: 256 MiB, or no limit with ``order="worker"``, or as the accumulator was created.
        inline: buffered gradients of more bytes than this are stored in parts, under their own keys, which are written
            and read as they are. The others are stored together in a hash. Gradients of at least eight times as many
            bytes are announced, and takers read their parts while they arrive. 0: all are stored in parts. None means
            65,536, which was measured. It applies to the gradients of this handle.
    """

    in_place: int | None = None
    buffer: int | None = None
    inline: int | None = None


class AccumulatorOptions(TypedDict, total=False):
    """The options of an accumulator. ``ConditionalAccumulatorBase`` describes each of them."""

    redis: object
    worker: str | None
    encoding: Encoding | None
    finite: bool
    once_per_worker: bool | None
    order: Order | None
    mean: Mean | None
    staleness: Staleness | int | None
    limits: Limits | None
    partitions: int | Literal["auto"] | None
    min_replicas: int
    create: bool


# All others are None.
DEFAULTS: Mapping[str, object] = {"finite": False, "min_replicas": 0, "create": True}


def with_options(kind: type, defaults: Mapping[str, object] = DEFAULTS) -> Callable[[Init], Init]:
    """Lets help() and editors show each option of a function that takes them as ``**options``.

    Args:
        kind: the typed dict of the options.
        defaults: those that are not None.
    """

    def decorate(init: Init) -> Init:
        signature = inspect.signature(init)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in kind.__annotations__.items()}
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint)
            for name, hint in hints.items()
        ]
        init.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return init

    return decorate


def check_names(given: Mapping[str, object], kind: type, where: str) -> None:
    """Raises TypeError, as Python does, for an option that the typed dict ``kind`` lacks."""
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")


def checked_name(shared_name: object, *, create: bool) -> str | None:
    """Returns the argument ``shared_name`` of an accumulator; None instead of "".

    Raises:
        InvalidArgumentError: it is invalid, or there is none and ``create`` is False.
    """
    if shared_name is None or (isinstance(shared_name, str) and not shared_name):
        if not create:
            raise InvalidArgumentError("create=False requires a shared_name: a private accumulator is always a new one")
        return None
    return validation.text(shared_name, "shared_name", max_bytes=512)


def checked_options(given: AccumulatorOptions, spec: AccumulatorSpec, where: str) -> AccumulatorOptions:
    """Returns all options for an accumulator, valid, and as plain Python types.

    Raises:
        TypeError: there is no such option.
        InvalidArgumentError: an option is invalid, or does not fit the accumulator or the other options.
    """
    check_names(given, AccumulatorOptions, where)
    options: Any = {**dict.fromkeys(AccumulatorOptions.__annotations__), **DEFAULTS, **given}
    for name, check in _CHECKS.items():
        if options[name] is not None or name in DEFAULTS:
            options[name] = check(options[name], name)
    if options["encoding"] is not None:
        options["encoding"] = checked_encoding(options["encoding"], spec.dtypes)
    if options["order"] == "worker":
        if options["once_per_worker"] is False:
            raise InvalidArgumentError(
                "order='worker' cannot go together with once_per_worker=False: gradients of one worker would have no "
                "order"
            )
        options["once_per_worker"] = True
    options["mean"] = group_of(options["mean"], "mean", Mean)
    options["staleness"] = _staleness(options["staleness"], spec)
    limits = group_of(options["limits"], "limits", Limits)
    options["limits"] = Limits(*[_integer(limit, f"limits.{name}") for name, limit in vars(limits).items()])
    options["partitions"] = checked_partitions(options["partitions"])
    checked: AccumulatorOptions = options
    return checked


def one_of(value: object, what: str, *allowed: str) -> Any:
    """Returns an argument that is one of several words.

    Raises:
        InvalidArgumentError: it is none of them.
    """
    if isinstance(value, str) and value in allowed:
        return str(value)
    raise InvalidArgumentError(f"{what} must be {' or '.join(map(repr, allowed))}, not {shown(value)}")


def checked_mean(kind: Kind, reduction_type: object, value: object) -> dict[str, Any]:
    """Returns what an accumulator does with a sum, as arguments of ``AccumulatorSpec``.

    Args:
        kind: the class of the accumulator, which decides the defaults.
        reduction_type: what the caller has given.
        value: the argument ``mean``.

    Raises:
        InvalidArgumentError: one of them is invalid.
    """
    mean = group_of(value, "mean", Mean)
    for what, given, kinds, who in (
        ("rows", mean.rows, ("sparse", "tree"), "a sparse accumulator and a tree have rows"),
        ("missing", mean.missing, ("tree",), "a tree has leaves that may be missing"),
    ):
        if given is not None and kind not in kinds:
            raise InvalidArgumentError(f"mean.{what} must be None, not {shown(given)}: only {who}")
    if mean.by is not None:
        one_of(mean.by, "mean.by", "weights", "count")
    rows = ("round" if kind == "tree" else "index") if mean.rows is None else mean.rows
    return {
        "reduction_type": one_of("MEAN" if reduction_type is None else reduction_type, "reduction_type", "MEAN", "SUM"),
        "sparse_mean": one_of(rows, "mean.rows", "index", "round"),
        "missing": one_of("zero" if mean.missing is None else mean.missing, "mean.missing", "zero", "skip"),
    }


# What an option has to be, unless it is None.
_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("finite", "create", "once_per_worker"), validation.flag),
    "worker": partial(validation.text, max_bytes=200),
    "order": lambda value, name: one_of(value, name, "arrival", "worker"),
    "min_replicas": partial(validation.integer, low=0, high=1000),
}


def checked_partitions(value: object) -> int | Literal["auto"] | None:
    """Returns the argument ``partitions`` of a handle.

    Raises:
        InvalidArgumentError: it is invalid.
    """
    if value is None or (isinstance(value, str) and value == "auto"):
        return None if value is None else "auto"
    try:
        return validation.integer(value, "partitions", low=1, high=MOST_PARTITIONS)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f'partitions must be an integer from 1 to {MOST_PARTITIONS}, "auto" or None, not {shown(value)}'
        ) from None


def _staleness(value: object, spec: AccumulatorSpec) -> Staleness | None:
    if value is None:
        return None
    given = value if isinstance(value, Staleness) else Staleness(cast(int, value))
    most = validation.integer(given.most, "staleness", low=0, high=MOST_STALENESS)
    if given.weight is None:
        return Staleness(most)
    return Staleness(most, checked_staleness_weight(given.weight, most, can_weigh=spec.can_weigh))


def group_of(value: object, what: str, kind: type[Group]) -> Group:
    """Returns an argument that is a group of options: an empty one for None.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    raise InvalidArgumentError(f"{what} must be a redisacc.{kind.__name__} or None, not {shown(value)}")


def _integer(value: object, what: str) -> int | None:
    return None if value is None else validation.integer(value, what, low=0)
