"""The life of this host in a run, from its coming to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

import redis

from redisacc._clock import clock
from redisacc._protocol.waiting.wait import WaitLog
from redisacc._text import printable
from redisacc._wire.slot_map import Address
from redisacc.embedded import Server
from redisacc.embedded.addresses import TLS, TCPAddress, is_loopback
from redisacc.embedded.cluster_node import BUS_OFFSET
from redisacc.embedded.rejoining import NoNodeAnswersError
from redisacc.embedded.server_process import PortInUseError
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.agreement import (
    CAME,
    FAILED,
    FINISHED,
    JOINS,
    MEETS,
    READY,
    STARTED,
    STARTING,
    TAKES_PART,
    WORKS,
    Agreement,
    Host,
    MeetingError,
    Terms,
    come_by_now,
)
from redisacc.tools.launch.hosts.attendance import Attendance
from redisacc.tools.launch.hosts.meeting_point import LEASE, Meet, MeetingPoint, can_listen_at, own_address_towards
from redisacc.tools.launch.hosts.nodes import Nodes
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import CannotStartError, Look
from redisacc.tools.launch.server_keeper import ServerKeeper

_PAUSE = 0.05
# How long other hosts have to hear that this one has given up.
_LAST_WORDS = 3.0


@dataclasses.dataclass(eq=False, kw_only=True)
class ThisHost(contextlib.ExitStack):
    """This host in a run of several. Use it in a ``with`` block, which ends its servers.

    Attributes:
        follows: whether the run had begun when this host came: it returns, or joins.
        meet: where the hosts meet.
        terms: what every host must say.
        name: the name of this host.
        address: its IP address; "": the one by which it reaches the meeting point, once that is found.
        node_port: the port of its node; that of its replica is the next one.
        joins: whether it takes the place of a host that is gone, or comes as a guest.
        password: what every server of the run asks for.
        tls: the files for TLS.
        directory: where its nodes keep their data. None means in temporary directories.
        durable: whether its nodes write every change to disk.
        restarts: returns what is known of the deaths of a server, given what says whether hosts are gone.
        grace: seconds that other hosts have to end when the meeting host is gone.
        say: writes a line for people, as long as `come` or `finish` blocks.
    """

    meet: Meet
    terms: Terms
    name: str
    address: str
    node_port: int
    joins: bool
    password: str | None = dataclasses.field(repr=False)
    tls: TLS | None
    directory: Path | None
    durable: bool
    restarts: Callable[[Callable[[], bool]], Restarts]
    grace: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__init__()
        self.follows = False
        self._run = secrets.token_hex(16)
        # Whether the meeting point is here.
        self._meets = False
        self._attendance: Attendance
        self._nodes: Nodes | None = None
        # What looks after others, and after the servers of this host.
        self._looks: list[Callable[[], Look | None]] = []
        # Why the nodes are not back yet.
        self._why = ""

    # What processes need to know

    def url(self, *, password: bool) -> str:
        """Returns the URL of the cluster, with the password or without it."""
        access = f":{quote(self.password, safe='')}@" if password and self.password is not None else ""
        nodes = ",".join(
            str(Address(member.address, port)) for member in self._agreement.members for port in member.node_ports
        )
        if self.tls is None:
            return f"redis+cluster://{access}{nodes}"
        settings = self.tls.settings | {"ssl_check_hostname": "false"}
        return f"rediss+cluster://{access}{nodes}?{urlencode(settings)}"

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each node of this host."""
        return [] if self._nodes is None else [str(Address(self.address, port)) for port in self._ports]

    @property
    def number(self) -> int:
        """The number of this host. The first one, which has the chief, is 0."""
        return self._agreement.names.index(self.name)

    @property
    def is_guest(self) -> bool:
        """Whether this host has joined with workers only."""
        return self.number >= self.terms.hosts

    def new_restarts(self) -> Restarts:
        """Returns what is known of the deaths of a process, which may die of that another host is gone."""
        return self.restarts(lambda: self._attendance.lacks_hosts)

    @property
    def _agreement(self) -> Agreement:
        assert self._attendance.agreement is not None, "there is an agreement"
        return self._attendance.agreement

    @property
    def _ports(self) -> tuple[int, ...]:
        port, replicas = self.node_port, self.terms.replicas
        return tuple(range(port, port + 1 + replicas)) if self.terms.nodes else ()

    # Coming

    def come(self) -> None:
        """Blocks until all hosts have come and the cluster is ready. Says what it waits for.

        Raises:
            CannotStartError: this host cannot take part; the message says why.
        """
        try:
            self._come()
        except ServerError as error:
            raise CannotStartError(str(error)) from None

    def _come(self) -> None:
        address = self._find_meeting_point()
        point = MeetingPoint(self.meet, self.password, self.tls)
        host = self._register(point, address)
        self._attendance = Attendance(self.meet, point, host, self.terms, self._form)
        self.callback(self._attendance.leave)
        self._looks.append(self._attendance.look)
        self._wait_until(self._has_place, self._who_is_missing)
        self.follows = self._agreement.phase != STARTING
        if self.is_guest:
            self._wait_until(self._is_ready, self._what_starts)
        else:
            self._start_nodes()
        self._attendance.tell(stage=WORKS)

    def _find_meeting_point(self) -> str:
        """Blocks until the meeting point has an IP address, and returns it. Finds this host's, too."""
        meet = self.meet
        log = WaitLog(clock.now())
        while True:
            try:
                address = meet.resolve()
                break
            except OSError as error:
                self._remind(log, f"waiting for an address of {meet.host} ({error}): is the name right?")
            clock.sleep(0.5)
        try:
            # If the meeting point is here, other hosts reach this one by its address.
            self.address = self.address or own_address_towards(address, meet.port)
        except OSError as error:
            raise CannotStartError(f"cannot use {meet}: {error}") from None
        if can_listen_at(self.address, 0) is None:
            raise CannotStartError(f"{self.address} is no address of this host: give its own as --address")
        if is_loopback(address) and not is_loopback(meet.host):
            raise CannotStartError(
                f"{meet.host} is {address} on this machine, which other machines cannot reach: give --meet with the "
                "address that the others use, or correct /etc/hosts"
            )
        return address

    def _start_meeting_point(self, address: str) -> None:
        """Starts the meeting point if it is on this host and nobody listens there."""
        meet = self.meet
        # All addresses of the loopback interface are this machine's, and those that differ stand for other machines.
        if is_loopback(meet.host) and self.address != address:
            return
        if can_listen_at(address, meet.port):
            with contextlib.suppress(PortInUseError):
                server = Server(port=meet.port, host=address, password=self.password, tls=self.tls)
                server.start()
                self.callback(server.stop)
                self._meets = True
                keeper = ServerKeeper(server, self.restarts(lambda: False), keeps_data=True, name="the meeting point")
                self._looks.append(keeper.look)

    def _register(self, point: MeetingPoint, address: str) -> Host:
        """Blocks until this host has its lease at the meeting point, which it starts if that is here."""
        meet = self.meet
        log, alive_until = WaitLog(clock.now()), None
        while True:
            if not self._meets:
                # At first, the server of an earlier command may still be there, and end.
                self._start_meeting_point(address)
            role = MEETS if self._meets else JOINS if self.joins else TAKES_PART
            ports = ",".join(map(str, self._ports))
            host = Host(self.name, self._run, role, CAME, self.address, ports, "", "0", self.terms.text)
            try:
                self._check_terms(*point.look())
                if not point.beat(host, None).is_taken:
                    return host
                # The command that was killed on this host a moment ago, or one that lives.
                alive_until = alive_until or clock.now() + LEASE + 1
                if clock.now() >= alive_until:
                    raise CannotStartError(
                        f"host {host.name} takes part in the run at {meet} already, and its command runs. If this is "
                        "another host, give it its own --host-name; another run needs another port in "
                        "--meet"
                    )
                self._remind(log, "waiting for the end of the earlier command of this host")
            except (redis.ConnectionError, redis.TimeoutError, redis.WatchError) as error:
                if isinstance(error, redis.AuthenticationError):
                    raise self._wrong_password() from None
                self._remind(
                    log,
                    f"waiting for the meeting point at {meet} ({printable(str(error), 200)}). It is on the host that "
                    f"has this address: does the command run there, and is port {meet.port} open?",
                )
            except (redis.RedisError, MeetingError) as error:
                if isinstance(error, redis.AuthenticationError) or "AUTH" in str(error):
                    raise self._wrong_password() from None
                raise CannotStartError(
                    f"the server at {meet} is not the meeting point of a run: {printable(str(error), 200)}"
                ) from None
            clock.sleep(0.2)

    def _wrong_password(self) -> CannotStartError:
        given = "another password" if self.password else "a password"
        return CannotStartError(
            f"the meeting point at {self.meet} has {given}: give the same one on every host, in "
            "REDISACC_PASSWORD or --password-file. Or another server uses this port"
        )

    def _check_terms(self, agreement: Agreement | None, hosts: Mapping[str, Host]) -> None:
        """Checks that this command may take part, as far as it can be seen now."""
        meet, own = self.meet, self.terms.text
        terms = next((host.terms for host in hosts.values() if host.role == MEETS), own)
        terms = terms if agreement is None else agreement.terms
        if terms != own:
            raise CannotStartError(
                f"another run meets at {meet}, or the commands differ: it was started with `{terms}`, and this "
                f"command is `{own}`. Give the same command on every host, and another port in --meet for another "
                "run"
            )
        if agreement is not None:
            self._check_room(agreement, hosts)

    def _check_room(self, agreement: Agreement, hosts: Mapping[str, Host]) -> None:
        name = self.name
        if agreement.phase in (FINISHED, FAILED):
            raise CannotStartError(f"the run at {self.meet} has just ended: wait a few seconds")
        if self.joins or self._meets or name in agreement.names:
            return
        members = [member.name for member in agreement.members]
        gone = [member for member in members if member not in hosts]
        also = f". Missing: {', '.join(gone)}; with --join, this host takes that place"
        raise CannotStartError(
            f"host {name} is one too many for the {len(members)} hosts at {self.meet}, which are "
            f"{', '.join(members)}{also if gone else '. With --join, it adds workers'}"
        )

    def _has_place(self, agreement: Agreement | None) -> bool:
        self._check_terms(agreement, self._attendance.hosts)
        return agreement is not None and self.name in agreement.names

    def _who_is_missing(self, agreement: Agreement | None) -> str:
        terms, meet, hosts = self.terms, self.meet, self._attendance.hosts
        if agreement is not None:
            return f"waiting for a place in the run at {meet}"
        if all(host.role != MEETS for host in hosts.values()):
            return f"waiting for the host that has the meeting point at {meet}: does the command run there?"
        come = [host.name for host in come_by_now(hosts, terms)]
        missing = terms.hosts - len(come)
        ports = f"port {meet.port}"
        if terms.nodes:
            nodes = " and ".join(map(str, [*self._ports, *(port + BUS_OFFSET for port in self._ports)]))
            ports += f" on {meet.host}, and {nodes} on all of them"
        return (
            f"waiting for {missing} of {terms.hosts} hosts; {', '.join(come)} {'have' if len(come) > 1 else 'has'} "
            f"joined at {meet}. On the others, check that the same command runs and can reach {ports}"
        )

    def _is_ready(self, agreement: Agreement | None) -> bool:
        return agreement is not None and agreement.phase != STARTING

    def _what_starts(self, agreement: Agreement | None) -> str:
        assert agreement is not None
        hosts = self._attendance.hosts
        gone = [name for name in agreement.names if name not in hosts]
        if gone:
            return f"waiting for host {', '.join(gone)}, which is missing: start the same command there again"
        late = [name for name in agreement.names if hosts[name].stage == CAME]
        if late:
            return f"waiting for the nodes of host {', '.join(late)}"
        return "waiting for the nodes of all hosts to become one cluster"

    def _start_nodes(self) -> None:
        agreement = self._agreement
        own = agreement.members[self.number].nodes
        if self.terms.nodes:
            self._check_ports()
            self._nodes = Nodes(
                TCPAddress(self.node_port, self.address, self.password, self.tls),
                len(self._ports),
                directory=self.directory,
                durable=self.durable,
                restarts=self.new_restarts,
                others=lambda: [member for member in self._agreement.members if member.name != self.name],
            )
            self.callback(self._nodes.stop)
            self._looks.append(self._nodes.look)
            if self.follows:
                self._wait_until(lambda _: self._is_back(own.split(",")), lambda _: self._why)
            else:
                own = ",".join(self._nodes.start())
        self._attendance.tell(stage=STARTED, nodes=own)
        self._wait_until(self._is_ready, self._what_starts)

    def _is_back(self, identities: Sequence[str]) -> bool:
        assert self._nodes is not None
        try:
            self._nodes.come_back(identities)
        except NoNodeAnswersError as error:
            self._why = f"waiting for a node of another host: {error}"
            return False
        return True

    def _check_ports(self) -> None:
        for port in (*self._ports, *(port + BUS_OFFSET for port in self._ports)):
            if not can_listen_at(self.address, port):
                raise CannotStartError(
                    f"port {port} of {self.address} is in use, by another run or another program: choose "
                    "another --node-port, or another port in --meet"
                )

    def _form(self, agreement: Agreement) -> None:
        if self._nodes is not None:
            self._nodes.form(agreement.members)

    # While processes work

    def look(self) -> Look | None:
        """Returns what there is to say of other hosts and of this host's servers. Never blocks."""
        return next(filter(None, (look() for look in self._looks)), None)

    # The end

    def finish(self, code: int, *, stopped: bool) -> int:
        """Says how the processes of this host have ended, and blocks until no other host needs this one.

        Args:
            code: the exit code of the run.
            stopped: whether somebody has stopped the run.

        Returns:
            The exit code of the command.
        """
        if stopped or self.is_guest or self._attendance.error is not None:
            return code
        if code:
            self._attendance.tell(stage=FAILED, code=str(min(code, 255)))
            deadline = clock.now() + _LAST_WORDS
            while self._agreement.phase == READY and clock.now() < deadline:
                clock.sleep(_PAUSE)
            self._say_looks()
            return code
        self._attendance.tell(stage=FINISHED)
        log = WaitLog(clock.now())
        alone_at: float | None = None
        while self._agreement.phase == READY:
            end = self._say_looks()
            if end is not None:
                return end
            alone_at = (alone_at or clock.now() + self.grace) if self._attendance.is_silent else None
            if alone_at is not None and clock.now() >= alone_at:
                self.say(
                    "the meeting host still does not answer, and the processes of this host have ended: the run ends"
                )
                return 0
            self._remind(log, "the processes of this host have ended; its node stays until all hosts have finished")
            clock.sleep(_PAUSE)
        self._say_looks()
        return 1 if self._agreement.phase == FAILED else 0

    def _say_looks(self) -> int | None:
        """Says what there is to say. Returns the exit code if it is over."""
        while (found := self.look()) is not None:
            self.say(found.text)
            if found.code is not None:
                return found.code
        return None

    def _wait_until(self, is_done: Callable[[Agreement | None], bool], text: Callable[[Agreement | None], str]) -> None:
        log = WaitLog(clock.now())
        while True:
            agreement = self._attendance.agreement
            done = is_done(agreement)
            while (found := self.look()) is not None:
                if found.code is not None:
                    raise CannotStartError(found.text)
                self.say(found.text)
            if done:
                return
            self._remind(log, text(agreement))
            clock.sleep(_PAUSE)

    def _remind(self, log: WaitLog, text: str) -> None:
        """Says what is waited for, ever more rarely."""
        if log.is_due(clock.now()):
            self.say(text)
