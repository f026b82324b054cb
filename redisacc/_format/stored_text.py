"""Values that are stored as text, and how to read them.

Any client may have written there, so whatever redisacc does not write is an error that names the key and the field.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
