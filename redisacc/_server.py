"""Looks at how a server is set up, and says in the log what may cost data there."""

from __future__ import annotations

import logging
import re
import weakref

from redisacc._link import Link
from redisacc.errors import ServerError

logger = logging.getLogger("redisacc")

# What was said about the server of a link already.
_said: weakref.WeakKeyDictionary[Link, str] = weakref.WeakKeyDictionary()


def look_at(link: Link) -> None:
    """Warns, once for each link, if the server may evict keys."""
    try:
        reply = link.call("INFO", "memory")
    except ServerError as error:
        # A user who may not ask. Whatever is evicted is noticed when it is missed.
        logger.debug("%s: can't see how the server is set up: %s", link.address, error)
        return
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
    policy, limit = (re.search(rf"^{name}:([\w-]+)", text, re.M) for name in ("maxmemory_policy", "maxmemory"))
    if policy is None or limit is None or policy[1] == "noeviction" or limit[1] == "0":
        return
    if _said.get(link) != policy[1]:
        _said[link] = policy[1]
        logger.warning(
            "%s: the server may evict keys of accumulators when it is full (maxmemory-policy %s), and gradients with "
            "them: set it to noeviction, by CONFIG SET maxmemory-policy noeviction and in its configuration file",
            link.address,
            policy[1],
        )
