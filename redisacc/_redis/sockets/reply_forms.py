"""The form that the reply to each command has: a text, a number, a list.

A peer may send other forms. Callers rely on these forms, so a reply of another form is refused here, where all replies
pass. Otherwise, it would cause an index out of range or a missing attribute elsewhere. The values themselves are not
trusted either: the reader of a number or a text still checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._text import shown
from redisacc.errors import CorruptDataError

# The types of a text: a fake server, and a client that decodes, return strings.
_TEXT = frozenset((bytes, str))
_TEXT_OR_NIL: frozenset[type] = frozenset((bytes, str, type(None)))
_SCORE = frozenset((bytes, str, int, float))
# The most digits of a number that a server sends as a text.
_DIGITS = 20
# A later time has no date: the year 6325, in seconds.
_LATEST = 2**37


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of every reply to a command.

    Attributes:
        text: a description for people.
        fits: returns whether a reply to a command has this form.
    """

    text: str
    fits: Callable[[Any, Sequence[Any]], bool]


def _is_list_of(types: frozenset[type], reply: Any) -> bool:
    return type(reply) is list and types.issuperset(map(type, reply))


def _is_digits(text: Any) -> bool:
    return type(text) in _TEXT and len(text) <= _DIGITS and text.isdigit() and text.isascii()


def _is_cursor(reply: Any) -> bool:
    return type(reply) is int or _is_digits(reply)


def _is_piece(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and _is_cursor(reply[0]) and _is_list_of(_TEXT, reply[1])


def _is_time(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and all(map(_is_digits, reply)) and int(reply[0]) < _LATEST


def _is_ranked(reply: Any) -> bool:
    # With protocol 3, members that come with their scores are pairs.
    pairs = type(reply) is list and all(
        type(item) is list and len(item) == 2 and type(item[0]) in _TEXT and type(item[1]) in _SCORE for item in reply
    )
    return pairs or _is_list_of(_TEXT, reply)


def _is_setting(reply: Any) -> bool:
    # A dict with protocol 3. The list is empty where the server does not know the setting.
    flat = [text for pair in reply.items() for text in pair] if type(reply) is dict else reply
    return _is_list_of(_TEXT, flat) and len(flat) % 2 == 0


_A_TEXT = _Form("a text", lambda reply, _: type(reply) in _TEXT)
_A_TEXT_OR_NIL = _Form("a text or nil", lambda reply, _: type(reply) in _TEXT_OR_NIL)
_A_NUMBER = _Form("a number", lambda reply, _: type(reply) is int)
_A_COUNT = _Form("a number, 0 or more", lambda reply, _: type(reply) is int and reply >= 0)
_A_COUNT_OR_NIL = _Form("a number or nil", lambda reply, _: reply is None or (type(reply) is int and reply >= 0))
_TEXTS = _Form("a list of texts", lambda reply, _: _is_list_of(_TEXT, reply))
_FIELDS = _Form(
    "a list with a text or nil for each field",
    lambda reply, command: _is_list_of(_TEXT_OR_NIL, reply) and len(reply) == len(command) - 2,
)
_A_PIECE = _Form("a cursor and a list of texts", lambda reply, _: _is_piece(reply))
_PAIRS = _Form("a cursor and a list of fields and values", lambda reply, _: _is_piece(reply) and len(reply[1]) % 2 == 0)
_A_TIME = _Form("a time in seconds and microseconds", lambda reply, _: _is_time(reply))
_RANKED = _Form("a list of texts", lambda reply, _: _is_ranked(reply))
_A_SETTING = _Form("names and values", lambda reply, _: _is_setting(reply))

FORMS: Mapping[str, _Form] = {
    "ACL": _A_TEXT,
    "APPEND": _A_COUNT,
    "CONFIG": _A_SETTING,
    "EVAL": _TEXTS,
    "EXISTS": _A_COUNT,
    "GET": _A_TEXT_OR_NIL,
    "GETRANGE": _A_TEXT,
    "HGET": _A_TEXT_OR_NIL,
    "HLEN": _A_COUNT,
    "HMGET": _FIELDS,
    "HSCAN": _PAIRS,
    "INFO": _A_TEXT,
    "LRANGE": _TEXTS,
    "MEMORY": _A_COUNT_OR_NIL,
    "PERSIST": _A_COUNT,
    "PEXPIRE": _A_COUNT,
    "PING": _A_TEXT,
    "PTTL": _A_NUMBER,
    "PUBLISH": _A_COUNT,
    "SADD": _A_COUNT,
    "SCAN": _A_PIECE,
    "SCRIPT": _A_TEXT,
    "SET": _A_TEXT_OR_NIL,
    "SISMEMBER": _A_COUNT,
    "SPUBLISH": _A_COUNT,
    "SREM": _A_COUNT,
    "SSCAN": _A_PIECE,
    "STRLEN": _A_COUNT,
    "TIME": _A_TIME,
    "TYPE": _A_TEXT,
    "UNLINK": _A_COUNT,
    "WAIT": _A_COUNT,
    "ZCARD": _A_COUNT,
    "ZRANGE": _RANKED,
    "ZRANGEBYSCORE": _TEXTS,
}


def check_form(command: Sequence[Any], reply: Any, address: str) -> None:
    """Refuses a reply that the command cannot have.

    Args:
        command: the command. The forms of those that ``FORMS`` does not list are checked by who reads their replies.
        reply: its reply, which is no error.
        address: where it came from.

    Raises:
        CorruptDataError: the reply has another form.
    """
    form = FORMS.get(command[0])
    if form is not None and not form.fits(reply, command):
        raise CorruptDataError(f"{address} replied {shown(reply)} to {command[0]}, which is not {form.text}")
