"""What the meeting host makes of what hosts say, without any host; and what it does with other documents."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.rows import every_row

from redisacc.tools.launch.hosts.agreement import advance, new_agreement
from redisacc.tools.launch.hosts.documents import (
    CAME,
    FAILED,
    FINISHED,
    GATHERING,
    LARGEST,
    READY,
    STARTED,
    STARTING,
    WORKS,
    DocumentError,
    Host,
    Terms,
    decode_agreement,
    decode_host,
    encode,
)
from redisacc.tools.launch.hosts.events import line_of

TERMS = Terms(hosts=3, workers=2, replicas=0, chief=False, nodes=True, program="python train.py")


def host(name, stage=CAME, run=None, **more):
    run = (run or name).encode().hex().ljust(32, "0")
    nodes = (name.encode().hex().ljust(40, "0"),) if stage in (STARTED, WORKS) else ()
    given = {"terms": TERMS, "joins": False, "address": f"10.0.0.{ord(name[0])}", "ports": (6401,), "nodes": nodes}
    return Host(name=name, run=run, stage=stage, **{**given, **more})


class Meeting:
    """A meeting host that is told what hosts say, and notes the lines."""

    def __init__(self, agreement=None):
        self.agreement = agreement or new_agreement("a", TERMS)
        self.lines = []

    def hear(self, *hosts, settled=True, formed=False):
        before = {event.number for event in self.agreement.events}
        told = {one.name: one for one in hosts}
        after = advance(self.agreement, told, settled=settled, formed=formed)
        self.agreement = after
        assert decode_agreement(encode(after)) == after
        self.lines += [line_of(event, after, "a:6400") for event in after.events if event.number not in before]

    @property
    def names(self):
        return [member.name for member in self.agreement.members]


def working(*names):
    """A meeting of hosts whose processes work."""
    meeting = Meeting(new_agreement(names[0], TERMS))
    meeting.hear(*map(host, names))
    meeting.hear(*[host(name, STARTED) for name in names])
    meeting.hear(*[host(name, STARTED) for name in names], formed=True)
    meeting.hear(*[host(name, WORKS) for name in names])
    assert meeting.agreement.phase == READY
    meeting.lines.clear()
    return meeting


def test_hosts_get_their_places_as_they_come():
    meeting = Meeting()
    meeting.hear(host("c"))
    meeting.hear(host("c"), host("a"))
    assert meeting.agreement.phase == GATHERING
    meeting.hear(host("c"), host("a"), host("b"))
    assert meeting.agreement.phase == STARTING
    # The meeting host has the first place, whenever it is heard.
    assert meeting.names == ["a", "c", "b"]
    assert [meeting.agreement.first_worker_of(name) for name in "acb"] == [0, 2, 4]
    meeting.hear(*[host(name, STARTED) for name in "abc"], formed=True)
    assert meeting.agreement.phase == READY
    assert meeting.lines[-1] == "all 3 hosts have come, and the cluster of 3 nodes is ready: workers 0 to 5"


def test_a_host_that_leaves_before_all_have_come_keeps_no_place():
    meeting = Meeting()
    meeting.hear(host("a"), host("b"))
    meeting.hear(host("a"))
    meeting.hear(host("a"), host("c"), host("d"))
    assert meeting.names == ["a", "c", "d"]


def test_other_terms_and_hosts_that_join_are_not_counted():
    meeting = Meeting()
    others = dataclasses.replace(TERMS, workers=3)
    meeting.hear(host("a"), host("b", terms=others), host("c", joins=True), host("d"))
    assert meeting.names == ["a", "d"]


def test_a_host_is_gone_and_back():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("c", WORKS))
    assert meeting.lines == [
        "host b is gone; the same command on it takes its place again, and on another host with --join"
    ]
    meeting.hear(host("a", WORKS), host("b", CAME, run="again"), host("c", WORKS))
    meeting.hear(host("a", WORKS), host("b", WORKS, run="again"), host("c", WORKS))
    assert meeting.lines[1:] == ["host b is back"]
    assert meeting.names == ["a", "b", "c"]


def test_a_host_that_is_back_before_it_was_missed_is_told_as_well():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("b", CAME, run="again"), host("c", WORKS))
    meeting.hear(host("a", WORKS), host("b", WORKS, run="again"), host("c", WORKS))
    assert [line.partition(";")[0] for line in meeting.lines] == ["host b is gone", "host b is back"]


def test_a_node_that_was_started_again():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("b", WORKS, node_starts=1), host("c", WORKS))
    assert meeting.lines == ["a node on host b has been started again"]


def test_joining_takes_the_place_and_the_nodes_of_a_host_that_is_gone():
    meeting = working("a", "b", "c")
    nodes = meeting.agreement.members[1].nodes
    meeting.hear(host("a", WORKS), host("c", WORKS))
    meeting.hear(host("a", WORKS), host("c", WORKS), host("d", joins=True))
    assert meeting.names == ["a", "d", "c"]
    assert meeting.agreement.members[1].nodes == nodes
    assert meeting.lines[1:] == ["host d takes the place of host b"]
    meeting.hear(host("a", WORKS), host("c", WORKS), host("d", WORKS, joins=True))
    assert meeting.lines[2:] == ["host d is back"]


def test_joining_brings_more_workers_if_no_host_is_gone():
    meeting = working("a", "b", "c")
    all_work = [host(name, WORKS) for name in "abc"]
    meeting.hear(*all_work, host("d", joins=True))
    meeting.hear(*all_work, host("d", WORKS, joins=True), host("e", joins=True))
    assert meeting.lines == ["host d joins with workers 6 to 7", "host e joins with workers 8 to 9"]
    meeting.hear(*all_work, host("e", WORKS, joins=True))
    assert meeting.lines[2] == "host d is gone"
    # Its numbers stay its own.
    assert meeting.agreement.first_worker_of("e") == 8


def test_a_host_that_does_not_join_gets_no_place_later():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("c", WORKS), host("d"))
    assert meeting.names == ["a", "b", "c"]


def test_it_is_over_when_all_hosts_that_are_there_have_finished():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", FINISHED), host("b", WORKS), host("c", FINISHED))
    assert meeting.agreement.phase == READY
    meeting.hear(host("a", FINISHED), host("b", FINISHED), host("c", FINISHED))
    assert meeting.agreement.phase == FINISHED
    assert meeting.lines == ["the training is finished on all hosts"]


def test_it_is_over_when_the_chief_has_finished():
    terms = dataclasses.replace(TERMS, chief=True)
    agreement = dataclasses.replace(working("a", "b", "c").agreement, terms=terms)
    meeting = Meeting(agreement)
    meeting.hear(*[host(name, FINISHED if name == "a" else WORKS, terms=terms) for name in "abc"])
    assert meeting.agreement.phase == FINISHED


def test_a_host_that_gives_up_ends_the_run_and_a_guest_does_not():
    meeting = working("a", "b", "c")
    all_work = [host(name, WORKS) for name in "abc"]
    meeting.hear(*all_work, host("d", joins=True))
    meeting.hear(*all_work, host("d", FAILED, joins=True, exit_code=3))
    assert meeting.agreement.phase == READY
    meeting.hear(host("a", WORKS), host("b", FAILED, exit_code=3), host("c", WORKS))
    assert meeting.agreement.phase == FAILED
    assert meeting.lines[-1] == "a process on host b was given up (exit code 3): the run ends on all hosts"


def test_a_meeting_host_that_returns_hears_of_the_training_from_the_others():
    seen = working("a", "b", "c").agreement
    meeting = Meeting()
    stranger = host("x")
    meeting.hear(host("a", run="again"), stranger, settled=False)
    meeting.hear(host("a", run="again"), stranger, host("b", WORKS, seen=seen), host("c", WORKS), settled=False)
    assert meeting.agreement.phase == READY
    assert meeting.agreement.training == seen.training
    assert meeting.names == ["a", "b", "c"]
    assert meeting.agreement.members[0].nodes == seen.members[0].nodes
    meeting.lines.clear()
    meeting.hear(host("a", WORKS, run="again"), host("b", WORKS), host("c", WORKS))
    assert meeting.lines == ["host a is back"]


def test_another_machine_may_have_the_address_of_the_meeting_point():
    seen = working("b", "c", "d").agreement
    meeting = Meeting()
    meeting.hear(host("a"), host("c", WORKS, seen=seen), settled=False)
    assert meeting.names == ["a", "c", "d"]


# Documents

GOOD = host("a", WORKS, seen=working("a", "b", "c").agreement)


def test_documents_are_read_as_they_were_written():
    assert decode_host(encode(GOOD)) == GOOD


WRONG = [
    {"name": "a b"},
    {"name": "a" * 65},
    {"run": "x"},
    {"stage": "sleeps"},
    {"stage": ["came"]},
    {"joins": 1},
    {"address": "example.org"},
    {"address": None},
    {"ports": [0]},
    {"ports": [1, 2, 3]},
    {"ports": "1"},
    {"nodes": ["x"]},
    {"node_starts": -1},
    {"node_starts": True},
    {"exit_code": 256},
    {"terms": {"hosts": 3}},
    {"terms": {**dataclasses.asdict(TERMS), "hosts": 10**9}},
    {"seen": []},
    {"more": 1},
]


@every_row("change", WRONG)
def test_what_is_no_document_of_a_host_is_refused(change):
    document = {**json.loads(encode(GOOD)), **change}
    with pytest.raises(DocumentError):
        decode_host(json.dumps(document).encode())


@every_row("data", [b"", b"\xff", b"[" * 100_000, b'"' + b"x" * LARGEST + b'"', b"null", b"[]"])
def test_bytes_that_are_no_document_are_refused(data):
    for decode in (decode_host, decode_agreement):
        with pytest.raises(DocumentError):
            decode(data)
