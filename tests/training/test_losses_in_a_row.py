"""A server that loses its data again while a chief restores them: they are restored as often as needed."""

import numpy as np
import pytest
from support.selection import thorough

pytestmark = [pytest.mark.loses_data, pytest.mark.servers("valkey")]


@pytest.fixture(autouse=True)
def _brief(durations):
    """Messages are lost as well, so whoever waits finds out when it polls."""
    durations(poll_every=0.1)


# A chief that restores a training makes fewer requests than this.
EXCHANGES = 50


@pytest.fixture
def exchanges(everything):
    """After how many requests of the chief the server loses its data again, in each step of a training."""
    return range(EXCHANGES) if everything else range(0, EXCHANGES, 3)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_outlives_losses_at_each_of_its_exchanges(training, losses, proxy, exchanges, times):
    one = training.work(training.worker(redis=proxy.url))
    chief = training.chief()
    until, after = len(exchanges) + 1, dict(enumerate(exchanges, 1))
    for taken in chief.rounds(until=until):
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
        if chief.step in after:
            losses.begin(after[chief.step], times)
    assert chief.parameters["w"].tolist() == [until, sum(range(until))]
    assert one.result(60)[1] == list(range(until))


def one_step(chief):
    rounds = chief.rounds()
    taken = next(rounds)
    chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
    rounds.close()


# Each place takes some seconds, because a chief waits until all workers have claimed what they have.
@pytest.mark.slow
@pytest.mark.parametrize("after", thorough(range(0, 60, 2), usual=[6, 14, 22, 30]))
def test_what_a_worker_hands_over_is_lost_again(training, losses, proxy, until, after):
    """A chief that begins asks a worker for what the server has lost, and loses that while it continues with it."""
    seen = []
    one = training.work(gradient=lambda _, step, parameters: seen.append(step) or {"w": [1, 1]})
    chief = training.chief()
    one_step(chief)
    until(lambda: 1 in seen)
    chief.close()
    losses.begin(after)
    chief = training.chief({"w": np.full(2, 50)}, redis=proxy.url)
    assert (chief.step, chief.parameters["w"].tolist()) == (1, [1, 1])
    training.lead(chief, 3)
    assert chief.parameters["w"].tolist() == [3, 3]
    assert one.result(60)[1][-1] == 2
