"""Lists accumulators. Keys and names are scanned in small pieces, so that the server never holds up other clients."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from redisacc._format.keys import NAMES
from redisacc._text import is_unicode, shown
from redisacc._wire import scans
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError


def _check(pattern: str) -> None:
    if not is_unicode(pattern):
        raise InvalidArgumentError(f"a pattern must be valid Unicode, not {shown(pattern)}")


def scan_keys(transport: Transport, match: str) -> Iterator[str]:
    """Yields all keys that match a pattern, each once. Keys that are not text cannot be ours and are left out."""
    _check(match)
    yield from _texts(scans.scan_keys(transport, match))


def _texts(found: Iterable[bytes]) -> Iterator[str]:
    for each in found:
        with contextlib.suppress(UnicodeDecodeError):
            yield each.decode()


def escape_glob(text: str) -> str:
    """Returns a pattern that matches exactly this text."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)


def listed(transport: Transport, pattern: str = "*") -> list[bytes]:
    """Returns everything in the set of names that matches a pattern, as it is there."""
    _check(pattern)
    return scans.scan_members(transport, NAMES, match=pattern)


def list_names(transport: Transport, pattern: str = "*") -> list[str]:
    """Returns the names of accumulators, sorted. A listed name that is not UTF-8 belongs to none, and is left out."""
    return sorted(_texts(listed(transport, pattern)))
