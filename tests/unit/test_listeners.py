"""Listeners to channels, where the machine has no thread left for them."""

import pytest

from redisacc._wire.connect import connect
from redisacc._wire.pubsub import PubSub


class _Waits:
    """Starts nothing at first, and notes what is started later."""

    def __init__(self, waits):
        self.failures, self.started = 1, 0
        self._waits = waits

    def start(self, run, name):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("can't start new thread")
        self.started += 1

    def __getattr__(self, name):
        return getattr(self._waits, name)


def test_a_listener_for_which_there_was_no_thread_leaves_nothing_behind():
    transport = connect("redis://localhost:1")
    pubsub = PubSub(transport, None)
    waits = _Waits(transport.waits)
    pubsub._waits = waits
    with pytest.raises(RuntimeError, match="thread"), pubsub.listen("c", print, confirmed=False):
        pass
    assert not pubsub._subscriptions
    with pubsub.listen("c", print, confirmed=False):
        assert waits.started == 1
