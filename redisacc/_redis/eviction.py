"""Warns of a server that may evict keys."""

from __future__ import annotations

import logging
import re
import weakref

from redisacc._redis.transport import Transport
from redisacc.errors import ServerError

logger = logging.getLogger("redisacc")

# The policy that was last warned of, for each transport.
_warned_of: weakref.WeakKeyDictionary[Transport, str] = weakref.WeakKeyDictionary()


def warn_if_evicting(transport: Transport, key: str) -> None:
    """Logs a warning, once for each transport, if the server may evict keys.

    Args:
        transport: the way to the server.
        key: in a cluster, the node that owns this one is asked.
    """
    try:
        reply = transport.call("INFO", "memory", beside=key)
    except ServerError as error:
        # This user may not read the policy. Eviction is noticed anyway, when a key is missing.
        logger.debug("%s: cannot read the eviction policy: %s", transport.address, error)
        return
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
    policy, limit = (re.search(rf"^{name}:([\w-]+)", text, re.M) for name in ("maxmemory_policy", "maxmemory"))
    if policy is None or limit is None or policy[1] == "noeviction" or limit[1] == "0":
        return
    if _warned_of.get(transport) != policy[1]:
        _warned_of[transport] = policy[1]
        logger.warning(
            "%s: the server may evict keys of accumulators, and gradients with them, when it is full "
            "(maxmemory-policy %s). Set it to noeviction: CONFIG SET maxmemory-policy noeviction, and in its "
            "configuration file",
            transport.address,
            policy[1],
        )
