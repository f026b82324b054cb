"""A clock that stops while this process does not run: suspended by a signal, or with its virtual machine.

The library's own time limits are measured on this clock. Otherwise, a process that was suspended for longer than a
limit would give up when it continues, although the server was well all the time. Users' timeouts are measured in real
time.
"""

from __future__ import annotations

import time

# The clock advances by this much at most between two looks at it, in seconds: if more time has passed, the process was
# stopped. Everything that waits looks more often, or says how long it has waited.
LONGEST_GAP = 1.0

# When somebody looked last, on time.monotonic()'s clock, and for how long the process has been stopped. Threads replace
# both together, without a lock, which a fork could leave locked: if two of them notice the same gap, they agree.
_state = time.monotonic(), 0.0


def running_time(waited: float = 0.0) -> float:
    """Returns for how many seconds this process has been running, counted from an arbitrary moment.

    Args:
        waited: for how many seconds the caller may have waited, in one go, since it looked last.
    """
    global _state  # noqa: PLW0603
    seen, stopped = _state
    now = time.monotonic()
    if now - seen > LONGEST_GAP:
        stopped += max(now - seen - max(LONGEST_GAP, waited), 0.0)
    _state = now, stopped
    return now - stopped
