"""A Redis or Valkey server, or a cluster, as children of this process, for tests, demos and one-machine jobs.

The server belongs to the process that started it and ends with that process, even if the process is killed::

    with redisacc.embedded.Server() as server:
        acc = redisacc.ConditionalAccumulator("float32", redis=server.url)
"""

from __future__ import annotations

from redisacc.embedded.addresses import TLS
from redisacc.embedded.cluster import Cluster
from redisacc.embedded.program import find_server
from redisacc.embedded.server import Server

__all__ = ["TLS", "Cluster", "Server", "find_server"]
