"""What `redisacc doctor` checks: each module has functions that return a finding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "ok"; "warn" if it works but could be better; "bad" if it must be changed.
        found: the facts.
        advice: the remedy; with "ok", a hint where there is one, else empty.
    """

    status: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""


ok, warn, bad = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "bad")
