"""What messages about a wait say about the crew: how many workers hold a lease, and whether there is a chief."""

from __future__ import annotations

import logging

from redisacc._protocol.leases.crew import Crew
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")


def crew_text(crew: Crew) -> str:
    """Returns clauses about the crew for a message; "" if they cannot be read."""
    try:
        members = [member for member in crew.members() if member.left > 0]
    except RedisAccError as error:
        # The message that it is for matters more.
        logger.debug("cannot read the crew: %s", error)
        return ""
    workers = sum(member.number is not None for member in members)
    text = f"{workers} worker{'' if workers == 1 else 's'} with a lease"
    return text if workers < len(members) else f"{text}; no chief"
