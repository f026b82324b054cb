"""Nodes of a cluster die, come back and are replaced: every gradient is counted once, and nothing hangs."""

import numpy as np
import pytest
from support.command import diagnose, run_json
from support.resharding import slot_of
from support.servers import executable

import redisacc

pytestmark = [pytest.mark.thorough]


def test_a_cluster_without_full_coverage(make_cluster, durations):
    """An accumulator without a master is an error with a remedy. The others depend on a setting of the nodes."""
    cluster = make_cluster(3, dir=None, durable=False)
    with redisacc.ConditionalAccumulator("float32", [4], "w", redis=cluster.url) as acc:
        owner = cluster.owner(acc.accumulator_ref)
        # Others would go on believing that the owner has it.
        for node in cluster.nodes:
            node.ask("CLUSTER", "DELSLOTS", slot_of(acc.accumulator_ref))
        for coverage in ("yes", "no"):
            for node in cluster.nodes:
                node.ask("CONFIG", "SET", "cluster-require-full-coverage", coverage)
            expected = "is down, or has no master for the key: see `redisacc doctor`"
            with durations(call=1.0), pytest.raises(redisacc.ServerUnavailableError, match=expected):
                acc.num_accumulated()
        elsewhere = next(name for name in "abcdefgh" if cluster.owner(f"redisacc:{{{name}}}") is not owner)
        with redisacc.ConditionalAccumulator("float32", [4], elsewhere, redis=cluster.url) as other:
            assert other.apply_grad(np.ones(4))
        finding = diagnose(cluster.url)["cluster"]
        assert (finding["status"], finding["found"].startswith("1 of 16384 slots has no master")) == ("bad", True)
        assert finding["advice"] == (
            "start the masters that are missing, or assign their slots to others: accumulators in these slots cannot "
            "be used"
        )


@pytest.mark.parametrize("program", ["valkey", "redis7", "redis62"])
def test_a_whole_life_on_every_program(program):
    with redisacc.embedded.Cluster(3, executable=executable(program)) as cluster:
        for name in "abc":
            acc = redisacc.ConditionalAccumulator("float32", [4], name, redis=cluster.url)
            with acc.events(timeout=20) as events:
                acc.apply_grad(np.ones(4))
                assert next(iter(events)).kind == "applied"
            assert acc.take_grad(1).tolist() == [1] * 4
            acc.delete()


def test_doctor_names_a_master_that_is_gone(make_cluster):
    """Within seconds, although calls would wait for it for half a minute."""
    cluster = make_cluster(3, dir=None, durable=False)
    cluster.nodes[2].kill()
    findings = [finding for finding in run_json("doctor", url=cluster.url) if finding["what"] != "trial"]
    gone = next(finding for finding in findings if finding["what"] == "cluster")
    assert gone["status"] == "bad"
    assert f"the master 127.0.0.1:{cluster.nodes[2].port} does not answer" in gone["found"]
    assert gone["advice"] == (
        "start it again, or promote a replica of it: accumulators in its slots cannot be used, and soon neither can "
        "any other"
    )
    # Of the masters that answer, what is wrong with all is one finding.
    memory = [finding["found"] for finding in findings if finding["what"] == "memory"]
    assert len(memory) == 1
    assert all(str(node.port) in memory[0] for node in cluster.nodes[:2])
    assert len(findings) == len({finding["what"] for finding in findings})
