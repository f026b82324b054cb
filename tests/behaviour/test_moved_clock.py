"""A test moves the clock: waits end, and leases of the dead run out, those of the living do not. Users pay nothing."""

import time

from redisacc._clock import Clock
from redisacc._clock import clock as the_clock


def test_the_clock_of_users_is_that_of_the_system():
    assert (the_clock.now, the_clock.time, the_clock.sleep) == (time.monotonic, time.time, time.sleep)
    assert vars(Clock)["__slots__"] == ("now", "sleep", "time")
