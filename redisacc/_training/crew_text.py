"""What messages about a wait say about the crew: who is there, who is missing, who is gone."""

from __future__ import annotations

import logging
from collections.abc import Collection

from redisacc._protocol.crew import Crew, Member
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# The most members of a kind that a message lists.
LISTED = 10


def crew_text(crew: Crew, *, contributed: Collection[str] | None = None) -> str:
    """Returns clauses about the crew for a message; "" if they cannot be read.

    Args:
        crew: the crew.
        contributed: the workers whose gradients are in the round. None: it is not known, or the message says it anyway.
    """
    try:
        members = crew.members()
    except RedisAccError as error:
        # The message that it is for matters more.
        logger.debug("cannot read the crew: %s", error)
        return ""
    workers = [member for member in members if member.number is not None and member.left > 0]
    clauses = [f"{len(workers)} worker{'' if len(workers) == 1 else 's'} with a lease"]
    if contributed is not None:
        missing = [member for member in workers if member.place not in contributed]
        if missing:
            clauses.append(f"missing from the round: {_listed([f'{m.place} ({m.who})' for m in missing])}")
    if not any(member.number is None for member in members):
        clauses.append("no chief")
    gone = [member for member in members if member.left <= 0]
    if gone:
        clauses.append(f"gone: {_listed([_gone(member) for member in gone])}")
    return "; ".join(clauses)


def _gone(member: Member) -> str:
    return f"{member.place} ({member.who}, whose lease ran out {-member.left:.0f} s ago)"


def _listed(texts: list[str]) -> str:
    more = len(texts) - LISTED
    return ", ".join([*texts[:LISTED], *([f"{more} more"] if more > 0 else [])])
