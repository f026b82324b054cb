"""The state of a worker, at each moment that the table of states in docs/explanations/concepts.md names."""

import datetime

from support.rows import every_row

from redisacc._format.entries import WorkerInfo, workers_by_state

NOW = datetime.datetime(2026, 11, 23, 12, 0, 0, tzinfo=datetime.UTC)


def ago(seconds):
    return NOW - datetime.timedelta(seconds=seconds)


def worker(name, seen, *, step=6, in_round=0, lease=None):
    """Returns a worker that was seen so many seconds ago, and whose lease lasts for so many more."""
    return WorkerInfo(name, in_round, 1, 0, ago(seen), step, None if lease is None else ago(-lease))


def state(one, *others):
    """Returns the state of a worker at step 7."""
    found = workers_by_state([one, *others], 7, NOW)
    return next(state for state, workers in found.items() if one in workers)


@every_row("seen", [0, 10, 3600])
@every_row("lease", [None, 5.0, -5.0])
def test_a_worker_whose_gradient_counts_is_in_the_round_whatever_else_holds(seen, lease):
    assert state(worker("a", seen, step=1, in_round=1, lease=lease)) == "in the round"


@every_row(
    "seen, latest, expected",
    [
        (4.999, 4.0, "expected"),
        (5.0, 4.0, "late"),
        # The others needed 20 s, so it has another 20 s.
        (40.001, 20.0, "expected"),
        (40.0, 20.0, "late"),
        # It was seen after the others.
        (30.0, 30.0, "expected"),
        (30.0, 31.0, "expected"),
    ],
)
def test_a_worker_is_late_once_it_needs_twice_as_long_as_the_others(seen, latest, expected):
    others = worker("b", latest + 1, step=7, in_round=1), worker("c", latest, step=7, in_round=1)
    for lease in (None, 1.0):
        assert state(worker("a", seen, lease=lease), *others) == expected


@every_row("seen", [0, 100, 599])
def test_nobody_is_late_in_a_round_that_has_just_begun(seen):
    assert state(worker("a", seen), worker("b", 0)) == "expected"


@every_row("step, seen, expected", [(5, 4.999, "expected"), (5, 5, "late"), (6, 500, "expected")])
def test_a_worker_without_which_a_round_was_taken_is_late(step, seen, expected):
    assert state(worker("a", seen, step=step), worker("b", 0, step=7, in_round=1)) == expected


@every_row(
    "seen, lease, expected",
    [
        (599.999, None, "expected"),
        (600, None, "gone"),
        (3600, 0.001, "expected"),
        (1, 0, "gone"),
        (1, -1, "gone"),
    ],
)
def test_a_worker_is_gone_when_its_lease_ends_or_without_one_after_ten_minutes(seen, lease, expected):
    assert state(worker("a", seen, lease=lease)) == expected


def test_those_that_were_seen_most_recently_come_first():
    found = workers_by_state([worker("a", 700), worker("b", 1), worker("c", 0), worker("d", 650)], 7, NOW)
    assert [one.name for one in found.expected] == ["c", "b"]
    assert [one.name for one in found.gone] == ["d", "a"]
