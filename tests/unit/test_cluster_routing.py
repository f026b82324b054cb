"""Where batches go, by nodes with scripted replies."""

import pytest

from redisacc._clock import running_time
from redisacc._wire import cluster as cluster_module
from redisacc._wire.cluster import Cluster, UnreachableNodeError
from redisacc._wire.faults import BrokenError, ReplyError, SilentError
from redisacc._wire.slot_map import Address, key_slot

A, B, C = (Address("10.0.0.1", port) for port in (7000, 7001, 7002))
SLOT = key_slot("k")
KEYS = [f"{{k}}{number}" for number in range(9)]


def owned_by(address):
    return [[0, 16383, [address.host.encode(), address.port, b"id"]]]


class ScriptedNode:
    """A node that replies to each batch with the next entry of its script: a function of the commands, or an error."""

    def __init__(self, address):
        self.address = str(address)
        self.reached, self.tls = True, False
        self.map = None
        self.script = []
        self.got = []

    def exchange(self, commands, deadline):
        assert deadline > running_time() - 1
        if [tuple(command) for command in commands] == [("CLUSTER", "SLOTS")]:
            if isinstance(self.map, Exception):
                raise self.map
            return [self.map]
        self.got.append([tuple(command) for command in commands])
        reply = self.script.pop(0) if self.script else [b"+"] * len(commands)
        if isinstance(reply, Exception):
            raise reply
        assert len(reply) == len(commands)
        return reply


@pytest.fixture
def nodes(monkeypatch):
    made = {address: ScriptedNode(address) for address in (A, B, C)}
    for node in made.values():
        node.map = owned_by(A)
    monkeypatch.setattr(cluster_module, "Node", lambda pool, losses, address, **_: made[pool])
    return made


@pytest.fixture
def cluster(nodes):
    return Cluster([A, B], lambda address: address)


def gets(*numbers):
    return [("GET", KEYS[number]) for number in numbers]


def exchange(cluster, commands):
    return cluster.exchange(commands, running_time() + 5)


def moved(to):
    return ReplyError(f"MOVED {SLOT} {to}")


def ask(to):
    return ReplyError(f"ASK {SLOT} {to}")


def test_a_batch_goes_to_the_owner(cluster, nodes):
    nodes[A].map = owned_by(B)
    assert exchange(cluster, [("TIME",), *gets(0, 1)]) == [b"+"] * 3
    assert nodes[B].got == [[("TIME",), *gets(0, 1)]]
    assert nodes[A].got == []


def test_a_batch_goes_on_from_the_command_that_was_moved(cluster, nodes):
    """What was executed behind it is sent again."""
    nodes[B].map = owned_by(B)
    nodes[A].script = [[b"0", moved(B), b"late", moved(B)]]
    nodes[B].script = [[b"1", b"2", b"3"]]
    assert exchange(cluster, gets(0, 1, 2, 3)) == [b"0", b"1", b"2", b"3"]
    assert nodes[B].got == [gets(1, 2, 3)]
    # The map was read again.
    exchange(cluster, gets(4))
    assert nodes[B].got[1:] == [gets(4)]
    assert len(nodes[A].got) == 1


def test_each_command_needs_its_own_asking(cluster, nodes):
    nodes[A].script = [[b"0", ask(B), ask(B), b"late"], [b"3"]]
    nodes[B].script = [[b"OK", b"1", b"OK", b"2"]]
    assert exchange(cluster, gets(0, 1, 2, 3)) == [b"0", b"1", b"2", b"3"]
    asking = ("ASKING",)
    assert nodes[B].got == [[asking, gets(1)[0], asking, gets(2)[0]]]
    # The owner is still the owner, and what it executed too early is sent again.
    assert nodes[A].got == [gets(0, 1, 2, 3), gets(3)]


def test_a_slot_that_arrives_while_it_is_asked_for(cluster, nodes):
    nodes[A].script = [[ask(B), ask(B)]]
    nodes[B].script = [[b"OK", b"0", b"OK", moved(A)]]
    assert exchange(cluster, gets(0, 1)) == [b"0", b"+"]
    assert nodes[A].got == [gets(0, 1), gets(1)]


def test_noscript_needs_another_asking(cluster, nodes):
    """The transport sends EVAL after it, which takes the same way."""
    nodes[A].script = [[ask(B)], [ask(B)]]
    nodes[B].script = [[b"OK", ReplyError("NOSCRIPT no matching script")], [b"OK", [b"done"]]]
    found = exchange(cluster, [("EVALSHA", "0" * 40, 1, KEYS[0])])
    assert found[0].code == "NOSCRIPT"
    assert exchange(cluster, [("EVAL", "return 1", 1, KEYS[0])]) == [[b"done"]]
    assert [batch[0] for batch in nodes[B].got] == [("ASKING",)] * 2


def test_other_refusals_are_replies(cluster, nodes):
    nodes[A].script = [[b"0", ReplyError("WRONGTYPE")]]
    found = exchange(cluster, gets(0, 1))
    assert found[0] == b"0"
    assert found[1].code == "WRONGTYPE"


def test_nodes_that_do_not_agree_are_asked_again_later(cluster, nodes):
    nodes[A].script = [[moved(B)]] * 20
    nodes[B].script = [[moved(A)]] * 20
    nodes[B].map = owned_by(B)
    with pytest.raises(ReplyError) as failure:
        exchange(cluster, gets(0))
    assert failure.value.code == "TRYAGAIN"
    assert len(nodes[A].got) + len(nodes[B].got) < 12


@pytest.mark.parametrize("error", [BrokenError("gone"), SilentError("silent"), ReplyError("LOADING")])
def test_after_a_failure_another_node_is_asked_for_the_map(cluster, nodes, error):
    exchange(cluster, gets(0))
    nodes[A].script, nodes[A].map = [error], BrokenError("gone")
    nodes[B].map = owned_by(B)
    with pytest.raises((BrokenError, ReplyError)) as failure:
        exchange(cluster, gets(0))
    assert isinstance(failure.value, SilentError) == isinstance(error, SilentError)
    # The next attempt.
    assert exchange(cluster, gets(0)) == [b"+"]
    assert nodes[B].got == [gets(0)]


def test_a_slot_without_an_owner_is_down(cluster, nodes):
    nodes[A].map = nodes[B].map = [[0, 0, [b"10.0.0.1", 7000]]]
    with pytest.raises(ReplyError, match=f"owns slot {SLOT}") as failure:
        exchange(cluster, gets(0))
    assert failure.value.code == "CLUSTERDOWN"
    # It is asked for each time, because the owner may come back.
    nodes[A].map = nodes[B].map = owned_by(A)
    assert exchange(cluster, gets(0)) == [b"+"]


def test_a_node_outside_of_the_cluster_is_passed_over(cluster, nodes):
    nodes[A].map, nodes[B].map = [], owned_by(C)
    assert exchange(cluster, gets(0)) == [b"+"]
    assert nodes[C].got == [gets(0)]


def test_a_node_that_cannot_be_reached_where_it_says(cluster, nodes):
    nodes[A].map = nodes[B].map = owned_by(C)
    nodes[C].reached = False
    nodes[C].script = [BrokenError("connection refused")]
    with pytest.raises(
        UnreachableNodeError,
        match=r"10\.0\.0\.1:7002.* announces a wrong address: set cluster-announce-ip, or cluster-announce-hostname",
    ):
        exchange(cluster, gets(0))


def test_commands_in_several_slots(cluster, nodes):
    low, high = sorted(["k", "other"], key=key_slot)
    bound = key_slot(low)
    nodes[A].map = [[0, bound, [b"10.0.0.1", 7000]], [bound + 1, 16383, [b"10.0.0.1", 7001]]]
    nodes[A].script, nodes[B].script = [[b"1", b"3"]], [[b"2"]]
    assert exchange(cluster, [("GET", low), ("GET", high), ("STRLEN", low)]) == [b"1", b"2", b"3"]


def test_every_master_once(cluster, nodes):
    nodes[A].map = [[0, 99, [b"10.0.0.1", 7000]], [100, 16383, [b"10.0.0.1", 7002]]]
    found, _ = cluster.exchange_with_masters([("PING",)], running_time() + 5)
    assert found == {str(A): [b"+"], str(C): [b"+"]}


def two_batches():
    other = "{other}"
    return [[("SET", "{k}0", b"a"), ("STRLEN", "{k}0")], [("SET", other, b"b")]]


WAIT = ("WAIT", 1, 5000)


def exchange_together(cluster, batches, after=(WAIT,)):
    return cluster.exchange_together(batches, after, running_time() + 5)


def test_batches_of_a_node_travel_together_and_wait_once(cluster, nodes):
    one, other = two_batches()
    nodes[A].script = [[b"OK", 1, b"OK", 2]]
    assert exchange_together(cluster, [one, other]) == [[b"OK", 1, 2], [b"OK", 2]]
    assert nodes[A].got == [[*one, *other, WAIT]]


def test_each_batch_waits_by_itself_if_a_slot_has_moved(cluster, nodes):
    """The first connection has not written everything, so no single WAIT speaks for all."""
    one, other = two_batches()
    nodes[A].script = [[moved(B), moved(B), b"OK", 7]]
    nodes[B].map = owned_by(B)
    cluster.owner_of("k", running_time() + 5)
    nodes[A].map = owned_by(B)
    nodes[A].script.append([moved(B), moved(B), 7])
    nodes[B].script = [[b"OK", 1, 2], [b"OK", 3]]
    assert exchange_together(cluster, [one, other]) == [[b"OK", 1, 2], [b"OK", 3]]
    assert nodes[A].got == [[*one, *other, WAIT], [*one, WAIT]]
    assert nodes[B].got == [[*one, WAIT], [*other, WAIT]]


def test_batches_that_were_grouped_by_an_old_map_do_not_travel_together(cluster, nodes):
    one, other = two_batches()
    slot = key_slot("{other}")
    first, last = min(SLOT, slot), max(SLOT, slot)
    at = {SLOT: A, slot: B}
    nodes[A].map = [
        [0, first, [at[first].host.encode(), at[first].port, b"id"]],
        [first + 1, 16383, [at[last].host.encode(), at[last].port, b"id"]],
    ]
    nodes[A].script, nodes[B].script = [[b"OK", 1, 2]], [[b"OK", 3]]
    assert exchange_together(cluster, [one, other]) == [[b"OK", 1, 2], [b"OK", 3]]
    assert (nodes[A].got, nodes[B].got) == ([[*one, WAIT]], [[*other, WAIT]])
