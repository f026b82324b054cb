"""How soon a process that died is started again, and when it is given up."""

from __future__ import annotations

from redisacc._launch.restarts import STEADY, Restarts


def test_pauses_grow_until_it_is_given_up():
    restarts = Restarts(9)
    pauses = [restarts.pause_after(1.0) for _ in range(10)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None]
    assert restarts.deaths == 10


def test_none_is_allowed():
    assert Restarts(0).pause_after(STEADY) is None


def test_a_long_life_makes_a_death_the_first_one():
    restarts = Restarts(2)
    assert [restarts.pause_after(lived) for lived in (1, 1, STEADY, STEADY, 59.9, 59.9)] == [0.5, 1, 0.5, 0.5, 1, None]


def test_any_number_is_allowed():
    restarts = Restarts(10**6)
    assert [restarts.pause_after(0) for _ in range(5000)][-1] == 30
