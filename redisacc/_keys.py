"""Every key of an accumulator, in one place.

All of them carry the hash tag ``{NAME}``, so that they live in one slot of a Redis Cluster and one script may touch
them all. Scripts get every key that they touch in KEYS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redisacc._shown import shown
from redisacc.errors import InvalidArgumentError

PREFIX = "redisacc:"

# The set of all shared names, for listing.
NAMES = f"{PREFIX}names"

# What the incarnation of an accumulator begins with while it is being deleted (lua/delete.lua): nobody can use it.
DELETING = "deleted:"

_REF = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}")


@dataclass(slots=True)
class RoundKeys:
    """The hashes of a round: the current one, or one that was taken."""

    sums: str
    parked: str
    small: str
    workers: str

    @classmethod
    def under(cls, base: str) -> RoundKeys:
        """Those whose names begin with ``base``."""
        return cls(f"{base}:sums", f"{base}:parked", f"{base}:small", f"{base}:workers")


class Keys:
    """The keys of the accumulator ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.record = f"{PREFIX}{{{name}}}"
        self.clients = f"{self.record}:clients"
        self.queue = f"{self.record}:queue"
        self.takers = f"{self.record}:takers"
        self.taken = f"{self.record}:taken"
        self.events = f"{self.record}:events"
        self.wake = f"{self.record}:wake"
        self.current = RoundKeys.under(self.record)
        # A take asks three times.
        self._latest: tuple[str | None, RoundKeys] = (None, self.current)

    @classmethod
    def of_ref(cls, ref: str) -> Keys:
        """The keys behind an ``accumulator_ref``."""
        match = _REF.fullmatch(ref) if isinstance(ref, str) else None
        if match is None:
            raise InvalidArgumentError(f"handle must be an accumulator_ref, '{PREFIX}{{NAME}}', not {shown(ref)}")
        return cls(match[1])

    @property
    def folding(self) -> str:
        """Held, for a few seconds, by the client that adds parked gradients up to make room."""
        return f"{self.record}:folding"

    def taken_round(self, token: str) -> RoundKeys:
        """The hashes of the round that was granted to ``token``."""
        known, of = self._latest
        if known != token:
            of = RoundKeys.under(f"{self.taken}:{token}")
            self._latest = token, of
        return of

    def part(self, gradient: str, number: int) -> str:
        """Part ``number`` (from 0) of a parked gradient."""
        return f"{self.record}:part:{gradient}:{number}"

    def staged(self, gradient: str, number: int) -> str:
        """Where a client puts that part before the gradient is accepted; it has an expiry."""
        return f"{self.record}:staged:{gradient}:{number}"
