"""Tests of the simulated trainings: the rules of a step, machines that die, and that a seed decides everything."""

import numpy as np
import pytest

from benchmarks import choosing
from benchmarks.simulation import Machines, Problem, Setting, Training
from redisacc import Quorum

pytestmark = pytest.mark.slow

# All machines take exactly a second, and none dies.
EVEN = Machines(spread=0.0, life=1e9)
IMMORTAL = Machines(life=1e9)
# Machines are away for about as long as they live.
MORTAL = Machines(life=30.0, absence=30.0)


def run(setting, machines, seconds=60.0, seed=3):
    return Training(setting, seed, machines).run(seconds)


def test_the_seed_decides_everything():
    for setting in (Setting(Quorum(2, grace=1.0), "all"), Setting(1, max_staleness=4)):
        one, same, other = (run(setting, MORTAL, seed=seed) for seed in (1, 1, 2))
        assert (one.times, one.losses) == (same.times, same.losses)
        assert one.times != other.times


def test_backup_workers_are_dropped_unless_a_grace_waits_for_them():
    all_, some, grace = (run(setting, IMMORTAL) for setting in (Setting(8), Setting(6), Setting(Quorum(6, 8, 1e5))))
    assert all_.stale == 0 < some.stale
    assert len(some.times) > len(all_.times)
    # Nobody dies, so an endless grace ends when everybody has contributed.
    assert grace.times == all_.times


def test_a_grace_is_a_time_after_the_gradient_with_that_number():
    without, grace = run(Setting(6), IMMORTAL), run(Setting(Quorum(6, grace=0.25)), IMMORTAL)
    assert grace.times[1] == pytest.approx(without.times[1] + 0.25)


def test_late_gradients_count_up_to_the_limit():
    dropped = [run(Setting(1, max_staleness=limit), IMMORTAL).stale for limit in (0, 4, 20, None)]
    assert dropped == sorted(dropped, reverse=True)
    assert dropped[0] > dropped[1] > dropped[-1] == 0


def test_a_crew_that_shrinks_goes_on():
    fixed, elastic = run(Setting(8), MORTAL, 300.0), run(Setting(2, "all"), MORTAL, 300.0)
    assert len(elastic.times) > 2 * len(fixed.times)
    # A step of everybody who is there drops nothing but gradients of those who joined while it waited.
    assert elastic.stale < 0.1 * elastic.used


def test_the_loss_is_that_of_gradient_descent():
    problem = Problem(noise=0.0, rate=0.5)
    outcome = Training(Setting(8), 0, EVEN, problem).run(10.5)
    weights = (1 - problem.rate * problem.curvatures) ** 10
    assert outcome.losses[-1] == pytest.approx(problem.loss(weights))
    assert outcome.at(np.array([0.0, 0.5, 10.2])) == pytest.approx(
        [outcome.losses[0], outcome.losses[0], outcome.losses[-1]]
    )


def test_the_command_prints_tables(monkeypatch, tmp_path, capsys):
    drawn = []
    monkeypatch.setattr(choosing, "SECONDS", 250)
    monkeypatch.setattr(choosing, "paint_file", lambda out, name, *_, **__: drawn.append((out, name)))
    choosing.main(["--out", str(tmp_path), "--seeds", "1"])
    said = capsys.readouterr().out
    assert drawn == [(tmp_path, "choosing-waits"), (tmp_path, "choosing-staleness")]
    assert said.count("| n = 8 |") == 2
    assert "| n = 1, any |" in said
