"""The options of a run on several hosts, and what they mean."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from redisacc._text import shown
from redisacc.embedded import TLS
from redisacc.embedded.addresses import is_loopback
from redisacc.embedded.cluster_node import BUS_OFFSET
from redisacc.tools.cli.shared.failures import fail, refuse
from redisacc.tools.cli.shared.options import PASSWORD, NonEmptyPath
from redisacc.tools.launch.hosts.agreement import MOST_HOSTS, NAME, Terms
from redisacc.tools.launch.hosts.host import ThisHost
from redisacc.tools.launch.hosts.meeting_point import Meet

_LONGEST_PASSWORD = 512

_MEET = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def check_several_hosts(*, hosts: int | None, meet: Meet | None, replicas: int, **others: Any) -> None:
    """Checks that no option is given without those that it needs, before anything is started."""
    refuse((hosts is None) != (meet is None), "--hosts and --meet go together: how many hosts, and where they meet")
    if hosts is None:
        if given := [name for name, value in {"replicas": replicas, **others}.items() if value]:
            raise click.UsageError(f"--{given[0].replace('_', '-')} needs --hosts")
    elif replicas and hosts < 3:
        raise click.UsageError(
            f"--replicas needs at least 3 hosts, not {hosts}: a replica takes over if most of the nodes that "
            "are left agree, and one of two is no majority"
        )


def this_host(
    *,
    hosts: int,
    meet: Meet,
    replicas: int,
    join: bool,
    host_name: str | None,
    address: str | None,
    node_port: int | None,
    password_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    workers: int,
    chief: bool,
    nodes: bool,
    program: tuple[str, ...],
    **others: Any,
) -> ThisHost:
    """Returns this host as its options describe it, which were checked before; ``others`` are as for ``ThisHost``."""
    password = _password(password_file)
    is_local = is_loopback(meet.host) and (address is None or is_loopback(address))
    refuse(
        password is None and not is_local,
        f"servers that other hosts reach need a password: set {PASSWORD} to the same one on every host, or "
        "give a file that holds it as --password-file",
    )
    name = socket.gethostname()[:64] if host_name is None else host_name
    refuse(
        not NAME.fullmatch(name),
        f"the name of this host is {shown(name)}: give it one of 1 to 64 letters, digits, dots, hyphens and "
        "underscores as --host-name",
    )
    called = " ".join(map(os.path.basename, program[:2]))[:200]
    return ThisHost(
        meet=meet,
        terms=Terms(hosts, workers, replicas if nodes else 0, chief, nodes, called),
        name=name,
        address=address or "",
        node_port=_node_port(node_port, replicas, meet) if nodes else 0,
        joins=join,
        password=password,
        tls=_tls({"--tls-cert": tls_cert, "--tls-key": tls_key, "--tls-ca": tls_ca}),
        **others,
    )


def _node_port(given: int | None, replicas: int, meet: Meet) -> int:
    port = meet.port + 1 if given is None else given
    most = 65535 - BUS_OFFSET - replicas
    refuse(
        port > most,
        f"a node cannot have the port {port}: nodes speak to each other at a port that is higher by "
        f"{BUS_OFFSET}, so give --node-port a number up to {most}",
    )
    refuse(
        port <= meet.port <= port + replicas,
        f"the meeting point has port {meet.port}, so no node can have it: see --node-port",
    )
    return port


def _password(file: Path | None) -> str | None:
    where, text = PASSWORD, os.environ.get(PASSWORD) or None
    if file is not None:
        where = str(file)
        try:
            text = file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read the password: {error}")
        if not text:
            fail(f"the password in {where} is empty")
    # The password is not quoted.
    if text is not None and (len(text.encode(errors="replace")) > _LONGEST_PASSWORD or not text.isprintable()):
        fail(f"the password in {where} must be one line of at most {_LONGEST_PASSWORD} bytes")
    return text


def _tls(files: dict[str, Path | None]) -> TLS | None:
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


def _meet(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Meet | None:
    if text is None:
        return None
    match = _MEET.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise click.UsageError(f"--meet must be HOST:PORT, such as host1:6400, not {shown(text)}")
    return Meet(match["ipv6"] or match["host"], int(match["port"]))


def _address(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    try:
        return text and str(ipaddress.ip_address(text))
    except ValueError:
        raise click.UsageError(f"--address must be an IP address, not {shown(text)}") from None


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
        callback=_meet,
        help="Where the hosts meet: the address of one of them, and a port that is free on it.",
    ),
    click.option(
        "--replicas",
        type=click.IntRange(0, 1),
        default=0,
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
        callback=_address,
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
    """Adds the options of a run on several hosts, which ``this_host`` gets."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
