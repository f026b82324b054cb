"""The chaos of `make chaos`, for a few seconds."""

import pytest
from chaos.actor import KINDS
from chaos.run import SMALL_CREW, Chaos
from chaos.training import Training
from support.selection import thorough

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", thorough(KINDS, usual=["tree"]))
def test_nothing_is_lost_and_nothing_counted_twice(kind, everything):
    with Chaos(seed=3, kind=kind, crew=SMALL_CREW) as chaos:
        chaos.rage(12 if everything else 6)
        tale = chaos.end()
    assert tale.problems == []
    # Their number depends on the machine.
    assert chaos.done["gradients"] > 0
    assert chaos.done["rounds"] > 0


@pytest.mark.timeout(240)
@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "partitions"), [(0, None), (1, None), (0, 3), (1, 3)])
def test_nothing_is_lost_on_a_cluster(replicas, partitions):
    with Chaos(seed=6, crew=SMALL_CREW, replicas=replicas, partitions=partitions) as chaos:
        chaos.rage(15)
        tale = chaos.end()
    assert tale.problems == []
    assert chaos.done["gradients"] > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cluster", "updates"),
    thorough([(False, False), (False, True), (True, False), (True, True)], usual=[(False, True)]),
)
def test_a_training_gives_the_same_bits_as_undisturbed(cluster, updates, everything):
    """On a cluster, gradients and parameters are in partitions. Sums of two gradients would not show their order."""
    with Training(seed=1, workers=3, legs=(2, 4), cluster=cluster, updates=updates) as training:
        training.replace()
        training.disturb(20 if everything else 4)
        training.end()
    assert training.problems == []
    assert training.done["steps"] > 0
    assert training.done["two of one place: worker"] + training.done["two of one place: chief"] > 0
