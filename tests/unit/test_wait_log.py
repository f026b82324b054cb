"""When a wait that lasts is logged."""

from __future__ import annotations

from redisacc._protocol.waiting.wait_log import WaitLog


def test_messages_about_a_wait_become_rarer():
    log = WaitLog(100.0)
    times = [now for now in range(100, 400) if log.is_due(float(now))]
    assert times == [105, 115, 135, 175, 235, 295, 355]
