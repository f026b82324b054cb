"""This host at the meeting: it shows that it lives, and reads what is agreed. The meeting host writes it, too."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import redis

from redisacc._clock import clock
from redisacc._text import printable
from redisacc._wire import forks
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.agreement import (
    CAME,
    FAILED,
    FINISHED,
    MEETS,
    READY,
    STARTING,
    Agreement,
    Host,
    MeetingError,
    Member,
    Terms,
    advance,
    begin,
    nodes_started,
)
from redisacc.tools.launch.hosts.meeting_point import LATE, LEASE, Meet, MeetingPoint
from redisacc.tools.launch.hosts.news import News, Seen
from redisacc.tools.launch.run import Look

# Seconds between two beats, usually and before the training begins.
_BEAT = 0.5
_EARLY_BEAT = 0.2
# Within this many seconds, hosts that live have told an empty meeting point so.
_SETTLED = 1.5
# The exit code of the run in the phases that end it.
_CODES = {FINISHED: 0, FAILED: 1}


@dataclasses.dataclass(eq=False)
class Attendance:
    """Tells the meeting point twice a second that this host lives, in a thread.

    Attributes:
        meet: the address of the meeting point, as the command says it.
        point: the meeting point.
        host: what this host says about itself. It has come already.
        terms: what the command says.
        form: makes the nodes of all hosts a cluster, on the meeting host.
        agreement: the latest one. None before there is one.
        hosts: what each host that is alive says about itself, by its name.
        error: why this host cannot take part any more. None as long as it can.
        is_silent: whether the meeting point does not answer.
    """

    meet: Meet
    point: MeetingPoint
    host: Host
    terms: Terms
    form: Callable[[Agreement], None]

    is_silent = False

    def __post_init__(self) -> None:
        self.agreement: Agreement | None = None
        self.hosts: dict[str, Host] = {}
        self.error: str | None = None
        self._forming: threading.Thread | None = None
        # The members whose nodes are a cluster.
        self._formed: tuple[Member, ...] | None = None
        self._lock = threading.Lock()
        self._looks: queue.SimpleQueue[Look] = queue.SimpleQueue()
        self._news = News(str(self.meet), self.terms)
        self._late: set[str] = set()
        self._answered_at = self._empty_at = clock.now()
        self._stops = forks.event()
        self._thread = threading.Thread(target=self._run, name="redisacc-host", daemon=True)
        self._thread.start()

    def tell(self, **changes: Any) -> None:
        """Changes what this host says about itself."""
        with self._lock:
            self.host = self.host._replace(**changes)

    def look(self) -> Look | None:
        """Returns what has happened, None if nothing has. Never blocks."""
        try:
            return self._looks.get_nowait()
        except queue.Empty:
            return None

    @property
    def lacks_hosts(self) -> bool:
        """Whether a host that has a place may be gone, or is not back yet."""
        names = set() if self.agreement is None else set(self.agreement.names)
        is_late = clock.now() - self._answered_at >= LATE
        return is_late or bool(names & (self._late | self._news.away | names.difference(self.hosts)))

    def leave(self) -> None:
        """Ends the thread, and says that this host is gone. Blocks for a few seconds at most."""
        self._stops.set()
        self._thread.join()
        with contextlib.suppress(redis.RedisError, MeetingError):
            if self.host.role == MEETS and self.agreement is not None and self.agreement.phase in _CODES:
                # Hosts whose command has ended have read the end of the training within this time.
                deadline = clock.now() + LEASE
                while set(self.point.look()[1]) - {self.host.name} and clock.now() < deadline:
                    clock.sleep(0.1)
            if self.error is None:
                self.point.leave(self.host.name)
        self.point.close()

    def _run(self) -> None:
        while not self._stops.is_set() and self.error is None:
            try:
                self._beat()
                self._answered()
            except redis.WatchError:
                # Another host wrote meanwhile.
                continue
            except redis.AuthenticationError:
                self._fail(f"the meeting point at {self.meet} no longer accepts the password")
            except (redis.RedisError, MeetingError) as error:
                self._not_answered(error)
            is_early = self.agreement is None or self.agreement.phase != READY
            self._stops.wait(_EARLY_BEAT if is_early else _BEAT)

    def _beat(self) -> None:
        with self._lock:
            host = self.host
        found = self.point.beat(host, self.agreement)
        if found.is_taken:
            self._fail(f"another command runs as host {host.name}: each host needs its own --host-name")
            return
        if found.holder is None or found.holder.run != host.run:
            self._empty_at = clock.now()
        settled = clock.now() - self._empty_at >= _SETTLED
        agreement = found.agreement
        if host.role == MEETS and settled:
            agreement = self._lead(agreement, found.hosts)
            if agreement is not None and agreement is not found.agreement:
                self.point.write(agreement)
        self._read(agreement, host)
        if self.error is None:
            self.agreement, self.hosts, self._late = agreement, found.hosts, found.late
            code = None if agreement is None else _CODES.get(agreement.phase)
            for line in self._news.lines(Seen(agreement, found.hosts), settled=settled):
                self._looks.put(Look(printable(line), code))

    def _lead(self, agreement: Agreement | None, hosts: dict[str, Host]) -> Agreement | None:
        if agreement is None:
            return begin(hosts, self.terms)
        if agreement.terms != self.terms.text:
            # Which ends this command.
            return agreement
        after = advance(agreement, hosts, self.terms, formed=self._formed)
        if after.phase == STARTING and nodes_started(after, hosts) and self._forming is None:
            self._forming = threading.Thread(target=self._run_form, args=(after,), daemon=True)
            self._forming.start()
        return after

    def _run_form(self, agreement: Agreement) -> None:
        try:
            self.form(agreement)
            self._formed = agreement.members
        except ServerError as error:
            # If a host was gone meanwhile, they are formed again when it is back.
            now = self.agreement
            if now is not None and now.members == agreement.members and nodes_started(now, self.hosts):
                self._fail(str(error))
        self._forming = None

    def _read(self, agreement: Agreement | None, host: Host) -> None:
        known = self.agreement
        if known is None or agreement is None or host.name not in known.names:
            return
        if host.stage != CAME and known.training != agreement.training:
            self._fail(f"another run has begun at {self.meet}")
        elif host.name not in agreement.names:
            self._fail(f"another host has taken the place of host {host.name}")

    def _answered(self) -> None:
        self._answered_at = clock.now()
        if self.is_silent:
            self.is_silent = False
            self._looks.put(Look(f"the meeting point at {self.meet} answers again"))

    def _not_answered(self, error: Exception) -> None:
        if not self.is_silent and clock.now() - self._answered_at >= LEASE:
            self.is_silent = True
            works = self.agreement is not None and self.agreement.phase == READY
            what = "Processes continue, without news of other hosts," if works else "All hosts wait"
            text = f"the meeting point at {self.meet} does not answer ({printable(str(error), 200)}). {what} until"
            self._looks.put(Look(f"{text} the same command runs on its host again"))

    def _fail(self, error: str) -> None:
        self.error = error
        self._looks.put(Look(error, 1))
