"""Weights of gradients: their bounds, and checks of what callers give."""

from __future__ import annotations

from typing import Literal

from redisacc._arrays import validation
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# The bounds of a weight, and of a sum of weights: those of the normal numbers of float32. So each of them is also a
# number in the type in which gradients are multiplied and divided by it.
LEAST_WEIGHT = 2.0**-126
MOST_WEIGHT = (2 - 2.0**-23) * 2.0**127

# The factor by which staleness changes the weight of a gradient: 1, or 1/sqrt(1 + staleness).
StalenessWeight = Literal["constant", "inverse_sqrt"]

CONSTANT: Literal["constant"] = "constant"
INVERSE_SQRT: Literal["inverse_sqrt"] = "inverse_sqrt"


def checked_weight(value: object, what: str = "weight", *, or_zero: bool = False) -> float:
    """Returns a weight as a float.

    Args:
        value: a real number, or an array of rank 0 that holds one, of any library. Booleans are refused.
        what: the argument's name in errors.
        or_zero: whether it may be 0.

    Raises:
        InvalidArgumentError: it is not a number in [LEAST_WEIGHT, MOST_WEIGHT].
    """
    if type(value) is float and LEAST_WEIGHT <= value <= MOST_WEIGHT:
        return value
    number = validation.real(value, what)
    if not (LEAST_WEIGHT <= number <= MOST_WEIGHT or (or_zero and number == 0)):
        kind = "0 or a number" if or_zero else "a number"
        raise InvalidArgumentError(
            f"{what} must be {kind} in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}], not {shown(value)}"
        )
    return number


def is_nothing(number: int, weight: float | None) -> bool:
    """Returns whether all gradients of a round are zeros of the smallest weight, by which workers skip a step.

    In the sum of any usual weights, the smallest one is lost in rounding, so the mean of the others keeps its bits.

    Args:
        number: how many gradients the round holds.
        weight: the sum of their weights; None if all are 1.
    """
    return weight is not None and weight <= number * LEAST_WEIGHT


def checked_staleness_weight(value: object, most: int, *, can_weigh: bool) -> StalenessWeight:
    """Returns the rule by which staleness changes weights.

    Args:
        value: what the caller has given.
        most: the largest staleness.
        can_weigh: whether gradients of the accumulator may have weights.

    Raises:
        InvalidArgumentError: it is not such a rule, or does not fit ``most``.
    """
    if isinstance(value, str) and value == CONSTANT:
        return CONSTANT
    if not (isinstance(value, str) and value == INVERSE_SQRT):
        raise InvalidArgumentError(f"staleness.weight must be 'constant' or 'inverse_sqrt', not {shown(value)}")
    if not most:
        raise InvalidArgumentError(
            f"staleness.weight={shown(value)} needs a staleness.most of at least 1 as well: without that, no gradient "
            "is late"
        )
    if not can_weigh:
        raise InvalidArgumentError(
            f"staleness.weight must be 'constant' for gradients of integers, not {shown(value)}: their weight is 1"
        )
    return INVERSE_SQRT
