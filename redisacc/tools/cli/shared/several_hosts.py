"""The options of a run on several hosts, and what they mean."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import click

from redisacc._text import shown
from redisacc.embedded import TLS
from redisacc.tools.cli.shared.failures import fail
from redisacc.tools.cli.shared.options import PASSWORD, NonEmptyPath
from redisacc.tools.launch.hosts.agreement import MOST_HOSTS, NAME, Terms
from redisacc.tools.launch.hosts.host import HostOptions
from redisacc.tools.launch.hosts.meeting_point import Meet
from redisacc.tools.launch.hosts.nodes import BUS_OFFSET
from redisacc.tools.launch.restarts import Restarts

__all__ = ["SeveralHosts", "several_hosts_options"]

_LONGEST_PASSWORD = 512

_MEET = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


@dataclasses.dataclass(frozen=True)
class SeveralHosts:
    """The options, as they were given."""

    hosts: int | None
    meet: str | None
    replicas: int
    join: bool
    host_name: str | None
    address: str | None
    node_port: int | None
    password_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None

    def check(self) -> None:
        """Checks that no option is given without those that it needs, before anything is started."""
        if (self.hosts is None) != (self.meet is None):
            raise click.UsageError("--hosts and --meet go together: how many hosts, and where they meet")
        if self.hosts is None:
            if given := [name for name, value in vars(self).items() if value]:
                raise click.UsageError(f"--{given[0].replace('_', '-')} needs --hosts")
            return
        if self.replicas and self.hosts < 3:
            raise click.UsageError(
                f"--replicas needs at least 3 hosts, not {self.hosts}: a replica takes over if most of the nodes that "
                "are left agree, and one of two is no majority"
            )

    def options(
        self,
        *,
        workers: int,
        chief: bool,
        nodes: bool,
        program: tuple[str, ...],
        directory: Path | None,
        durable: bool,
        restarts: Callable[[Callable[[], bool]], Restarts],
        grace: float,
    ) -> HostOptions:
        """Returns what they mean.

        Args:
            workers: the number of workers on each host.
            chief: whether the first host runs a chief.
            nodes: whether hosts start nodes.
            program: the command of each process.
            directory: where nodes keep their data.
            durable: whether they write every change to disk.
            restarts: returns what is known of the deaths of a server, given what says whether hosts are gone.
            grace: as for a run on one host.
        """
        assert self.hosts is not None, "checked before"
        assert self.meet is not None, "checked before"
        meet = _meet(self.meet)
        password = self._password()
        self._check_password(meet, password)
        return HostOptions(
            meet=meet,
            terms=Terms(
                self.hosts,
                workers,
                self.replicas if nodes else 0,
                chief,
                nodes,
                " ".join(map(os.path.basename, program[:2]))[:200],
            ),
            name=self._name(),
            address=self.address,
            node_port=self._node_port(meet) if nodes else 0,
            joins=self.join,
            password=password,
            tls=self._tls(),
            directory=directory,
            durable=durable,
            restarts=restarts,
            grace=grace,
        )

    def _name(self) -> str:
        name = self.host_name if self.host_name is not None else socket.gethostname()[:64]
        if not NAME.fullmatch(name):
            raise click.UsageError(
                f"the name of this host is {shown(name)}: give it one of 1 to 64 letters, digits, dots, hyphens and "
                "underscores as --host-name"
            )
        return name

    def _node_port(self, meet: Meet) -> int:
        port = meet.port + 1 if self.node_port is None else self.node_port
        most = 65535 - BUS_OFFSET - self.replicas
        if port > most:
            raise click.UsageError(
                f"a node cannot have the port {port}: nodes speak to each other at a port that is higher by "
                f"{BUS_OFFSET}, so give --node-port a number up to {most}"
            )
        if port <= meet.port <= port + self.replicas:
            raise click.UsageError(f"the meeting point has port {meet.port}, so no node can have it: see --node-port")
        return port

    def _password(self) -> str | None:
        if self.password_file is None:
            text = os.environ.get(PASSWORD) or None
            where = PASSWORD
        else:
            where = str(self.password_file)
            try:
                text = self.password_file.read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                fail(f"cannot read the password: {error}")
            if not text:
                fail(f"the password in {where} is empty")
        # The password is not quoted.
        if text is not None and (len(text.encode(errors="replace")) > _LONGEST_PASSWORD or not text.isprintable()):
            fail(f"the password in {where} must be one line of at most {_LONGEST_PASSWORD} bytes")
        return text

    def _check_password(self, meet: Meet, password: str | None) -> None:
        if self.address is not None:
            try:
                local = ipaddress.ip_address(self.address).is_loopback
            except ValueError:
                raise click.UsageError(f"--address must be an IP address, not {shown(self.address)}") from None
        else:
            local = True
        if password is None and not (local and meet.is_loopback):
            raise click.UsageError(
                f"servers that other hosts reach need a password: set {PASSWORD} to the same one on every host, or "
                "give a file that holds it as --password-file"
            )

    def _tls(self) -> TLS | None:
        files = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        given = {name: path for name, path in files.items() if path is not None}
        if not given:
            return None
        if missing := [name for name in files if name not in given]:
            raise click.UsageError(f"TLS needs three files: {' and '.join(missing)} is missing")
        for name, path in given.items():
            if not os.access(path, os.R_OK):
                fail(f"cannot read the file of {name}: {path}")
        # Servers have directories of their own.
        return TLS(*(path.absolute() for path in given.values()))


def _meet(text: str) -> Meet:
    match = _MEET.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise click.UsageError(f"--meet must be HOST:PORT, such as host1:6400, not {shown(text)}")
    return Meet(match["ipv6"] or match["host"], int(match["port"]))


_OPTIONS = (
    click.option(
        "--hosts",
        type=click.IntRange(1, MOST_HOSTS),
        metavar="N",
        help="Number of hosts that start this command. Each starts a node of a Redis Cluster.",
    ),
    click.option(
        "--meet",
        metavar="HOST:PORT",
        help="Where the hosts meet: the address of one of them, and a port that is free on it.",
    ),
    click.option(
        "--replicas",
        type=click.IntRange(0, 1),
        default=0,
        show_default=True,
        metavar="N",
        help="Number of replicas of each node, on other hosts. 1 needs --hosts 3 or more.",
    ),
    click.option(
        "--join",
        is_flag=True,
        help="With --hosts: take the place of a missing host, or else bring more workers.",
    ),
    click.option(
        "--host-name",
        metavar="NAME",
        help="With --hosts: the name under which this host keeps its place.  [default: its hostname]",
    ),
    click.option(
        "--address",
        metavar="IP",
        help="With --hosts: the address at which other hosts reach this one.  [default: the one towards --meet]",
    ),
    click.option(
        "--node-port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="With --hosts: the port of this host's node; its replica has the next one. Nodes also use the "
        f"ports that are higher by {BUS_OFFSET}.  [default: the one after the port of --meet]",
    ),
    click.option(
        "--password-file",
        type=NonEmptyPath(),
        metavar="FILE",
        help=f"With --hosts: a file with the password of all servers.  [default: {PASSWORD}]",
    ),
    click.option("--tls-cert", type=NonEmptyPath(), metavar="FILE", help="With --hosts: this host's certificate."),
    click.option("--tls-key", type=NonEmptyPath(), metavar="FILE", help="With --hosts: the key of that certificate."),
    click.option(
        "--tls-ca",
        type=NonEmptyPath(),
        metavar="FILE",
        help="With --hosts: the authority that signed the certificates of these hosts only.",
    ),
)


def several_hosts_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a run on several hosts, whose values are those of ``SeveralHosts``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
