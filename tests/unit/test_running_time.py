"""A clock that stands still while the process does not run."""

import math
from types import SimpleNamespace

import pytest
from support.rows import every_row

from redisacc import _clock as module
from redisacc._clock import LONGEST_GAP, running_time


@pytest.fixture
def pass_by(monkeypatch):
    """Lets time pass by in which nobody looks."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "_state", (1000.0, 0.0))

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_it_advances_with_time_while_somebody_looks(pass_by):
    began = running_time()
    for _ in range(100):
        pass_by(LONGEST_GAP)
        running_time()
    assert running_time() - began == 100 * LONGEST_GAP


def test_a_gap_advances_it_by_the_longest_gap(pass_by):
    began = running_time()
    for _ in range(3):
        pass_by(3600)
        assert running_time() == running_time()
    assert running_time() - began == 3 * LONGEST_GAP


@every_row("waited, advance", [(1.0, LONGEST_GAP), (30.0, 30.0), (3600.0, 3600.0), (math.inf, 3600.0)])
def test_a_wait_in_one_go_counts(pass_by, waited, advance):
    began = running_time()
    pass_by(3600)
    assert running_time(waited) - began == advance


def test_threads_that_notice_the_same_gap_count_it_once(pass_by, monkeypatch):
    """Another thread looks while this one is between reading the state and replacing it."""
    began = running_time()
    pass_by(3600)
    clock = module.time.monotonic
    times = []

    def look_elsewhere():
        monkeypatch.setattr(module.time, "monotonic", clock)
        times.append(running_time())
        return clock()

    monkeypatch.setattr(module.time, "monotonic", look_elsewhere)
    times.append(running_time())
    times.append(running_time())
    assert [time - began for time in times] == [LONGEST_GAP] * 3
