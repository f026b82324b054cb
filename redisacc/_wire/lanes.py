"""Lanes: several connections to a server on another machine, over which large strings are fetched at the same time.

While a machine receives uploads, the acknowledgements of the data that it sends wait behind them, up to 20 ms
in a switch. TCP's congestion control then sends accordingly little on each connection, so several of them fetch more.
On one machine nothing waits, and one connection is fastest. docs/explanations/benchmarks.md has the figures.

A fetch uses connections that are open and never waits for one. If one breaks, the fetch is repeated over a single
connection.
"""

from __future__ import annotations

import ipaddress
import select
import socket

from redisacc._interrupts import interrupt_in

# How many lanes there are, the first connection included. Eight were no faster than four.
LANES = 4


def is_remote(sock: socket.socket) -> bool:
    """Returns whether a socket leads to another machine."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
        address = ipaddress.ip_address(there.partition("%")[0])
    except (OSError, ValueError) as error:
        if interrupt_in(error) is not None:
            raise
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return here != there and not mapped.is_loopback


def is_quiet(sock: socket.socket) -> bool:
    """Returns whether nothing arrived on an idle socket: no reply to an earlier request, and no end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)
