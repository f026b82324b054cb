"""What a take waits for: a number of gradients, a grace in which more of them may arrive, and a sum of weights."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._data import validation
from redisacc._data.weights import checked_weight
from redisacc._format.entries import ANY_NUMBER
from redisacc._format.settings import LONGEST_GRACE, milliseconds
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True)
class TakeRequirement:
    """The gradients that a round needs before it is granted to a taker.

    Attributes:
        num_required: the take is not granted while fewer gradients have arrived; at least 1.
        up_to: it is granted at once when this many have arrived; at least num_required.
        grace_ms: it is granted this long after gradient num_required arrived, in milliseconds. If it is 0, or if up_to
            is num_required, the take has no grace.
    """

    num_required: int
    up_to: int
    grace_ms: int = 0

    @classmethod
    def of(cls, num_required: object, up_to: object = None, grace: object = None) -> TakeRequirement | None:
        """Returns the requirement in a caller's arguments; None: the settings of the accumulator apply.

        Raises:
            InvalidArgumentError: an argument is invalid, or ``up_to`` is given without ``grace``, or one of the two
                without ``num_required``.
        """
        if num_required is None:
            for name, value in (("up_to", up_to), ("grace", grace)):
                if value is not None:
                    raise InvalidArgumentError(
                        f"{name}={shown(value)} needs num_required: a take either says all that it waits for, or "
                        "leaves all of it to the settings of the accumulator"
                    )
            return None
        number = validation.integer(num_required, "num_required", low=1)
        if grace is None:
            if up_to is not None:
                raise InvalidArgumentError(
                    f"up_to={shown(up_to)} needs a grace: how long to wait for more gradients than num_required"
                )
            return cls(number, number)
        seconds = validation.seconds(grace, "grace", high=LONGEST_GRACE)
        most = ANY_NUMBER if up_to is None else validation.integer(up_to, "up_to", low=number)
        return cls(number, max(number, min(most, ANY_NUMBER)), milliseconds(seconds))

    def __str__(self) -> str:
        if not self.grace_ms or self.up_to == self.num_required:
            return str(self.num_required)
        most = "more" if self.up_to == ANY_NUMBER else str(self.up_to)
        return f"{self.num_required}, or up to {most} within {self.grace_ms / 1000:g} s"


@dataclass(frozen=True)
class TakeDemand:
    """The conditions that the caller of a take sets. A round must meet all of them.

    Attributes:
        required: the gradients that a round must have; None: the settings of the accumulator apply.
        min_weight: least sum of their weights; 0: any sum will do.
    """

    required: TakeRequirement | None
    min_weight: float = 0.0

    @classmethod
    def of(cls, num_required: object, up_to: object, grace: object, min_weight: object) -> TakeDemand:
        """Returns what a caller's arguments ask for.

        Raises:
            InvalidArgumentError: as ``TakeRequirement.of``, or ``min_weight`` is no weight.
        """
        weight = 0.0 if min_weight is None else checked_weight(min_weight, "min_weight")
        return cls(TakeRequirement.of(num_required, up_to, grace), weight)
