"""Slots and the map of their owners, of which a reply that nobody vouches for says."""

import pytest
from support.rows import every_row

from redisacc._wire.faults import BrokenError, ReplyError
from redisacc._wire.slot_map import SLOTS, Address, SlotMap, key_slot, redirection, slot_of, slots_of

ASKED = Address("10.0.0.1", 7000)


@every_row(
    "key, slot",
    [
        # From the specification of Redis Cluster, and from CLUSTER KEYSLOT of a Valkey 9.1.
        ("123456789", 0x31C3 % SLOTS),
        ("foo", 12182),
        (b"foo", 12182),
        ("{foo}.bar", 12182),
        ("bar{foo}{zap}", 12182),
        ("foo{{bar}}zap", key_slot("{bar")),
        # An empty tag, or one without an end, is none.
        ("foo{}{bar}", 8363),
        ("{foo", key_slot(b"{foo")),
        ("redisacc:{w}:sessions", key_slot("w")),
        ("redisacc:{Wörter}", key_slot("Wörter".encode())),
    ],
)
def test_the_slot_of_a_key(key, slot):
    assert key_slot(key) == slot


@every_row(
    "command, key",
    [
        (("GET", "foo"), "foo"),
        (("MEMORY", "USAGE", "foo"), "foo"),
        (("EVALSHA", "0" * 40, 1, "foo", "bar"), "foo"),
        (("EVAL", "return 1", 2, "{foo}1", "{foo}2"), "foo"),
        (("SPUBLISH", "{foo}:events", "x"), "foo"),
        (("EVAL", "return 1", 0), None),
        (("SCAN", 0, "MATCH", "*"), None),
        (("WAIT", 1, 100), None),
        (("PING",), None),
        (("CONFIG", "GET", "save"), None),
        (("SCRIPT", "LOAD", "return 1"), None),
    ],
)
def test_the_slot_of_a_command(command, key):
    assert slot_of(command) == (None if key is None else key_slot(key))


def test_commands_without_a_key_have_no_slot_of_their_own():
    assert slots_of([("TIME",), ("GET", "foo"), ("WAIT", 1, 1), ("GET", "{foo}2")]) == {key_slot("foo")}


def test_the_owners_in_a_reply():
    reply = [
        [8000, 16383, [b"10.0.0.2", 7001, b"id", [b"hostname", b"b"]], [b"10.0.0.4", 7003, b"id"]],
        [0, 99, [b"", 7000, b"id"]],
        [100, 7999, [None, 7002, b"id"], ["?", 7009, b"id"]],
    ]
    found = SlotMap.of_reply(reply, ASKED)
    assert [found.owner(slot) for slot in (0, 99)] == [Address("10.0.0.1", 7000)] * 2
    assert [found.owner(slot) for slot in (100, 7999)] == [Address("10.0.0.1", 7002)] * 2
    assert [found.owner(slot) for slot in (8000, 16383)] == [Address("10.0.0.2", 7001)] * 2
    assert found.uncovered == 0
    assert found.masters == (Address("10.0.0.1", 7000), Address("10.0.0.1", 7002), Address("10.0.0.2", 7001))
    # A replica without an address plays no role.
    assert found.nodes == (*found.masters, Address("10.0.0.4", 7003))


def test_slots_without_an_owner():
    found = SlotMap.of_reply([[10, 19, [b"a", 1]], [30, 39, [b"b", 2]]], ASKED)
    assert [found.owner(slot) for slot in (0, 9, 20, 29, 40, 16383)] == [None] * 6
    assert found.uncovered == SLOTS - 20
    assert SlotMap.of_reply([], ASKED).masters == ()


NODE = [b"10.0.0.2", 7001, b"id"]
FORGED = {
    "no list": b"OK",
    "nothing": None,
    "no ranges": [1, 2, 3],
    "a range without an owner": [[0, 1]],
    "a slot that does not exist": [[0, 16384, NODE]],
    "a negative slot": [[-1, 1, NODE]],
    "a range that ends before it begins": [[2, 1, NODE]],
    "slots as text": [[b"0", b"1", NODE]],
    "an owner without a port": [[0, 1, [b"10.0.0.2"]]],
    "port 0": [[0, 1, [b"10.0.0.2", 0]]],
    "a port that does not exist": [[0, 1, [b"10.0.0.2", 65536]]],
    "a port as text": [[0, 1, [b"10.0.0.2", b"7001"]]],
    "a host that is none": [[0, 1, [b"10.0.0.2\r\nFLUSHALL", 7001]]],
    "a host with escapes": [[0, 1, [b"\x1b[31m", 7001]]],
    "a host without end": [[0, 1, [b"a" * 256, 7001]]],
    "a host that is a list": [[0, 1, [[b"10.0.0.2"], 7001]]],
    "two owners of a slot": [[0, 5, NODE], [5, 9, [b"10.0.0.3", 7001]]],
    "more ranges than slots": [[0, 0, NODE]] * (SLOTS + 1),
    "too many nodes": [[0, 0, *[NODE] * 70_000]],
}


@every_row("reply", FORGED.values())
def test_forged_replies_are_refused(reply):
    with pytest.raises(BrokenError) as failure:
        SlotMap.of_reply(reply, ASKED)
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 1000


def test_a_node_without_a_hostname_names_the_setting():
    with pytest.raises(
        BrokenError, match="set cluster-announce-hostname on every node, or cluster-preferred-endpoint-type to ip"
    ):
        SlotMap.of_reply([[0, 16383, [b"?", 7001]]], ASKED)


@every_row(
    "text, address",
    [
        ("MOVED 12182 10.0.0.2:7001", Address("10.0.0.2", 7001)),
        ("ASK 12182 node-2.example:7001", Address("node-2.example", 7001)),
        ("MOVED 12182 :7001", Address("10.0.0.1", 7001)),
        ("MOVED 12182 2001:db8::2:7001", Address("2001:db8::2", 7001)),
    ],
)
def test_where_a_refusal_redirects(text, address):
    assert redirection(ReplyError(text), ASKED) == address


@every_row(
    "text",
    [
        "MOVED",
        "MOVED 1",
        "MOVED x 10.0.0.2:7001",
        "ASK 1 10.0.0.2:",
        "ASK 1 10.0.0.2:99999",
        "MOVED 1 ?:7001",
    ],
)
def test_forged_redirections_are_refused(text):
    with pytest.raises(BrokenError):
        redirection(ReplyError(text), ASKED)


def test_addresses_as_text():
    assert str(Address("10.0.0.1", 7000)) == "10.0.0.1:7000"
    assert str(Address("::1", 7000)) == "[::1]:7000"


def test_other_addresses():
    reply = [[0, 16383, NODE, [b"10.0.0.4", 7003]]]
    remapped = SlotMap.of_reply(reply, ASKED, lambda address: Address("proxy", address.port))
    assert remapped.owner(5) == Address("proxy", 7001)
    assert remapped.nodes == (Address("proxy", 7001), Address("proxy", 7003))
