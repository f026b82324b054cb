"""Rounds that were granted: acknowledges them, takes those of dead takers over, and finds out whose they are.

Only a round that its taker has in memory is acknowledged: the script removes the hashes, and large parts are freed one
by one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient, listed_part_keys, number_of_parts, part_keys
from redisacc._format.entries import parse_recoveries, parse_taken
from redisacc._format.keys import Keys
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._text import shown
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError, NotFoundError, RedisAccError

logger = logging.getLogger("redisacc")

# The number of parts that one call of a script removes: each takes it about 1.7 microseconds.
PARTS_PER_CALL = 100

# The bytes that a script frees itself (lua/include/drop_strings.lua).
DROPPED_BYTES = 4 * 2**20

# The number of recoveries that the server remembers: lua/recover.lua.
REMEMBERED = 100


@dataclass(slots=True, eq=False)
class EndedRound:
    """A round whose gradients are all known. It ends alone, or in the script that publishes what follows from it.

    Attributes:
        keys: the keys of the accumulator.
        scripts: its scripts.
        token: the id of the take; "": it is known that there is no such round.
        gradients: its buffered gradients.
        items: what the scripts remove or list: the keys of its parts; in partitions, the attempts that wrote them.
        past: what ``publish`` adds to the history of a run, as ``history_text`` makes it; "": nothing.
        has_ended: whether ``publish`` has ended it, as far as this process knows.
    """

    keys: Keys
    scripts: Scripts
    token: str
    gradients: Sequence[BufferedGradient]
    items: Sequence[str]
    past: str = ""
    has_ended: bool = False

    def arguments(self, start: int = 0) -> dict[str, Any]:
        """Returns the arguments of ``publish`` and ``acknowledge`` that concern it, for items from this one on."""
        end, which = start + PARTS_PER_CALL, "round_removed" if self.keys.partitions else "round_parts"
        return {"token": self.token, "more": end < len(self.items), which: self.items[start:end]}

    def acknowledge(self, *, metrics: str = "") -> bool:
        """Removes it. Returns False if there is no such round, or no longer.

        Args:
            metrics: the means of its metrics, as ``metrics_text`` makes them, for the record; "": there are none.
        """
        # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
        has_begun = False
        for start in range(0, max(len(self.items), 1), PARTS_PER_CALL):
            if self.scripts.acknowledge(**self.arguments(start), metrics=metrics).outcome == "unknown":
                break
            has_begun = True
        if has_begun and self.items:
            self._free()
        return has_begun

    def clean_up(self) -> None:
        """Frees what ``publish`` has dropped or listed. Removes what it has left: all of it, if its reply was lost."""
        if not self.has_ended or len(self.items) > PARTS_PER_CALL:
            self.acknowledge()
        elif self.items:
            self._free()

    def _free(self) -> None:
        if self.keys.partitions:
            sweep_quietly(self.scripts.transport, self.keys, min_replicas=self.scripts.min_replicas)
        else:
            free_dropped(self.scripts.transport, self.keys, self.gradients)


def ended_round(keys: Keys, scripts: Scripts, token: str, gradients: Sequence[BufferedGradient]) -> EndedRound:
    """Returns what ends a round, given its buffered gradients."""
    items: Sequence[str] = ()
    if keys.partitions:
        items = [str(StoredAttempt(of.id, len(of.lengths))) for of in gradients if not of.inline]
    elif gradients:
        items = [*chain.from_iterable(map(part_keys, repeat(keys), gradients))]
    return EndedRound(keys, scripts, token, gradients, items)


def finish_acknowledgement(keys: Keys, scripts: Scripts, token: str) -> bool:
    """Removes the rest of a round whose taker died while it acknowledged. Returns False if nothing is left."""
    items: list[str] = []
    for field, entry in scan(scripts.transport, keys.taken_round(token).buffered).items():
        if not keys.partitions:
            items += listed_part_keys(keys, field, entry)
        elif number := number_of_parts(entry):
            items.append(str(StoredAttempt(field.decode(errors="replace"), number)))
    return EndedRound(keys, scripts, token, (), items).acknowledge()


def free_dropped(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> None:
    """Frees the parts that a script has just dropped and left to us, one part to a command, so that others get between.

    The script gave them an expiry, so nothing stays if this fails, and it raises nothing. Parts in partitions are swept
    instead (``parts/sweep.py``).
    """
    if keys.partitions:
        return
    if sum([gradient.nbytes for gradient in gradients if not gradient.inline]) > DROPPED_BYTES:
        try:
            transport.pipeline([("UNLINK", key) for gradient in gradients for key in part_keys(keys, gradient)])
        except RedisAccError as error:
            logger.debug("%s: dropped parts will expire: %s", keys.name, error)


def take_over(keys: Keys, scripts: Scripts, token: str | None, *, name: str) -> Reply | None:
    """Moves a round that was granted and not acknowledged to a new token. Its former taker can no longer read it.

    Rounds whose takers died while they acknowledged are removed on the way: their gradients have been handed out.

    Args:
        keys: the keys of the accumulator.
        scripts: its scripts.
        token: which round; None means the oldest.
        name: the name of the new taker.

    Returns:
        The reply that granted the round, with its ``token``; None if there is none to recover.
    """
    entries = scan(scripts.transport, keys.taken).items()
    found = [parse_taken(keys, field, text) for field, text in entries]
    for state, taken in found:
        if state == "acknowledged":
            finish_acknowledgement(keys, scripts, taken.token)
    rounds = sorted((taken for state, taken in found if state == "granted"), key=lambda taken: taken.granted_at)
    for taken in rounds:
        if token in (None, taken.token):
            new = secrets.token_hex(16)
            reply = scripts.recover(old=taken.token, token=new, taker=name, replicated=True)
            if reply.outcome == "granted":
                reply.token = new
                return reply
    return None


def still_listed(keys: Keys, scripts: Scripts, token: str, global_step: int) -> bool:
    """Returns whether a taken round is still listed under its token. Called only if the round seems to be gone.

    Args:
        keys: the keys of the accumulator.
        scripts: the scripts of the accumulator that the round was taken from.
        token: the id of the take.
        global_step: the step that the take closed.

    Returns:
        False if the round was acknowledged, or if the server lost it: both leave no trace.

    Raises:
        NotFoundError: the accumulator was deleted.
        ConflictError: another taker has recovered the round.
    """
    found, entry, recoveries = scripts.transport.pipeline(
        [
            ("HGET", keys.record, "incarnation"),
            ("HGET", keys.taken, token),
            ("LRANGE", keys.recovered, 0, REMEMBERED - 1),
        ]
    )
    if found != scripts.incarnation.encode():
        raise NotFoundError(
            f"accumulator {shown(keys.name)} was deleted after its round of step {global_step} was taken and before "
            "the round was acknowledged. It cannot be known whether another process had recovered the round"
        )
    if entry is not None:
        return True
    owner, new = token, None
    for recovery in parse_recoveries(keys, recoveries):
        # The new owner may have lost the round as well: the last one in the chain counts.
        if recovery.old == owner:
            owner, new = recovery.token, recovery
    if new is None:
        return False
    raise ConflictError(
        f"{keys.name}: the round of step {global_step} does not belong to this take any more: recover() gave it to "
        f"{shown(new.taker)} at {new.recovered_at:%Y-%m-%d %H:%M:%S} UTC, under the token {shown(new.token)}. Do not "
        "use its gradient, because the new owner does"
    )
