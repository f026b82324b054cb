"""The clock of this process, by which leases, pauses and deadlines are measured. Tests move it.

A script on the server has a clock of its own, and so have these, which stay real:

- ``running_time``, by which a server is silent: it had no time to answer while a test moved the clock.
- Handshakes and ticks of sockets, and the clean-up of a cancelled call: they wait for bytes, and for other code.
- ``redisacc.embedded``, and the deadlines that ``_launch`` gives it: its processes start and stop in real time.
- Durations that are reported (``time.perf_counter``), and the comparison of two machines' clocks in ``doctor``.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Time as this process sees it. Its attributes are the functions of ``time``, so that a call costs no more.

    Attributes:
        now: returns the time of a clock that never goes back, in seconds.
        time: returns the time in seconds since 1970.
        sleep: blocks the thread for some seconds.
    """

    __slots__ = ("now", "sleep", "time")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.time: Callable[[], float] = time.time
        self.sleep: Callable[[float], object] = time.sleep


clock = Clock()
