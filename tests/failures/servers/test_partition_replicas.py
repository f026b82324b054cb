"""Replicas that have to confirm the parts of gradients in partitions."""

import numpy as np
import pytest
from support.proxy import Fault, proxy_before

import redisacc

pytestmark = [
    pytest.mark.servers("valkey", "redis7", "redis62"),
    pytest.mark.every_server,
]


def test_replicas_confirm_parts_in_partitions_that_were_sent_twice(pair, open_accumulator, durations):
    """The second connection finds the parts there, and its WAIT must not ask about nothing."""
    durations(replication=0.3)
    master, replica = pair
    with proxy_before(("127.0.0.1", master.port)) as proxy:
        options = {"redis": proxy.url, "reduction_type": "SUM", "min_replicas": 1, "partitions": 3}
        acc = open_accumulator("dense", "float32", [30], "w", limits=redisacc.Limits(in_place=0, inline=0), **options)
        # Otherwise, WAIT for the commit would speak for the parts, which are on the same server here.
        proxy.before("commit", replica.go_on)
        replica.stall()
        # The server has registered the attempt, and written all parts, with 3 commands each. WAIT is still waiting.
        proxy.arm(Fault("reply", 1 + 3 * 3, 0))
        with pytest.raises(redisacc.NotReplicatedError, match="counted") as failure:
            acc.apply_grad(np.ones(30, np.float32))
        assert proxy.happened()
        assert failure.value.replicas == 0
        assert acc.take_grad(1, timeout=20).tolist() == [1] * 30
