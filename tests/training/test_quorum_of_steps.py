"""What a step waits for: everybody of a crew that grows and shrinks, or a quorum, a grace, a weight."""

import numpy as np
import pytest
from support.leaks import remaining

import redisacc
from redisacc import Quorum

HOUR = 3600


@pytest.fixture
def quorum(training):
    """Returns what the accumulator of the training says that a step needs."""
    return lambda: training.gradients().quorum()


@pytest.fixture
def gradients(training):
    """Applies a gradient under the name of a worker."""

    def apply(number, step):
        return training.gradients(worker=f"worker {number}").apply_grad({"w": [1, 10**number]}, step).outcome

    return apply


def lease(training, number, ms=HOUR * 1000):
    training.give_lease(f"worker {number}", "somebody", ms, holder=f"holder{number}")


def test_a_step_waits_for_everybody(training, background, until, quorum, gradients):
    chief = training.chief(workers="all", quorum=2)
    assert (quorum(), chief.workers) == (Quorum(2), 2)
    rounds = chief.rounds(until=3)
    leading = background(next, rounds)
    lease(training, 0)
    lease(training, 1)
    lease(training, 2)
    until(lambda: quorum() == Quorum(3))
    gradients(0, 0)
    gradients(1, 0)
    assert leading.running
    gradients(2, 0)
    assert sorted(leading.result().workers) == ["worker 0", "worker 1", "worker 2"]
    assert chief.workers == 3
    assert "workers=3" in repr(chief)
    # One dies, and its lease ends while the others are waited for.
    chief.publish(chief.parameters)
    leading = background(next, rounds)
    gradients(0, 1)
    gradients(1, 1)
    lease(training, 2, -1)
    assert sorted(leading.result().workers) == ["worker 0", "worker 1"]
    # With one worker less, the minimum holds.
    chief.publish(chief.parameters)
    lease(training, 1, -1)
    leading = background(next, rounds)
    gradients(0, 2)
    until(lambda: chief.workers == 2)
    assert leading.running
    lease(training, 3)
    gradients(3, 2)
    assert sorted(leading.result().workers) == ["worker 0", "worker 3"]
    assert training.client.hget("redisacc:{train}:parameters", "workers") == b"2"
    chief.publish(chief.parameters)


def test_the_gradient_of_one_who_has_gone_stands_in_for_nobody(training, background, until, quorum, gradients, proxy):
    for number in range(3):
        lease(training, number)
    chief = training.chief(workers="all", redis=proxy.where)
    assert quorum() == Quorum(3)
    rounds = chief.rounds(until=2)
    leading = background(next, rounds)
    until(lambda: training.client.exists("redisacc:{train}:queue"))
    gradients(2, 0)
    lease(training, 2, -1)
    gradients(0, 0)
    # Two gradients are there, and two workers. But one of them has not contributed.
    proxy.listen_anew()
    # A look scans two hashes, and what is logged of a wait three: these are several looks.
    until(lambda: proxy.sent.count("HSCAN") >= 20)
    assert (chief.workers, leading.running, quorum()) == (3, True, Quorum(3))
    gradients(1, 0)
    assert leading.result().num_accumulated == 3
    # From the next step on, it is no longer waited for.
    chief.publish(chief.parameters)
    leading = background(next, rounds)
    until(lambda: chief.workers == 2)
    gradients(0, 1)
    gradients(1, 1)
    assert leading.result().num_accumulated == 2
    chief.publish(chief.parameters)


def test_with_a_grace_nobody_is_waited_for_too_long(training, background, until, quorum, gradients):
    for number in range(3):
        lease(training, number)
    chief = training.chief(workers="all", quorum=Quorum(1, grace=HOUR))
    assert quorum() == Quorum(1, 3, HOUR)
    rounds = chief.rounds(until=2)
    leading = background(next, rounds)
    for number in range(3):
        assert leading.running
        gradients(number, 0)
    assert leading.result().num_accumulated == 3
    chief.publish(chief.parameters)
    chief.close()
    again = training.chief(workers="all", quorum=Quorum(2, grace=0.0501))
    assert quorum() == Quorum(2, 3, 0.051)
    leading = background(next, again.rounds(until=2))
    gradients(0, 1)
    gradients(1, 1)
    assert leading.result().num_accumulated == 2


def test_a_worker_that_died_on_this_machine_is_not_waited_for(training, until, quorum):
    lease(training, 0)
    training.give_lease("worker 1", "somebody", HOUR * 1000, process=training.dead_process())
    training.chief(workers="all")
    assert quorum() == Quorum(1)


def test_the_quorum_can_be_changed_while_a_chief_waits(training, background, until, quorum, gradients):
    chief = training.chief(workers=3)
    assert quorum() == Quorum(3)
    rounds = chief.rounds(until=3)
    leading = background(next, rounds)
    gradients(0, 0)
    gradients(1, 0)
    assert leading.running
    hand = training.gradients()
    hand.set_quorum(least=2)
    assert leading.result().num_accumulated == 2
    # The workers' shares of the data stay as they are.
    assert (chief.workers, training.worker(0).workers) == (3, 3)
    chief.publish(chief.parameters)
    # The chief goes back to what its program says when it is started again, or when nothing is set.
    leading = background(next, rounds)
    hand.set_quorum(least=None)
    until(lambda: quorum() == Quorum(3))
    assert leading.running
    hand.set_quorum(least=1)
    gradients(0, 1)
    leading.result()
    chief.publish(chief.parameters)
    chief.close()
    training.chief(workers=4, quorum=Quorum(2, 4, 0.5))
    assert quorum() == Quorum(2, 4, 0.5)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_a_lost_quorum_comes_back_also_if_a_weight_is_required(
    training, background, until, quorum, gradients, proxy, weight
):
    chief = training.chief(workers=2, quorum=Quorum(min_weight=weight), redis=proxy.where)

    def lose():
        """Loses it, as a failover may: a take that says a weight would do with a single gradient now."""
        training.client.hdel("redisacc:{train}", "quorum")

    lose() if weight else proxy.before("take", lose)
    leading = background(next, chief.rounds(until=1))
    until(lambda: quorum() == Quorum(2))
    gradients(0, 0)
    assert leading.running
    gradients(1, 0)
    assert leading.result().num_accumulated == 2


def test_other_changes_do_not_last_while_everybody_is_waited_for(training, background, until, quorum, gradients):
    for number in range(2):
        lease(training, number)
    chief = training.chief(workers="all")
    leading = background(next, chief.rounds(until=1))
    until(lambda: training.client.exists("redisacc:{train}:queue"))
    training.gradients().set_quorum(least=7)
    until(lambda: quorum() == Quorum(2))
    gradients(0, 0)
    gradients(1, 0)
    assert leading.result().num_accumulated == 2


def ones(number, step, parameters):
    return {"w": [1, 10**number]}


def test_the_grace_ends_when_every_worker_has_contributed(training):
    chief = training.chief(workers=1, quorum=Quorum(grace=HOUR))
    one = training.work(training.worker(0), gradient=ones)
    training.lead(chief, 2)
    assert one.result()[1] == [0, 1]


def test_a_step_needs_a_weight(training, background):
    chief = training.chief({"w": np.zeros(2)}, workers=2, quorum=Quorum(1, min_weight=3), reduction_type="MEAN")
    leading = background(training.lead, chief, 1)
    first, second = training.worker(0), training.worker(1)
    next(first.steps())
    next(second.steps())
    with pytest.raises(redisacc.InvalidArgumentError, match="weight must be"):
        first.apply({"w": [1, 1]}, weight=-1)
    assert first.apply({"w": [1, 1]}, weight=1)
    assert training.record[b"num_accumulated"] == b"1"
    assert second.apply({"w": [5, 3]}, weight=2)
    leading.result()
    assert chief.parameters["w"].tolist() == [11 / 3, 7 / 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "everybody"}, 'workers must be an integer or "all"'),
        ({"workers": 2, "quorum": 3}, r"least must be in \[1, 2\], the number of workers, not 3: a step has one"),
        ({"workers": 2, "quorum": Quorum(1, 3, 1)}, r"most must be in \[1, 2\], the number of workers, not 3"),
        ({"workers": 2, "quorum": Quorum(most=1, grace=1)}, r"most must be in \[2, "),
        ({"workers": 2, "quorum": 0}, r"quorum must be in \[1, "),
        *(
            ({"quorum": value}, "quorum must be an integer scalar")
            for value in (1.5, True, "all", (1, 2), {"least": 1})
        ),
        ({"workers": "all", "quorum": Quorum(1, 3, 1)}, "most=3 needs a number of workers"),
        ({"workers": ["all"]}, "workers must be an integer"),
    ],
)
def test_invalid_ones(training, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief({"w": np.zeros(2)}, **options)
    assert remaining(training.client) == []
