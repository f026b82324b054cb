"""What living workers have of a training that the server has lost, as they say themselves."""

from __future__ import annotations

from redisacc._format.crew_entries import Claim, parse_claims
from redisacc._format.keys import ParameterKeys
from redisacc._format.stored_text import clock_ms
from redisacc._wire.scans import scan_command, scan_whole
from redisacc._wire.transport import Transport


def read_claims(transport: Transport, keys: ParameterKeys) -> list[Claim]:
    """Returns the claims, the newest step first.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    clock, first = transport.pipeline([("TIME",), scan_command(keys.claims)])
    return parse_claims(keys.claims, scan_whole(transport, keys.claims, first), clock_ms(clock))
