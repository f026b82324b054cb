"""What a take waits for: a number of gradients, a sum of weights, and a grace in which more of them may arrive."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._data import validation
from redisacc._data.weights import checked_weight
from redisacc._format.entries import ANY_NUMBER
from redisacc._format.settings import LONGEST_GRACE, milliseconds
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True)
class Requirement:
    """What a take requires of a round.

    Attributes:
        num_required: the take is not granted while fewer gradients have arrived; at least 1.
        up_to: it is granted at once when this many have arrived; at least num_required.
        grace_ms: it is granted this long after the gradient with which it had enough, in milliseconds. If it is 0, or
            if up_to is num_required, the take has no grace.
        min_weight: it is not granted either while the sum of their weights is less; 0: any sum will do.
    """

    num_required: int
    up_to: int
    grace_ms: int = 0
    min_weight: float = 0.0

    @classmethod
    def of(
        cls, num_required: object, up_to: object = None, grace: object = None, min_weight: object = None
    ) -> Requirement | None:
        """Returns what a caller's arguments require; None: what the settings of the accumulator say.

        A weight alone is required of any number of gradients.

        Raises:
            InvalidArgumentError: an argument is invalid, or ``up_to`` is given without ``grace``, or one of the two
                without ``num_required`` and ``min_weight``.
        """
        weight = 0.0 if min_weight is None else checked_weight(min_weight, "min_weight")
        if num_required is None and not weight:
            for name, value in (("up_to", up_to), ("grace", grace)):
                if value is not None:
                    raise InvalidArgumentError(
                        f"{name}={shown(value)} needs num_required: a take either says all that it waits for, or "
                        "leaves all of it to the settings of the accumulator"
                    )
            return None
        number = 1 if num_required is None else validation.integer(num_required, "num_required", low=1)
        if grace is None:
            if up_to is not None:
                raise InvalidArgumentError(
                    f"up_to={shown(up_to)} needs a grace: how long to wait for more gradients than num_required"
                )
            return cls(number, number, min_weight=weight)
        seconds = validation.seconds(grace, "grace", high=LONGEST_GRACE)
        most = ANY_NUMBER if up_to is None else validation.integer(up_to, "up_to", low=number)
        return cls(number, max(number, min(most, ANY_NUMBER)), milliseconds(seconds), weight)

    def __str__(self) -> str:
        enough = (
            f"{self.num_required} with a weight of {self.min_weight:g}" if self.min_weight else str(self.num_required)
        )
        if not self.grace_ms or self.up_to == self.num_required:
            return enough
        most = "more" if self.up_to == ANY_NUMBER else str(self.up_to)
        return f"{enough}, or up to {most} within {self.grace_ms / 1000:g} s"
