"""Tests of the simulated steps: what they send is what a training sends."""

from dataclasses import replace

import pytest
import redis

from benchmarks.scale.costs import Costs
from benchmarks.scale.model import Arrangement, Network, simulate
from benchmarks.scale.observation import observe
from benchmarks.scale.step import Step, automatic

pytestmark = pytest.mark.slow

COSTS = Costs(server_call=1e-5, server_in=2e-10, server_out=2e-10, delivery=3e-6, call=2e-5, message=8e-6, add=5e-11)


@pytest.mark.servers("valkey")
def test_a_step_sends_what_the_simulation_assumes(real_client):
    url = "redis://{host}:{port}/{db}".format(**real_client.connection_pool.connection_kwargs)
    step = Step(workers=2, partitions=3, nbytes=600_000)
    (found,) = observe(
        lambda: redis.Redis.from_url(url),
        [real_client],
        workers=step.workers,
        partitions=step.partitions,
        nbytes=step.nbytes,
        steps=12,
    )
    expected = step.executed()
    assert {name: found[name] for name in expected} == dict(expected)


def test_a_large_step_takes_the_time_of_its_link():
    # 8 MB through a link of 1 Gbit/s, for each of four workers.
    one = simulate(Arrangement(Step(4, 1, 8_000_000)), Network(1.0), COSTS)
    assert one.seconds == pytest.approx(4 * 8e6 / 125e6, rel=0.35)
    assert one.full.startswith("leader's link")
    nodes = simulate(Arrangement(Step(4, 4, 8_000_000), beside=True), Network(1.0), COSTS)
    assert nodes.seconds == pytest.approx(2 * 3 / 4 * 8e6 / 125e6, rel=0.35)
    # Without links, the processors are what takes time.
    assert "processor" in simulate(Arrangement(Step(4, 4, 8_000_000)), Network(float("inf")), COSTS).full
    halved = Arrangement(Step(4, 1, 8_000_000), share=0.5)
    assert simulate(halved, Network(1.0), COSTS).seconds == pytest.approx(one.seconds / 2, rel=0.1)


def test_many_small_messages_fill_the_leader():
    many = Arrangement(Step(200, 64, 2_000_000), beside=True)
    found = simulate(many, Network(100.0), replace(COSTS, scripts={"commit": (2e-4, 0.0)}), steps=3)
    assert found.full == "leader's processor"
    assert simulate(replace(many, direct=True), Network(100.0), COSTS, steps=3).seconds < found.seconds


def test_automatic_partitions_are_those_of_the_library():
    assert [automatic(nodes, 31_600_000) for nodes in (1, 8, 1000)] == [1, 8, 64]
    assert automatic(64, 600_000) == 2
    assert automatic(64, 100_000) == 1
    assert automatic(1000, 400_000_000) == 381
