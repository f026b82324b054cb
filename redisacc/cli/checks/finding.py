"""The findings of `redisacc doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: name of the check.
        status: "ok"; "warn" if it works but could be better; "bad" if it must be changed.
        found: the facts.
        advice: the remedy; with "ok", a hint where there is one, else empty.
    """

    what: str
    status: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""
