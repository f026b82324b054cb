"""Whether a server may have lost its data a moment ago."""

from __future__ import annotations

import logging
import re

from redisacc._clock import durations
from redisacc._redis.reply_errors import NotPermittedError
from redisacc._redis.transport import Transport
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
            reply = transport.call("INFO", section, beside=key)
        except NotPermittedError as error:
            # It is unknown.
            logger.debug("%s: cannot tell how old its data are: %s", transport.address, error)
            return True
        except ServerError:
            # fakeredis, which lacks the command, forgets nothing.
            return False
        texts.append(reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply))
    uptime = _UPTIME.search(texts[0])
    return (uptime is not None and int(uptime[1]) < durations.young) or _FLUSHED.search(texts[1]) is not None
