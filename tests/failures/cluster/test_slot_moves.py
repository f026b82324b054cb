"""Slots that are being moved: `redisacc doctor` names those whose target would lose them, and why."""

import os
import signal

import pytest
from support.resharding import Move, hold_back, hold_back_no_more, replication

from redisacc.tools.cli.checks.cluster import examine_moves
from redisacc.tools.cli.shared.options import transport_of


@pytest.fixture
def masters(make_cluster, until):
    """A cluster, its masters that own slots, and the replica of the second one."""
    cluster = make_cluster(2, 1, dir=None, durable=False)
    replicas = {int(replication(node)["master_port"]): node for node in cluster.nodes if is_replica(node)}
    source, target = (node for node in cluster.nodes if not is_replica(node))
    until(lambda: replication(target)["connected_slaves"] == "1")
    return cluster, source, target, replicas[target.port]


def is_replica(node):
    return replication(node)["role"] == "slave"


def slot_of(node):
    """A slot that a node owns."""
    return next(first for first, _, master, *_ in node.ask("CLUSTER", "SLOTS") if master[1] == node.port)


@pytest.mark.slow
def test_doctor_names_slots_whose_target_has_replicas_that_lag(masters, until):
    cluster, source, target, replica = masters
    transport = transport_of(cluster.url)
    finding = examine_moves(transport)
    assert (finding.status, finding.found) == ("ok", "no slot is being moved")
    move = Move(slot_of(source), source, target, [])
    move.begin()
    where = f"slot {move.slot} to 127.0.0.1:{target.port}"
    finding = examine_moves(transport)
    assert (finding.status, finding.found) == ("ok", f"being moved: {where}, whose replicas have what it has")
    hold_back(replica, target, until)
    finding = examine_moves(transport)
    assert finding.status == "warn"
    assert finding.found == f"being moved: {where}, whose replica 127.0.0.1:{replica.port} lags behind"
    assert "wait until the replicas of the new one have its keys" in finding.advice
    hold_back_no_more(replica)
    until(lambda: examine_moves(transport).status == "ok")
    move.end()
    until(lambda: examine_moves(transport).found == "no slot is being moved")


@pytest.mark.thorough
def test_doctor_names_slots_whose_target_has_no_replica(masters):
    """A master that has just been added, so that it owns no slot yet."""
    cluster, source, _, _ = masters
    target = cluster.add_master()
    transport = transport_of(cluster.url)
    slots = [slot_of(source) + n for n in range(5)]
    for slot in slots:
        Move(slot, source, target, []).begin()
    finding = examine_moves(transport)
    assert finding.status == "warn"
    named = ", ".join(map(str, slots[:3]))
    assert finding.found == f"being moved: 5 slots ({named}, …) to 127.0.0.1:{target.port}, which has no replica"


@pytest.mark.thorough
def test_doctor_names_slots_that_the_servers_move_themselves(masters, until):
    """By CLUSTER MIGRATESLOTS. The target is stopped, so that the move lasts."""
    cluster, source, target, _ = masters
    slot = slot_of(source)
    os.kill(target.pid, signal.SIGSTOP)
    try:
        source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot + 2, "NODE", node_id(source, target))
        finding = examine_moves(transport_of(cluster.url))
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert finding.status == "warn"
    named = f"slots {slot}, {slot + 1}, {slot + 2}"
    assert finding.found == f"being moved: {named} to 127.0.0.1:{target.port}, which does not answer"
    until(lambda: owns(target, slot))
    assert examine_moves(transport_of(cluster.url)).found == "no slot is being moved"


def node_id(asked, node):
    lines = asked.ask("CLUSTER", "NODES").splitlines()
    return next(line.split()[0] for line in lines if f":{node.port}@" in line)


def owns(node, slot):
    ranges = node.ask("CLUSTER", "SLOTS")
    return any(first <= slot <= last and master[1] == node.port for first, last, master, *_ in ranges)
