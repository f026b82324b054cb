"""The settings of an accumulator, for takes without ``num_required``. They are fields of the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType

from redisacc._data import validation
from redisacc._format.entries import ANY_NUMBER

# Fields of the record. It has each of them only while it is set.
SETTINGS = ("num_required", "up_to", "grace_ms")
# The longest grace, in seconds: a week.
LONGEST_GRACE = 7 * 24 * 3600


@dataclass(frozen=True)
class Settings:
    """The gradients that a take waits for if it is called without ``num_required``.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2])
        >>> acc.configure(num_required=3, grace=0.5)
        >>> acc.settings()
        Settings(num_required=3, up_to=None, grace=0.5)

    Attributes:
        num_required: how many gradients it requires; None: not set, so each take has to pass it.
        up_to: how many gradients end the grace; None: it lasts its whole time.
        grace: how long to wait for more gradients than required, in seconds; None: not at all.
    """

    num_required: int | None = None
    up_to: int | None = None
    grace: float | None = None

    def __str__(self) -> str:
        values = {"n": self.num_required, "up_to": self.up_to, "grace": self.grace}
        return " ".join(f"{name}={value:.15g}" for name, value in values.items() if value is not None) or "none"

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Settings:
        """Returns the settings in the record.

        Args:
            texts: field of ``SETTINGS`` → a number of at most 15 digits, or "" if the record lacks the field.
        """
        grace_ms = texts["grace_ms"]
        # A take cannot require 0 gradients. To the scripts, too, 0 means that the field is not set.
        return cls(
            int(texts["num_required"] or 0) or None,
            int(texts["up_to"] or 0) or None,
            int(grace_ms) / 1000 if grace_ms else None,
        )


@dataclass(frozen=True)
class SettingsChange:
    """A change of settings, as the script ``configure`` takes it.

    Each attribute is a number as text, "none" to remove the setting, or "" to keep it.
    """

    num_required: str
    up_to: str
    grace_ms: str

    @classmethod
    def of(
        cls,
        num_required: int | EllipsisType | None,
        up_to: int | EllipsisType | None,
        grace: float | EllipsisType | None,
    ) -> SettingsChange:
        """Returns the change that a caller's arguments describe: a value, None to remove the setting, or ``...``.

        Whether the settings go together is up to the server, which knows those that stay.

        Raises:
            InvalidArgumentError: a value is one that no take accepts.
        """
        return cls(
            _text(num_required, lambda value: validation.integer(value, "num_required", low=1, high=ANY_NUMBER)),
            _text(up_to, lambda value: validation.integer(value, "up_to", low=1, high=ANY_NUMBER)),
            _text(grace, lambda value: milliseconds(validation.seconds(value, "grace", high=LONGEST_GRACE))),
        )


def _text(value: object, number: Callable[[object], int]) -> str:
    if value is ...:
        return ""
    return "none" if value is None else str(number(value))


def milliseconds(grace: float) -> int:
    """Returns a grace in milliseconds, rounded up, so that one that is not 0 stays one."""
    return math.ceil(grace * 1000)
