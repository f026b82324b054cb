"""How soon a process that died is started again, and when it is given up."""

from redisacc.tools.launch.restarts import STEADY, WINDOW, Restarts


def test_pauses_grow_until_it_is_given_up():
    restarts = Restarts(9)
    pauses = [restarts.pause_after(1.0, now) for now in range(10)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None]
    assert restarts.deaths == 10


def test_none_is_allowed():
    assert Restarts(0).pause_after(STEADY, 1e6) is None


def test_after_a_long_life_there_is_no_pause_and_later_ones_are_short_again():
    restarts = Restarts(6)
    lives = (1, 1, STEADY, STEADY, STEADY - 0.1, STEADY - 0.1)
    assert [restarts.pause_after(lived, now) for now, lived in enumerate(lives)] == [0.5, 1, 0, 0, 0.5, 1]


def test_a_long_life_does_not_excuse_a_death_within_the_window():
    restarts = Restarts(5)
    pauses = [restarts.pause_after(600, death * 600) for death in range(6)]
    assert pauses == [0] * 5 + [None]


def test_a_death_counts_until_it_is_as_old_as_the_window():
    times = (0, 10, WINDOW - 0.1)
    restarts = Restarts(2)
    assert [restarts.pause_after(STEADY, now) for now in times] == [0, 0, None]
    restarts = Restarts(2)
    times = (0, 10, WINDOW, WINDOW + 9)
    assert [restarts.pause_after(STEADY, now) for now in times] == [0, 0, 0, None]


def test_any_number_is_allowed():
    restarts = Restarts(10**6)
    assert [restarts.pause_after(0, now) for now in range(5000)][-1] == 30
