"""What a take waits for: a number of gradients, a grace in which more of them may arrive, and a sum of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redisacc._data import validation
from redisacc._format.entries import ANY_NUMBER
from redisacc._format.quorum import Quorum, milliseconds
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True)
class TakeRequirement:
    """The gradients that a round needs before it is granted to a taker.

    Attributes:
        num_required: the take is not granted while fewer gradients have arrived; at least 1.
        most: it is granted at once when this many have arrived; at least num_required.
        grace_ms: it is granted this long after gradient num_required arrived, in milliseconds. If it is 0, or if most
            is num_required, the take has no grace.
    """

    num_required: int
    most: int
    grace_ms: int = 0

    @classmethod
    def of(cls, demand: Quorum) -> TakeRequirement | None:
        """Returns the requirement of a take; None: the quorum of the accumulator applies."""
        least = demand.least
        if least is None:
            return None
        if demand.grace is None:
            return cls(least, least)
        return cls(least, max(least, min(demand.most or ANY_NUMBER, ANY_NUMBER)), milliseconds(demand.grace))

    def __str__(self) -> str:
        if not self.grace_ms or self.most == self.num_required:
            return str(self.num_required)
        most = "more" if self.most == ANY_NUMBER else str(self.most)
        return f"{self.num_required}, or up to {most} within {self.grace_ms / 1000:g} s"


def demand_of(num_required: Any, most: Any, grace: Any, min_weight: Any) -> Quorum:
    """Returns what a caller's arguments ask for. Without ``least``, the quorum of the accumulator applies.

    Raises:
        InvalidArgumentError: an argument is invalid, or ``most`` is given without ``grace``, or one of the two without
            ``num_required``.
    """
    if num_required is not None:
        if type(num_required) is not int or not 1 <= num_required <= validation.INT64_MAX:
            num_required = validation.integer(num_required, "num_required", low=1)
    elif most is not None or grace is not None:
        raise InvalidArgumentError(
            f"{'grace' if most is None else 'most'}={shown(grace if most is None else most)} needs num_required: a "
            "take either says all that it waits for, or leaves all of it to the quorum of the accumulator"
        )
    return Quorum(num_required, most, grace, min_weight)
