"""The order of an update: everything that decides the bytes of the version that an optimizer makes of a round.

The id of the version is a digest of its order. So whoever computes a part, once or twice, early or late, writes the
same bytes under the same name, and a part that was computed for another order is never taken for it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from redisacc._format.buffered import DIGEST
from redisacc._text import shown
from redisacc.optim import Optimizer
from redisacc.optim.base import Scalars

_VERSION = re.compile(r"[0-9a-f]{1,64}(?:-[0-9]{1,15})?")
_COUNT = re.compile(r"[1-9][0-9]{0,14}")
# The longest text of a number, with what separates it from the next.
_LONGEST_NUMBER = 25

_UPDATED = re.compile(r"([0-9a-f]{1,64}-[0-9]{1,15}) ([0-9]{1,6})")

# What the events of parameters begin with that tell updaters of an order, and that ask them for a version.
_EVENT = "order "
_WANTED = "wanted "

# The longest order, in characters: numbers for as many groups as there may be patterns.
LONGEST = 2**20


@dataclass(frozen=True)
class Order:
    """The order of an update.

    Attributes:
        previous: the id of the version that it begins with.
        optimizer: a digest of the optimizer's name and options.
        digest: the digest of the gradients of the round, in their order.
        divisor: what the mean divides their sum by: an int, or a sum of weights as a float. 0: every worker has skipped
            the step, so weights and state stay as they are.
        clip: what the mean is multiplied by.
        scalars: the numbers of the step, for each group of leaves.
    """

    previous: str
    optimizer: str
    digest: str
    divisor: float
    clip: float
    scalars: tuple[Scalars, ...]

    @property
    def text(self) -> str:
        """Returns the order as text, for ``parse``."""
        numbers = f"{self.divisor} {self.clip} {pack_scalars(self.scalars)}"
        return f"{self.previous} {self.optimizer} {self.digest} {numbers}"

    def version(self, number: int) -> str:
        """Returns the id of the version that it makes, given the number of the attempt."""
        return f"{hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()}-{number}"

    def event(self, number: int) -> str:
        """Returns the message that tells updaters of it, given the number of the attempt."""
        return f"{_EVENT}{number} {self.text}"


def parse_order(event: str, optimizer: Optimizer) -> tuple[Order, int] | None:
    """Returns the order in an event of parameters, and the number of the attempt; None if it tells of none.

    Args:
        event: the event. Any client may have sent it.
        optimizer: the optimizer of the run.

    Raises:
        ValueError: redisacc did not write this text for such an optimizer.
    """
    if not event.startswith(_EVENT):
        return None
    texts = event.removeprefix(_EVENT).split(" ") if len(event) <= LONGEST else []
    match texts:
        case [number, previous, digest_of_optimizer, digest, divisor, clip, scalars] if (
            _COUNT.fullmatch(number)
            and _VERSION.fullmatch(previous)
            and DIGEST.fullmatch(digest_of_optimizer)
            and DIGEST.fullmatch(digest)
        ):
            is_count = divisor == "0" or _COUNT.fullmatch(divisor)
            by: float = int(divisor) if is_count else _number(divisor)
            scale = math.nan if clip == "nan" else _number(clip)
            if (by > 0 or is_count) and not (scale < 0 or scale > 1):
                numbers = unpack_scalars(scalars, optimizer)
                return Order(previous, digest_of_optimizer, digest, by, scale, numbers), int(number)
    raise ValueError(f"an order is not {shown(event)}")


def wanted(version: str) -> str:
    """Returns the event that asks updaters to write the parts of a version again, which the server has lost."""
    return _WANTED + version


def parse_wanted(event: str) -> str | None:
    """Returns the id of the version that an event asks for; None if it asks for none."""
    version = event.removeprefix(_WANTED)
    return version if version != event and _VERSION.fullmatch(version) else None


def updated(version: str, number: int) -> str:
    """Returns the message by which an updater tells that it has written a part of a version."""
    return f"{version} {number}"


def parse_updated(text: str) -> tuple[str, int] | None:
    """Returns the id of the version and the number of the part; None if redisacc sends no such message."""
    found = _UPDATED.fullmatch(text)
    return None if found is None else (found[1], int(found[2]))


# The numbers of a step as Python writes them, which keeps all of their bits.


def pack_scalars(every: Sequence[Scalars]) -> str:
    """Returns the numbers of each group as text: ``Optimizer.scalars`` makes sure that they are finite."""
    return ";".join(",".join(map(str, scalars)) for scalars in every)


def unpack_scalars(text: str, optimizer: Optimizer) -> tuple[Scalars, ...]:
    """Returns the numbers of each group from text.

    Args:
        text: what ``pack_scalars`` returned.
        optimizer: what they belong to, which determines how many there are.

    Raises:
        ValueError: redisacc did not write this text for such an optimizer.
    """
    groups, width = optimizer.num_groups, optimizer.scalars_per_group
    if len(text) > groups * width * _LONGEST_NUMBER:
        raise ValueError(f"the numbers of a step must be {groups * width} numbers, not {len(text)} characters")
    every = tuple(tuple(map(_number, group.split(","))) for group in text.split(";"))
    if len(every) != groups or any(len(scalars) != width for scalars in every):
        raise ValueError(
            f"the numbers of a step must be {width} for each of {groups} groups of {optimizer.name}, unlike "
            f"{shown(text)}"
        )
    return every


def _number(text: str) -> float:
    """Returns the finite number that a text holds as Python writes it."""
    with suppress(ValueError):
        value = float(text[:_LONGEST_NUMBER])
        if math.isfinite(value) and repr(value) == text:
            return value
    raise ValueError(f"a number must be finite, and as Python writes it, not {shown(text)}")
