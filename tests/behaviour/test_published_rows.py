"""Parameters of which only rows are published: what is stored is listed, so that it can be removed."""

from __future__ import annotations

import numpy as np
import pytest
import redis

import redisacc


@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 0.8, 1.0])
def test_every_part_that_stays_is_removed_with_the_parameters(client: redis.Redis, share: float) -> None:
    generator = np.random.default_rng(1)
    table = np.zeros((100, 8), np.float32)
    with redisacc.Parameters("rows", redis=client) as weights, redisacc.Parameters("rows", redis=client) as reader:
        weights.publish({"table": table, "bias": np.zeros(2)}, 0)
        for step in range(1, 9):
            rows = generator.permutation(100)[: int(share * 100)]
            table[rows] += step
            weights.publish({"table": table, "bias": np.zeros(2)}, step, changed={"table": rows})
            found = reader.latest()
            assert found is not None
            assert found[1]["table"].tolist() == table.tolist()
        weights.delete()
    # Parts of earlier versions expire. Nothing else is left.
    assert [key for key in client.keys("redisacc:{rows}*") if client.ttl(key) < 0] == []
