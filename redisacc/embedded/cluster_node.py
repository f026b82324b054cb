"""The class `ClusterNode`: a server that is a node of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from redisacc.embedded.addresses import LOOPBACK, TCPAddress, free_port
from redisacc.embedded.server import Server
from redisacc.errors import ServerError

__all__ = ["BUS_OFFSET", "CONFIGURATION", "ClusterNode"]

# By default a node's cluster bus has the port of its clients plus this. Redis 6.2 knows no other way.
BUS_OFFSET = 10_000

# The file in which a node keeps what it knows about the cluster.
CONFIGURATION = "nodes.conf"


class ClusterNode(Server):
    """A server that is a node of a cluster. It may be killed and started again, at the same port.

    Its configuration (its identity, its slots, the other nodes) survives a restart even where its data do not: a node
    without a `dir` comes back as the same node, empty.

    Args:
        node_timeout_ms: milliseconds without an answer after which the other nodes count this one as failed.
        **options: arguments of `Server`.
    """

    def __init__(self, *, node_timeout_ms: int, **options: Any) -> None:
        super().__init__(**options)
        self._node_timeout_ms = node_timeout_ms
        # What the last run left in its directory, which may be gone; or what it is to begin with instead.
        self._configuration = b""
        self._is_given = False

    def _free_address(self) -> TCPAddress:
        for _ in range(100):
            port = free_port()
            if port + BUS_OFFSET > 65535:
                continue
            with socket.socket(socket.AF_INET) as bus, contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + BUS_OFFSET))
                return TCPAddress(port)
        raise ServerError(f"no free TCP port was found on 127.0.0.1 whose number plus {BUS_OFFSET} is free as well")

    def _options(self) -> list[str]:
        options = ["--cluster-enabled", "yes", "--cluster-config-file", CONFIGURATION]
        options += ["--cluster-node-timeout", str(self._node_timeout_ms)]
        options += ["--cluster-announce-ip", self._address.host if isinstance(self._address, TCPAddress) else LOOPBACK]
        # Otherwise a master waits five seconds for more replicas before it sends its data to one.
        options += ["--repl-diskless-sync-delay", "0"]
        # Nodes list a replica once it has received something: by default, up to ten seconds after it is in step.
        options += ["--repl-ping-replica-period", "1"]
        # A promoted replica is better than none, however much it lags: lost data are reported as lost.
        return [*options, "--cluster-replica-validity-factor", "0"]

    def _prepare(self, directory: Path) -> None:
        configuration = directory / CONFIGURATION
        if self._configuration and not configuration.exists():
            configuration.write_bytes(self._configuration)

    def configure(self, configuration: bytes) -> None:
        """Gives the node a configuration to begin with at its next start, unless its `dir` holds one."""
        self._configuration = configuration
        self._is_given = True

    def start(self, timeout: float = 30.0) -> None:
        """Starts the node as `Server.start` does. One that has crashed comes back as the same node."""
        child = self._child
        if child is not None and child.owned and not child.alive() and not self._is_given:
            self._keep_configuration()
        super().start(timeout)
        self._is_given = False

    def _keep_configuration(self) -> None:
        # Its directory may be a temporary one, which goes with it.
        with contextlib.suppress(OSError):
            self._configuration = (self.dir / CONFIGURATION).read_bytes()

    def kill(self) -> None:
        """Kills the server with SIGKILL and blocks until it has ended. `start()` starts the same node again.

        Has no effect if it isn't running.

        Raises:
            ServerError: the server was never started.
        """
        child = self._started()
        if not child.owned or not child.alive():
            return
        self._keep_configuration()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()

    @property
    def where(self) -> TCPAddress:
        """Where other nodes and clients reach it.

        Raises:
            ServerError: the server was never started.
        """
        address = self._started().address
        assert isinstance(address, TCPAddress), "a node of a cluster has a TCP port"
        return address

    def ask(self, *command: str | int, timeout: float = 5.0) -> Any:
        """Returns the reply of this node to a command as it is, its strings decoded.

        Raises:
            redis.RedisError: the node does not answer in time, or refuses the command.
        """
        return self.where.ask(*command, timeout=timeout)
