"""Outages of a server, each until a process says that it waits for it."""

import threading

from support.proxy import Fault

LEADER = "redisacc-chief"


class Outages:
    """Cuts a process off from its server, which it reaches through a proxy, until it says that it waits.

    If it has a thread that leads, that thread has to say so.

    Attributes:
        number: how many outages there were.
        meanwhile: what happens until the outage ends.
    """

    def __init__(self, proxy, caplog):
        self._proxy = proxy
        self._caplog = caplog
        self._is_over = threading.Event()
        self.meanwhile = lambda: None
        self.number = 0

    def begin_after(self, requests, direction="request"):
        """Begins an outage when the process has made that many more requests."""
        self._proxy.when_it_happens = self._begin
        self._proxy.arm(Fault(direction, requests, 0, "cut"))

    def _begin(self):
        self._proxy.refuses = True
        self.number += 1
        self._caplog.clear()
        threading.Thread(target=self._end_when_it_is_noticed, daemon=True).start()
        self._proxy.cut_all()

    def _end_when_it_is_noticed(self):
        while not (self._is_noticed() or self._is_over.wait(0.01)):
            pass
        self.meanwhile()
        self._proxy.refuses = False

    def _is_noticed(self):
        leads = any(thread.name == LEADER for thread in threading.enumerate())
        said = [record for record in self._caplog.records if "trying until it is back" in record.getMessage()]
        return any(record.threadName == LEADER or not leads for record in said)

    def close(self):
        self._is_over.set()
