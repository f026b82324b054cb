"""This host at the meeting: it shows that it lives, and reads what was agreed."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from typing import Any

import redis

from redisacc._clock import clock
from redisacc._text import printable
from redisacc._wire import forks
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.coordinator import Coordinator, TermsError
from redisacc.tools.launch.hosts.documents import (
    FAILED,
    FINISHED,
    GATHERING,
    READY,
    Agreement,
    DocumentError,
    Host,
)
from redisacc.tools.launch.hosts.events import LAST, line_of
from redisacc.tools.launch.hosts.meeting_point import LEASE, Meet, MeetingPoint
from redisacc.tools.launch.run import Look

__all__ = ["Attendance"]

# Seconds between two beats, usually and before the training begins.
_BEAT = 0.5
_EARLY_BEAT = 0.2


class Attendance:
    """Tells the meeting point twice a second that this host lives, in a thread.

    Args:
        meet: the address of the meeting point, as the command says it.
        point: the meeting point.
        host: what this host says about itself. It has come already.
        coordinator: on the meeting host, what keeps the agreement.

    Attributes:
        agreement: the latest one. None before there is one.
        error: why this host cannot take part any more. None as long as it can.
    """

    def __init__(self, meet: Meet, point: MeetingPoint, host: Host, coordinator: Coordinator | None) -> None:
        self.agreement: Agreement | None = None
        self.error: str | None = None
        self._meet = meet
        self._point = point
        self._host = host
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._looks: queue.SimpleQueue[Look] = queue.SimpleQueue()
        self._last_event = 0
        self._answered_at = clock.now()
        self._is_silent = False
        self._stops = forks.event()
        self._thread = threading.Thread(target=self._run, name="redisacc-host", daemon=True)
        self._thread.start()

    @property
    def host(self) -> Host:
        """What this host says about itself."""
        return self._host

    @property
    def is_silent(self) -> bool:
        """Whether the meeting point does not answer."""
        return self._is_silent

    def tell(self, **changes: Any) -> None:
        """Changes what this host says about itself."""
        with self._lock:
            self._host = dataclasses.replace(self._host, **changes)

    def look(self) -> Look | None:
        """Returns what has happened, None if nothing has. Never blocks."""
        try:
            return self._looks.get_nowait()
        except queue.Empty:
            return None

    def leave(self) -> None:
        """Ends the thread, and says that this host is gone. Blocks for a few seconds at most."""
        self._stops.set()
        self._thread.join()
        with contextlib.suppress(redis.RedisError):
            if (
                self._coordinator is not None
                and self.agreement is not None
                and self.agreement.phase in (FINISHED, FAILED)
            ):
                self._coordinator.say_farewell(self._point)
            if self.error is None:
                self._point.leave(self._host.name)
        self._point.close()

    def _run(self) -> None:
        while not self._stops.is_set() and self.error is None:
            try:
                self._beat()
                self._answered()
            except redis.AuthenticationError:
                self._fail(f"the meeting point at {self._meet} does not accept the password any more")
            except (redis.RedisError, DocumentError) as error:
                self._not_answered(error)
            except (ServerError, TermsError) as error:
                self._fail(str(error))
            is_early = self.agreement is None or self.agreement.phase != READY
            self._stops.wait(_EARLY_BEAT if is_early else _BEAT)

    def _beat(self) -> None:
        read = self._point.agreement()
        known = self.agreement
        with self._lock:
            host = self._host
        if known is not None and known.phase == READY and (read is None or read.training != known.training):
            # The meeting host has returned without it.
            host = dataclasses.replace(host, seen=known)
        if not self._point.renew(host):
            self._fail(f"another command has come as host {host.name}: each host needs a --host-name of its own")
            return
        if self._coordinator is not None:
            read = self._coordinator.beat(self._point, is_empty=read is None)
        if read is not None:
            self._read(read)

    def _read(self, read: Agreement) -> None:
        known = self.agreement
        if known is not None and known.training != read.training:
            if read.phase == GATHERING or self._coordinator is not None:
                # It has not heard of the training yet; or this host is the one that has just heard of it.
                self.agreement = known if self._coordinator is None else read
                return
            self._fail(f"another training has begun at {self._meet}")
            return
        name = self._host.name
        if known is not None and known.first_worker_of(name) is not None and read.first_worker_of(name) is None:
            self._fail(f"another host has taken the place of host {name}")
            return
        self._say_events(known, read)
        self.agreement = read

    def _say_events(self, known: Agreement | None, read: Agreement) -> None:
        latest = read.events[-1].number if read.events else 0
        if known is None and read.phase == READY:
            # They happened before this host came, or came back.
            self._last_event = latest
        elif known is not None and known.meeting != read.meeting:
            self._last_event = 0
        for event in read.events:
            if event.number > self._last_event:
                line = printable(line_of(event, read, str(self._meet)))
                self._looks.put(Look(line, is_over=event.kind in LAST, code=LAST.get(event.kind, 1)))
        self._last_event = latest

    def _answered(self) -> None:
        self._answered_at = clock.now()
        if self._is_silent:
            self._is_silent = False
            self._looks.put(Look(f"the meeting point at {self._meet} answers again", is_over=False))

    def _not_answered(self, error: Exception) -> None:
        if not self._is_silent and clock.now() - self._answered_at >= LEASE:
            self._is_silent = True
            text = (
                f"the meeting point at {self._meet} does not answer ({printable(str(error), 200)}). Processes "
                "continue; what happens on other hosts is not heard until it is back"
            )
            self._looks.put(Look(text, is_over=False))

    def _fail(self, error: str) -> None:
        self.error = error
        self._looks.put(Look(error, is_over=True))
