"""What a server says of itself that matters to data in it: whether it may have lost them, or may evict them."""

from __future__ import annotations

import logging
import re
import weakref

from redisacc._clock import durations
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.transport import Transport
from redisacc.errors import ServerError

logger = logging.getLogger("redisacc")


_UPTIME = re.compile(r"^uptime_in_seconds:(\d{1,15})\r?$", re.M)
_FLUSHED = re.compile(r"^cmdstat_flush(?:all|db):calls=[1-9]", re.M)


def may_have_lost_data(transport: Transport, key: str) -> bool:
    """Returns whether a server was started in the last seconds, or FLUSHALL or FLUSHDB was called since its start.

    Args:
        transport: the way to the server.
        key: in a cluster, the node that owns this one is asked.
    """
    if not durations.young:
        return False
    texts = []
    for section in ("server", "commandstats"):
        try:
            texts.append(_info(transport, section, key))
        except NotPermittedError as error:
            # It is unknown.
            logger.debug("%s: cannot tell how old its data are: %s", transport.address, error)
            return True
        except ServerError:
            # fakeredis, which lacks the command, forgets nothing.
            return False
    uptime = _UPTIME.search(texts[0])
    return (uptime is not None and int(uptime[1]) < durations.young) or _FLUSHED.search(texts[1]) is not None


# The policy that was last warned of, for each transport.
_warned_of: weakref.WeakKeyDictionary[Transport, str] = weakref.WeakKeyDictionary()


def warn_if_evicting(transport: Transport, key: str) -> None:
    """Logs a warning, once for each transport, if the server may evict keys.

    Args:
        transport: the way to the server.
        key: in a cluster, the node that owns this one is asked.
    """
    try:
        text = _info(transport, "memory", key)
    except ServerError as error:
        # This user may not read the policy. Eviction is noticed anyway, when a key is missing.
        logger.debug("%s: cannot read the eviction policy: %s", transport.address, error)
        return
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


def _info(transport: Transport, section: str, key: str) -> str:
    reply = transport.call("INFO", section, beside=key)
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
