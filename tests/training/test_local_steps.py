"""Workers that make steps alone, and apply how far their weights have moved (DiLoCo)."""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import support
from support.local_worker import INNER, OUTER, START, exact, simulate
from support.selection import thorough
from support.training_options import grouped
from support.warm_python import WarmPython

import redisacc
import redisacc.asyncio
from redisacc.optim import SGD

PROGRAM = Path(support.__file__).with_name("local_worker.py")
pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def join(real_client):
    """Opens a process's side of a training; all are closed when the test ends."""
    opened = []

    def open_it(parameters=START, optimizer=INNER, every=3, outer=OUTER, **options):
        given = grouped({"workers": 1, "redis": real_client, **options})
        local = redisacc.LocalSteps(optimizer, every, outer)
        opened.append(redisacc.Training("train", parameters, optimizer=local, **given))
        return opened[-1]

    yield open_it
    for one in opened:
        one.close()


def train(one, until, gradient=exact):
    """Runs the loop of a process. Returns the steps that it saw."""
    steps = []
    for step, found in one.steps(until=until):
        steps.append(step)
        one.apply(gradient(one.number, step, found))
    return steps


def test_it_is_what_plain_arithmetic_says(join, background, real_client):
    every = [join(workers=2) for _ in range(2)]
    running = [background(train, one, 12) for one in every]
    assert [one.result(60) for one in running] == [list(range(12))] * 2
    step, found = every[0].latest()
    assert step == 12
    np.testing.assert_array_equal(found["w"], simulate(12, crew=2))
    assert every[0].latest_state()[0] == 12
    # A version for three steps.
    with redisacc.Parameters("train", redis=real_client) as parameters:
        assert parameters.step() == 4


def test_one_step_alone_and_sgd_as_the_outer_optimizer_are_plain_training(join, background, real_client):
    every = [join(workers=2, every=1, outer=SGD(1.0), optimizer=SGD(0.5)) for _ in range(2)]
    for running in [background(train, one, 5) for one in every]:
        running.result(60)
    weights = START["w"]
    for step in range(5):
        weights = weights - 0.5 * (exact(0, step, {"w": weights})["w"] + exact(1, step, {"w": weights})["w"]) / 2
    step, found = every[0].latest()
    assert step == 5
    np.testing.assert_array_equal(found["w"], weights)


def test_a_worker_that_dies_begins_again_with_the_last_version(join):
    one = join(optimizer=SGD(0.5))
    for step, found in one.steps(until=6):
        if step == 4:
            break
        one.apply(exact(0, step, found))
    one.close()
    another = join(optimizer=SGD(0.5))
    assert train(another, 6) == [3, 4, 5]
    step, found = another.latest()
    assert step == 6
    another.delete()
    undisturbed = join(optimizer=SGD(0.5))
    assert train(undisturbed, 6) == list(range(6))
    np.testing.assert_array_equal(undisturbed.latest()[1]["w"], found["w"])


@pytest.mark.parametrize("leads", thorough([False, True], usual=[False]))
def test_a_kill_between_two_versions_costs_a_worker_its_state_and_others_only_time(
    real_server, join, background, until, leads
):
    """The one that replaces it makes the steps since the last version again."""

    def start(killed_at):
        arguments = [str(PROGRAM), real_server.url, "1", str(killed_at)]
        return WarmPython(arguments, stderr=sys.stderr, text=True)

    if leads:
        killed = start(4)
        assert killed.stdout.readline() == "0\n"
    other = join(workers=2, number=0)
    running = background(train, other, 9)
    if not leads:
        until(lambda: other.leads)
        killed = start(4)
        assert killed.stdout.readline() == "0\n"
    # That is in the middle of the second version.
    with killed.stdout:
        assert killed.stdout.read().split() == ["1", "2", "3", "4"]
    assert killed.wait() == -signal.SIGKILL
    assert running.running
    assert other.latest()[0] == 3
    again = start(-1)
    with again.stdout:
        assert again.stdout.read().split() == ["3", "4", "5", "6", "7", "8"]
    assert again.wait() == 0
    assert running.result(60) == list(range(9))
    np.testing.assert_array_equal(other.latest()[1]["w"], simulate(9, crew=2, killed=(1, 1)))


def test_a_schedule_gets_the_steps_of_the_loop(join):
    asked = []
    one = join(optimizer=SGD(lambda step: asked.append(step) or 0.5))
    assert train(one, 6) == asked == list(range(6))


def test_what_travels_with_the_difference(join, real_client):
    logged = []
    one = join(log=lambda step, metrics: logged.append((step, metrics)))
    results = []
    for step, found in one.steps(until=6):
        results.append(one.apply(exact(0, step, found), weight=step + 1, metrics={"loss": float(step)}))
        assert one.apply(exact(0, step, found)).outcome == "repeated"
    assert [(result.outcome, result.global_step, result.num_accumulated) for result in results] == [
        ("applied", 0, 0),
        ("applied", 0, 0),
        ("applied", 0, 1),
        ("applied", 1, 0),
        ("applied", 1, 0),
        ("applied", 1, 1),
    ]
    # Means by weight: (0 * 1 + 1 * 2 + 2 * 3) / 6, and (3 * 4 + 4 * 5 + 5 * 6) / 15.
    assert logged == [(2, {"loss": 8 / 6}), (5, {"loss": pytest.approx(62 / 15)})]
    assert [(past.step, past.metrics) for past in one.history()] == logged


def test_differences_have_the_mean_weight_of_their_steps(join, background):
    def work(one):
        for step, _ in one.steps(until=3):
            if one.number == 0:
                one.apply({"w": np.ones(3)}, weight=3.0)
            elif step == 1:
                one.apply({"w": np.zeros(3)}, weight=1.0)

    every = [join(workers=2, optimizer=SGD(1.0), outer=SGD(1.0)) for _ in range(2)]
    for running in [background(work, one) for one in every]:
        running.result(60)
    # One of them moves by 3 steps of 1, with three quarters of the weight, however many gradients the other one has.
    np.testing.assert_array_equal(every[0].latest()[1]["w"], START["w"] - 3 * 0.75)


def test_steps_without_a_gradient_move_nothing(join):
    one = join(optimizer=SGD(1.0), outer=SGD(1.0))
    for step, _ in one.steps(until=6):
        if step in (0, 3, 4):
            one.apply({"w": np.ones(3)})
    np.testing.assert_array_equal(one.latest()[1]["w"], START["w"] - 3)


def test_a_worker_leaves_a_version_that_others_have_replaced(join, background, until, durations):
    durations(look_every=0.0)
    slow, fast = join(), join()
    seen = []
    for step, found in slow.steps(until=9):
        seen.append(step)
        if step == 1:
            # It leads the training, and the other worker makes two versions meanwhile.
            other = fast.steps(until=9)
            for ahead, weights in other:
                if ahead == 6:
                    break
                fast.apply(exact(1, ahead, weights))
            other.close()
        slow.apply(exact(0, step, found))
    assert seen == [0, 1, 6, 7, 8]


@pytest.mark.loses_data
def test_a_loss_in_the_middle_of_a_version_costs_nothing(join, durations, real_client, background):
    """A worker that left the version, because it saw the loss before it was mended, waited forever."""
    durations(look_every=0.0)
    one = join()
    seen = []

    def run():
        for step, found in one.steps(until=6):
            seen.append(step)
            if step == 4:
                real_client.flushall()
            one.apply(exact(0, step, found))

    background(run).result(60)
    assert seen == list(range(6))
    np.testing.assert_array_equal(one.latest()[1]["w"], simulate(6, crew=1))


def test_the_training_ends_in_the_middle_of_a_version(join, durations):
    durations(look_every=0.0)
    one = join(every=1000)
    seen = []
    for step, found in one.steps():
        seen.append(step)
        one.apply(exact(0, step, found))
        if step == 2:
            one.finish()
    assert seen == [0, 1, 2]
    step, found = one.latest()
    assert step == 0
    np.testing.assert_array_equal(found["w"], START["w"])


def test_a_gradient_with_nan_changes_nothing(join):
    one = join(finite=True)
    for step, found in one.steps(until=3):
        with pytest.raises(redisacc.NotFiniteError, match="at 'w' must be finite"):
            one.apply({"w": [0.0, np.nan, 0.0]})
        assert one.apply(exact(0, step, found)).outcome == "applied"
    np.testing.assert_array_equal(one.latest()[1]["w"], simulate(3, crew=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"^every must be in \[1, "),
        ({"optimizer": None}, "^optimizer of LocalSteps must be an optimizer of redisacc.optim, not 'NoneType'"),
        ({"optimizer": "adam"}, "^optimizer of LocalSteps must be an optimizer of redisacc.optim, not 'str'"),
        ({"outer": "adam"}, "^outer of LocalSteps must be an optimizer of redisacc.optim, not 'str'"),
        (
            {"optimizer": SGD(1.0, ema=0.9)},
            "must have no ema, because its state stays in each worker: pass ema to outer",
        ),
        ({"optimizer": SGD(1.0, lr_factor={"x": 2.0})}, "^pattern 'x' of lr_factor must match the path of a leaf"),
        ({"sparse": ["w"]}, "^there are no local steps with sparse leaves"),
        ({"parameters": {"w": np.zeros(2, np.int64)}}, "^the leaf 'w' must be float32 or float64 for an optimizer"),
    ],
)
def test_invalid_arguments(join, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        join(**options)


def test_invalid_calls(join):
    one = join()
    with pytest.raises(redisacc.InvalidArgumentError, match=r"apply\(\) needs the step of a loop over steps"):
        one.apply(START)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^until must be a multiple of every, 3, .*unlike 10"):
        next(one.steps(until=10))
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^begin\(\) sends a gradient for each step"):
        one.begin()
    for step, _ in one.steps(until=3):
        with pytest.raises(redisacc.InvalidArgumentError, match="gradient at 'w' must have the declared shape"):
            one.apply({"w": np.zeros(4)})
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^weight must be"):
            one.apply(START, weight=-1)
        one.apply({"w": np.full(3, step)})
