"""The quorum: the gradients that a step, or a take without ``num_required``, waits for. It is in the record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType

from redisacc._arrays import validation
from redisacc._arrays.weights import checked_weight
from redisacc._format.entries import ANY_NUMBER
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# Fields of the record. It has each of them only while it is set.
QUORUM_FIELDS = ("quorum", "quorum_most", "quorum_grace_ms")
# The longest grace, in seconds: a week.
LONGEST_GRACE = 7 * 24 * 3600


@dataclass(frozen=True)
class Quorum:
    """The gradients for which a step of a run waits, or a take without ``num_required``.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2])
        >>> acc.set_quorum(least=3, grace=0.5)
        >>> acc.quorum()
        Quorum(least=3, most=None, grace=0.5, min_weight=None)

    Attributes:
        least: how many gradients are needed, at least 1. None means one of each worker in a run; in an accumulator, it
            is not set, so each take has to pass ``num_required``.
        most: with ``grace``, how many gradients end it, at least ``least``. None means one of each worker in a run; in
            an accumulator, nothing ends it early.
        grace: how long to wait for more gradients than ``least``, in seconds, from 0 to a week. None means no grace.
        min_weight: the minimum sum of the gradients' weights. None means any sum. It is for runs; an accumulator does
            not store it, because each take passes its own.

    Raises:
        InvalidArgumentError: a value is invalid, or ``most`` is given without ``grace``.
    """

    least: int | None = None
    most: int | None = None
    grace: float | None = None
    min_weight: float | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.grace is None:
            raise InvalidArgumentError(
                f"most={shown(self.most)} needs a grace: how long to wait for more gradients than are needed"
            )
        if self.least is not None and (type(self.least) is not int or not 1 <= self.least <= validation.INT64_MAX):
            self._set(least=validation.integer(self.least, "least", low=1))
        if self.most is not None:
            self._set(most=validation.integer(self.most, "most", low=self.least or 1))
        if self.grace is not None:
            self._set(grace=validation.seconds(self.grace, "grace", high=LONGEST_GRACE))
        if self.min_weight is not None:
            self._set(min_weight=checked_weight(self.min_weight, "min_weight"))

    def _set(self, **values: float | None) -> None:
        vars(self).update(values)

    def __str__(self) -> str:
        return " ".join(f"{name}={value:.15g}" for name, value in vars(self).items() if value is not None)

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Quorum:
        """Returns the quorum in the record, also if somebody has stored numbers by hand that do not go together.

        Args:
            texts: field of ``QUORUM_FIELDS`` → a number of at most 15 digits, or "" if the record lacks the field.
        """
        least, most, grace_ms = (texts[name] for name in QUORUM_FIELDS)
        found = cls()
        # A take cannot require 0 gradients. To the scripts, too, 0 means that the field is not set.
        found._set(least=int(least or 0) or None, most=int(most or 0) or None)
        found._set(grace=int(grace_ms) / 1000 if grace_ms else None)
        return found


def quorum_change(
    least: int | EllipsisType | None, most: int | EllipsisType | None, grace: float | EllipsisType | None
) -> dict[str, str]:
    """Returns a change of the quorum, as arguments of the script ``set_quorum``.

    Each argument here is a value, None to remove it, or ``...`` to keep it. Whether the numbers go together is up to
    the server, which knows those that stay.

    Raises:
        InvalidArgumentError: a value is one that no take accepts.
    """
    texts = (_text(least, "least"), _text(most, "most"), _text(grace, "grace"))
    return dict(zip(QUORUM_FIELDS, texts, strict=True))


def _text(value: object, name: str) -> str:
    if value is ...:
        return ""
    if value is None:
        return "none"
    if name == "grace":
        return str(milliseconds(validation.seconds(value, name, high=LONGEST_GRACE)))
    return str(validation.integer(value, name, low=1, high=ANY_NUMBER))


def milliseconds(grace: float) -> int:
    """Returns a grace in milliseconds, rounded up, so that one that is not 0 stays one."""
    return math.ceil(round(grace * 1000, 6))
