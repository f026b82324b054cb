"""The meeting point: a server on the meeting host, with a lease for each host, and one hash about the run.

| key | holds |
| --- | --- |
| ``redisacc:meeting`` | a hash: version, phase, terms, and in ``host K`` and ``guest K`` who has this number |
| ``redisacc:meeting:host:NAME`` | what a host says about itself, with an expiry: its lease |
"""

from __future__ import annotations

import errno
import socket
from itertools import islice
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from redisacc._wire.slot_map import Address
from redisacc.embedded.addresses import TLS
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.agreement import CAME, MOST_HOSTS, Agreement, Host, read, read_agreement, text_of

# A host that has not shown for this many seconds that it lives is gone.
LEASE = 5.0
# After this many, it may be.
LATE = 2.0

_TIMEOUT = 2.0

_AGREEMENT = "redisacc:meeting"
_HOST = "redisacc:meeting:host:"


class Meet(Address):
    """The address at which the hosts meet: a name or an IP address, and a TCP port."""

    def resolve(self) -> str:
        """Returns its IP address.

        Raises:
            OSError: the name has no address at the moment.
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        # IPv4 first, because a name often has both and the nodes announce one.
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def can_listen_at(host: str, port: int) -> bool | None:
    """Returns whether a server can listen at an address: None if it is another machine's, False if it is taken.

    Raises:
        ServerError: it can't, for another reason.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that have ended shortly before do not count, as for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # With SO_REUSEADDR, two may bind, but only one may listen.
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            if error.errno == errno.EADDRINUSE:
                return False
            raise ServerError(f"no server can listen at port {port} of {host}: {error}") from None
    return True


def own_address_towards(host: str, port: int) -> str:
    """Returns the address by which this machine reaches another one. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class Beat(NamedTuple):
    """What a host has found at the meeting point.

    Attributes:
        agreement: what is agreed. None as long as hosts gather.
        hosts: what each host that is alive says about itself, by its name.
        late: the names of those that have not shown for a while that they live.
        holder: what held this host's lease before. None means nothing did.
        is_taken: whether another command has it, and keeps it.
    """

    agreement: Agreement | None
    hosts: dict[str, Host]
    late: set[str]
    holder: Host | None
    is_taken: bool


class MeetingPoint:
    """A client of the meeting point. Its methods block for two seconds at most, and raise redis.RedisError.

    Args:
        meet: its address. A name may have another IP address with each connection.
        password: what it asks for.
        tls: the files for TLS.
    """

    def __init__(self, meet: Meet, password: str | None, tls: TLS | None) -> None:
        settings: dict[str, Any] = {} if tls is None else {"ssl": True, **tls.settings}
        self._client = redis.Redis(
            meet.host,
            meet.port,
            password=password,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **settings,
        )

    def beat(self, host: Host, known: Agreement | None) -> Beat:
        """Renews a host's lease, brings back the agreement if the server has lost it, and returns what is there.

        A host whose processes work takes its lease back from a command that has only just come: both find an empty
        server if the meeting host was gone.

        Args:
            host: what the host says about itself.
            known: the latest agreement that it knows.

        Raises:
            MeetingError: the hash is something else.
        """
        lease = _HOST + host.name
        with self._client.pipeline() as pipeline:
            # If another host writes meanwhile, this raises an error, and the next beat tries again.
            pipeline.watch(_AGREEMENT, lease)  # type: ignore[no-untyped-call]
            agreement = read_agreement(pipeline.hgetall(_AGREEMENT))  # type: ignore[arg-type]
            holder = read(Host, pipeline.get(lease) or b"")  # type: ignore[arg-type]
            is_taken = holder is not None and holder.run != host.run and (host.stage == CAME or holder.stage != CAME)
            pipeline.multi()
            if known is not None and (agreement is None or _is_older(agreement, known)):
                agreement = known
                _put(pipeline, known)
            if not is_taken:
                pipeline.set(lease, text_of(host), px=_ms(LEASE))
            pipeline.execute()
        return Beat(agreement, *self._hosts(), holder, is_taken)

    def look(self) -> tuple[Agreement | None, dict[str, Host]]:
        """Returns what is agreed, and what the hosts say, and writes nothing.

        Raises:
            MeetingError: the hash is something else.
        """
        return read_agreement(self._client.hgetall(_AGREEMENT)), self._hosts()[0]  # type: ignore[arg-type]

    def leave(self, name: str) -> None:
        """Removes what a host said about itself."""
        self._client.delete(_HOST + name)

    def write(self, agreement: Agreement) -> None:
        """Writes the agreement. Only the meeting host does."""
        with self._client.pipeline() as pipeline:
            _put(pipeline, agreement)
            pipeline.execute()

    def _hosts(self) -> tuple[dict[str, Host], set[str]]:
        """Returns what each host that lives says about itself, by its name; and who may live no longer."""
        names = list(islice(self._client.scan_iter(match=_HOST + "*", count=1000), 4 * MOST_HOSTS))
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.get(name)
                pipeline.pttl(name)
            replies = pipeline.execute()
        found, late = {}, set()
        for name, data, left in zip(names, replies[::2], replies[1::2], strict=True):
            host = read(Host, data or b"")
            # Something else may be there; and a lease may just have run out.
            if host is not None and name == (_HOST + host.name).encode():
                found[host.name] = host
                if left < _ms(LEASE - LATE):
                    late.add(host.name)
        return found, late

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


def _is_older(agreement: Agreement, known: Agreement) -> bool:
    return agreement.training == known.training and agreement.version < known.version


def _put(pipeline: redis.client.Pipeline, agreement: Agreement) -> None:
    pipeline.delete(_AGREEMENT)
    pipeline.hset(_AGREEMENT, mapping=agreement.fields)  # type: ignore[arg-type]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
