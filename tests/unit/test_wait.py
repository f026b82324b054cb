"""What a wait says when it lasts, and when it ends."""

import pytest

import redisacc
from redisacc import _clock
from redisacc._protocol.waiting.wait import WaitLog, until


def test_messages_about_a_wait_become_rarer():
    log = WaitLog(100.0)
    times = [now for now in range(100, 400) if log.is_due(float(now))]
    assert times == [105, 115, 135, 175, 235, 295, 355]


class Pauses:
    """Moves the clock instead of pausing."""

    def __init__(self, clock):
        self.every = []
        self._clock = clock
        clock.stop()

    def sleep(self, seconds):
        self.every.append(seconds)
        self._clock.advance(seconds)


def test_a_wait_says_after_five_seconds_what_it_waits_for(clock, caplog):
    pauses = Pauses(clock)

    def probe():
        return "found" if len(pauses.every) == 9 else None

    assert until(pauses, probe, every=1.0, describe=lambda: f"waiting for {len(pauses.every)}") == "found"
    assert [record.getMessage() for record in caplog.records] == ["waiting for 5"]
    assert pauses.every == [1.0] * 9


def test_a_wait_ends_at_its_deadline_or_with_the_error_of_its_check(clock):
    pauses = Pauses(clock)
    now = _clock.clock.now()
    assert until(pauses, lambda: None, every=1.0, deadline=now + 2.5) is None
    assert pauses.every == [1.0, 1.0, pytest.approx(0.5)]

    def check():
        raise redisacc.ConflictError("another is the chief")

    with pytest.raises(redisacc.ConflictError, match="another is the chief"):
        until(pauses, lambda: None, every=1.0, check=check)
