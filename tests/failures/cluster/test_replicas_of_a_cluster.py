"""Replicas of a cluster confirm what its masters have done."""

import contextlib
import os
import signal

import pytest
from support.proxy import ClusterProxy

import redisacc


@pytest.mark.thorough
def test_a_round_is_confirmed_over_whatever_connection(make_cluster, durations):
    """WAIT of Valkey knows only what its own connection wrote, and another one may have taken the round."""
    durations(replication=0.5)
    master, replica = make_cluster(1, 1, dir=None, durable=False).nodes
    with (
        contextlib.closing(ClusterProxy([master.port])) as proxy,
        redisacc.ConditionalAccumulator("int32", [8], "w", redis=proxy.where, min_replicas=1) as acc,
    ):
        assert acc.apply_grad([1] * 8)
        proxy.before("leave", lambda: master.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        # It is connected, but confirms nothing.
        os.kill(replica.pid, signal.SIGSTOP)
        try:
            with pytest.raises(redisacc.NotReplicatedError, match="taken"):
                acc.take_grad(1, timeout=20)
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        assert proxy.sent.count("leave") > 1
        with acc.recover() as found:
            assert found.gradient.tolist() == [1] * 8
