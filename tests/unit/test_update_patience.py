"""How long a chief waits for parts of an update: as long as they appear, and not for updaters that have died."""

import pytest

from redisacc._protocol.updates.patience import PATIENCE_FACTOR, Patience

LEAST_PATIENCE, LONGEST_PATIENCE, ABANDONED = 0.2, 5.0, 1.0


@pytest.fixture
def waiting(clock):
    clock.stop()
    waiting = Patience()
    waiting.begin()
    return waiting


def test_parts_that_appear_prolong_the_wait(waiting, clock):
    for _ in range(10):
        clock.advance(0.9 * LEAST_PATIENCE)
        assert not waiting.is_over([1])
        waiting.note_appeared()
    clock.advance(1.01 * LEAST_PATIENCE)
    assert waiting.is_over([1])


def test_the_usual_pause_decides(waiting, clock):
    clock.advance(0.9 * LEAST_PATIENCE)
    waiting.note_appeared()
    waiting.succeed()
    waiting.begin()
    clock.advance(0.89 * PATIENCE_FACTOR * LEAST_PATIENCE)
    assert not waiting.is_over([1])
    clock.advance(0.02 * PATIENCE_FACTOR * LEAST_PATIENCE)
    assert waiting.is_over([1])


def test_dead_updaters_are_waited_for_once_a_second(waiting, clock):
    waits = 0
    for _ in range(100):
        waiting.begin()
        if not waiting.is_over([1, 3]):
            waits += 1
            clock.advance(1.01 * LEAST_PATIENCE)
            assert waiting.is_over([1, 3])
        waiting.fail([1, 3], late=set())
        clock.advance(0.05)
    assert 2 <= waits <= 1 + 5.0 / ABANDONED
    waiting.begin()
    assert not waiting.is_over([1, 2]), "nobody abandoned part 2"


def test_late_updaters_get_more_time(waiting, clock):
    seconds = LEAST_PATIENCE
    for _ in range(10):
        waiting.fail([1, 2], late={1, 2})
        waiting.begin()
        seconds = min(2 * seconds, LONGEST_PATIENCE)
        clock.advance(0.99 * seconds)
        assert not waiting.is_over([1, 2])
    assert seconds == LONGEST_PATIENCE
