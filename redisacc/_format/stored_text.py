"""Values that are stored as text, and how to read them.

Any client may have written there, so whatever redisacc does not write is an error that names the key and the field.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from redisacc._arrays.validation import INT64_MAX, MAX_RANK, Shape, shape_text
from redisacc._arrays.weights import LEAST_WEIGHT, MOST_WEIGHT
from redisacc._interrupts import interrupt_in
from redisacc._text import printable, shown
from redisacc.errors import CorruptDataError

Value = TypeVar("Value")


def foreign(where: str, name: str | bytes, value: object, why: object = "") -> CorruptDataError:
    """Returns the error for a value that redisacc did not write.

    Args:
        where: the key.
        name: the field.
        value: what it holds.
        why: what is wrong with it.
    """
    field = shown(name) if isinstance(name, bytes) else name
    more = f": {printable(str(why), 300)}" if why else ""
    return CorruptDataError(f"{where}: {field} holds {shown(value)}, which redisacc did not write{more}")


def parsed(where: str, name: str | bytes, value: Any, parse: Callable[..., Value], *more: Any) -> Value:
    """Returns what a parser makes of a value. What it raises becomes an error that names the key and the field.

    Args:
        where: the key.
        name: the field.
        value: what it holds.
        parse: gets the value, and raises ValueError if redisacc writes no such value.
        more: further arguments for ``parse``.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    try:
        return parse(value, *more)
    except (ValueError, AttributeError, TypeError, OverflowError, OSError) as error:
        if interrupt_in(error) is not None:
            raise
        raise foreign(where, name, value) from None


def matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    """Returns the match of a whole text; ValueError: it does not match."""
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match


def of_ascii(text: bytes | str) -> str:
    """Returns stored ASCII as text.

    Raises:
        ValueError: it is not ASCII.
    """
    return text.decode("ascii") if isinstance(text, bytes) else text


def parse_number(text: bytes | str, digits: int = 15) -> int:
    """Returns a number of at most ``digits`` digits, without a sign.

    Raises:
        ValueError: it is something else.
    """
    if not (text.isdigit() and text.isascii() and len(text) <= digits):
        raise ValueError(text)
    return int(text)


def parse_int64(text: bytes | str) -> int:
    """Returns an int64.

    Raises:
        ValueError: it is something else.
    """
    digits = of_ascii(text).removeprefix("-")
    if not (digits.isdigit() and digits.isascii() and len(digits) <= 19 and -(2**63) <= int(text) < 2**63):
        raise ValueError(text)
    return int(text)


def parse_time(text: bytes | str) -> datetime.datetime:
    """Returns the time of milliseconds of the server's clock.

    Raises:
        ValueError, OverflowError, OSError: it is none.
    """
    return time_of(parse_number(text))


def time_of(ms: int) -> datetime.datetime:
    """Converts milliseconds of the server's clock to a time in UTC."""
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def clock_ms(reply: Sequence[bytes]) -> int:
    """Converts the reply to TIME to milliseconds of the server's clock."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


# Shapes as they are written in Redis.

# The longest text of a shape that redisacc writes: brackets, and numbers of 19 digits with their commas.
LONGEST_SHAPE = 2 + MAX_RANK * 20

# The text that a tree has in place of a shape.
_LEAVES = re.compile(r"(1) leaf|([0-9]{1,6}) leaves")

_SHAPE = re.compile(r"\[(?:(?:-1|[0-9]{1,19})(?:,(?:-1|[0-9]{1,19}))*)?\]")


def parse_shape(text: str) -> Shape:
    """Returns a declared shape: None if the rank is unknown, with None for each unknown dimension.

    Raises:
        ValueError: redisacc writes no such text.
    """
    # The length is checked first: the text may be of any size, and so may the cache.
    if len(text) > LONGEST_SHAPE:
        raise ValueError("the text is longer than that of any shape")
    return None if text == "unknown" else _parsed(text)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[int | None, ...]:
    # A regular expression knows no nesting, unlike a parser of JSON, which a deep enough one exhausts.
    if _SHAPE.fullmatch(text) is None:
        raise ValueError("the text is not a list of dimensions")
    dims = [int(dim) for dim in text[1:-1].split(",") if dim]
    shape = tuple(None if dim == -1 else dim for dim in dims)
    if len(dims) > MAX_RANK or max(dims, default=0) > INT64_MAX or shape_text(shape) != text:
        raise ValueError("the text is not a shape as redisacc writes it")
    return shape


def parse_leaves(text: str) -> int:
    """Returns how many leaves a tree has, of a text such as "7 leaves".

    Raises:
        ValueError: redisacc writes no such text.
    """
    match = _LEAVES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1] or match[2])


def parse_round_shape(text: str) -> tuple[int, ...] | None:
    """Returns the shape that binds a round, or None for an empty round.

    Raises:
        ValueError: no round has such a shape.
    """
    if len(text) > LONGEST_SHAPE:
        raise ValueError("the text is longer than that of any shape")
    return _known_dims(text) if text else None


def round_shape_of(record: str, text: str) -> tuple[int, ...] | None:
    """Returns the same of a field of the record with this key; CorruptDataError: redisacc did not write it."""
    return parsed(record, "round_shape", text, parse_round_shape)


@lru_cache(maxsize=256)
def _known_dims(text: str) -> tuple[int, ...]:
    shape = _parsed(text)
    dims = tuple(dim for dim in shape if dim is not None)
    # numpy refuses shapes whose dimensions multiply beyond an int64, even if one of them is 0.
    if len(dims) < len(shape) or math.prod(dim or 1 for dim in dims) > INT64_MAX // 16:
        raise ValueError("an array cannot have this shape")
    # It also refuses more dimensions than it can count, and knows best how many those are.
    np.empty((0, *dims[1:]))
    return dims


# Weights and staleness of gradients as text. ``lua/include/parse_weight.lua`` has the bounds as well.

_WEIGHT = re.compile(r"[0-9][0-9.e+-]*")
_LONGEST = 24


# The largest max_staleness. A round's text has a pair for each staleness, and the scripts search it for every gradient.
MOST_STALENESS = 1000


def weight_text(weight: float) -> str:
    """Returns a weight as text, with the fewest digits that distinguish it from its neighbors."""
    return "1" if weight == 1 else repr(float(weight)).removesuffix(".0")


def parse_weight(text: str) -> float:
    """Returns the weight that a text holds.

    Raises:
        ValueError: it holds none.
    """
    if len(text) > _LONGEST or not _WEIGHT.fullmatch(text):
        raise ValueError(f"{text[:_LONGEST]!r} is not a weight")
    weight = float(text)
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"{text} is not in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}]")
    return weight


def parse_staleness(text: str, num_accumulated: int, max_staleness: int | None = None) -> dict[int, int]:
    """Returns staleness → number of gradients, sorted by staleness.

    Args:
        text: the text that a script wrote; "" if staleness is not counted, because all gradients have 0.
        num_accumulated: the number of gradients in the round.
        max_staleness: the largest staleness that the accumulator accepts; None means not known here.

    Raises:
        ValueError: no script writes this, or not for this many gradients.
    """
    if not text:
        if num_accumulated and max_staleness:
            raise ValueError("the staleness of the gradients is missing")
        return {0: num_accumulated} if num_accumulated else {}
    found: dict[int, int] = {}
    for pair in text.split(","):
        staleness, _, number = pair.partition(":")
        late = parse_number(staleness)
        if late in found or number == "0":
            raise ValueError(f"{pair!r} is no number of gradients of a staleness")
        found[late] = parse_number(number)
    most = MOST_STALENESS if max_staleness is None else max_staleness
    if max(found) > most or sum(found.values()) != num_accumulated:
        raise ValueError(f"{num_accumulated} gradients cannot have this staleness")
    return dict(sorted(found.items()))
