"""What the meeting host makes of what hosts say, and the lines of each host, without any host; and invalid entries."""

import pytest
from support.rows import every_row

from redisacc.tools.launch.hosts.agreement import (
    CAME,
    FAILED,
    FINISHED,
    JOINS,
    MEETS,
    READY,
    STARTED,
    STARTING,
    TAKES_PART,
    WORKS,
    Host,
    MeetingError,
    Member,
    Terms,
    advance,
    begin,
    read,
    read_agreement,
    text_of,
)
from redisacc.tools.launch.hosts.news import News, Seen

TERMS = Terms(hosts=3, workers=2, replicas=0, chief=False, nodes=True, program="python train.py")


def host(name, stage=CAME, run=None, role=None, terms=TERMS, **more):
    run = (run or name).encode().hex().ljust(32, "0")
    nodes = name.encode().hex().ljust(40, "0") if stage in (STARTED, WORKS) else ""
    role = role or (MEETS if name == "a" else TAKES_PART)
    made = Host(name, run, role, stage, f"10.0.0.{ord(name[0])}", "6401", nodes, "0", terms.text)
    return made._replace(**more)


class Meeting:
    """A meeting host that is told what hosts say, and notes the lines."""

    def __init__(self, agreement=None, terms=TERMS):
        self.agreement = agreement
        self.terms = terms
        self.lines = []
        self.news = News("a:6400", terms)

    def hear(self, *hosts, settled=True, formed=False):
        told = {one.name: one for one in hosts}
        if self.agreement is None:
            self.agreement = begin(told, self.terms)
        else:
            members = self.agreement.members if formed else None
            self.agreement = advance(self.agreement, told, self.terms, formed=members)
        if self.agreement is not None:
            written = {name.encode(): value.encode() for name, value in self.agreement.fields.items()}
            assert read_agreement(written) == self.agreement
        self.lines += self.news.lines(Seen(self.agreement, told), settled=settled)

    @property
    def names(self):
        return self.agreement.names


def working(*names, terms=TERMS):
    """A meeting of hosts whose processes work; the first one has the meeting point."""
    meeting = Meeting(terms=terms)
    roles = dict.fromkeys(names, TAKES_PART) | {names[0]: MEETS}
    for stage, formed in ((CAME, False), (STARTED, False), (STARTED, True), (WORKS, False)):
        meeting.hear(*[host(name, stage, role=roles[name], terms=terms) for name in names], formed=formed)
    assert meeting.agreement.phase == READY
    meeting.lines.clear()
    return meeting


def test_hosts_get_their_numbers_when_all_have_come():
    meeting = Meeting()
    meeting.hear(host("c"))
    meeting.hear(host("c"), host("a"))
    assert meeting.agreement is None
    assert meeting.lines == ["host c has joined at a:6400 (1 of 3)", "host a has joined at a:6400 (2 of 3)"]
    meeting.hear(host("c"), host("a"), host("b"))
    assert meeting.agreement.phase == STARTING
    assert meeting.lines[2:] == ["host b has joined at a:6400 (3 of 3)"]
    assert meeting.names == ["a", "b", "c"]
    meeting.hear(*[host(name, STARTED) for name in "abc"])
    meeting.hear(*[host(name, STARTED) for name in "abc"], formed=True)
    assert meeting.agreement.phase == READY
    assert meeting.lines[-1] == "all 3 hosts have joined, and the cluster of 3 nodes is ready: workers 0 to 5"


def test_a_host_that_leaves_before_all_have_come_keeps_no_place():
    meeting = Meeting()
    meeting.hear(host("a"), host("b"))
    meeting.hear(host("a"))
    meeting.hear(host("a"), host("c"), host("d"))
    assert meeting.names == ["a", "c", "d"]
    assert meeting.lines[2:4] == ["host b is missing", "host c has joined at a:6400 (2 of 3)"]


def test_the_meeting_host_has_the_first_number_whatever_its_name():
    meeting = Meeting()
    meeting.hear(host("a", role=TAKES_PART), host("b"), host("c", role=MEETS))
    assert meeting.names == ["c", "a", "b"]


def test_nothing_begins_without_the_meeting_host():
    meeting = Meeting()
    meeting.hear(host("a", role=TAKES_PART), host("b"), host("c"))
    assert meeting.agreement is None


def test_nodes_of_a_host_that_was_gone_while_they_were_formed_are_formed_again():
    meeting = Meeting()
    meeting.hear(*map(host, "abc"))
    started = [host(name, STARTED) for name in "abc"]
    meeting.hear(*started)
    formed = meeting.agreement.members
    again = host("c", STARTED, run="again", nodes="1" * 40)
    told = {one.name: one for one in [*started[:2], again]}
    after = advance(meeting.agreement, told, TERMS, formed=formed)
    assert after.phase == STARTING
    assert advance(after, told, TERMS, formed=after.members).phase == READY


def test_other_terms_and_hosts_that_join_are_not_counted():
    meeting = Meeting()
    others = TERMS._replace(workers=3)
    meeting.hear(host("a"), host("b", terms=others), host("c", role=JOINS), host("d"))
    assert meeting.agreement is None
    assert [line.split()[1] for line in meeting.lines] == ["a", "d"]


def test_a_host_that_is_back_before_it_was_missed_is_told_as_well():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("b", CAME, run="again"), host("c", WORKS))
    meeting.hear(host("a", WORKS), host("b", WORKS, run="again"), host("c", WORKS))
    assert [line.partition(";")[0] for line in meeting.lines] == ["host b is missing", "host b has returned"]


def test_joining_takes_the_place_and_the_nodes_of_a_host_that_is_gone():
    meeting = working("a", "b", "c")
    nodes = meeting.agreement.members[1].nodes
    meeting.hear(host("a", WORKS), host("c", WORKS))
    meeting.hear(host("a", WORKS), host("c", WORKS), host("d", role=JOINS))
    assert meeting.names == ["a", "d", "c"]
    assert meeting.agreement.members[1].nodes == nodes
    assert meeting.lines[1:] == ["host d takes the place of host b"]
    meeting.hear(host("a", WORKS), host("c", WORKS), host("d", WORKS, role=JOINS))
    assert meeting.lines[2:] == ["host d has returned"]


def test_a_host_that_has_joined_and_been_replaced_takes_no_other_place():
    """It was stopped for a while, and hears of it when it continues."""
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), host("d", WORKS, role=JOINS))
    assert meeting.names == ["a", "b", "c"]


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
    assert meeting.lines == ["the run is finished on all hosts"]


def test_it_is_over_when_the_chief_has_finished():
    terms = TERMS._replace(chief=True)
    meeting = working("a", "b", "c", terms=terms)
    meeting.hear(*[host(name, FINISHED if name == "a" else WORKS, terms=terms) for name in "abc"])
    assert meeting.agreement.phase == FINISHED


def test_a_host_that_gives_up_ends_the_run_and_a_guest_does_not():
    meeting = working("a", "b", "c")
    all_work = [host(name, WORKS) for name in "abc"]
    meeting.hear(*all_work, host("d", role=JOINS))
    meeting.hear(*all_work, host("d", FAILED, role=JOINS, code="3"))
    assert meeting.agreement.phase == READY
    meeting.hear(host("a", WORKS), host("b", FAILED, code="3"), host("c", WORKS))
    assert meeting.agreement.phase == FAILED
    assert meeting.lines[-1] == "a process on host b was given up (exit code 3): the run ends on all hosts"


def test_a_host_that_returns_is_told_who_is_back_and_who_is_gone():
    seen = working("a", "b", "c").agreement
    meeting = Meeting()
    meeting.hear(host("a", run="again"), settled=False)
    meeting.agreement = seen
    meeting.hear(host("a", run="again"), host("b", WORKS), settled=False)
    meeting.hear(host("a", STARTED, run="again"), host("b", WORKS))
    meeting.hear(host("a", WORKS, run="again"), host("b", WORKS))
    assert [line.partition(";")[0] for line in meeting.lines] == [
        "host a has joined at a:6400 (1 of 3)",
        "host c is missing",
        "host a has returned",
    ]


def test_nobody_is_gone_from_a_meeting_point_that_was_started_again():
    meeting = working("a", "b", "c")
    meeting.hear(host("a", WORKS), settled=False)
    meeting.hear(*[host(name, WORKS) for name in "abc"])
    assert not meeting.lines


def test_another_machine_may_have_the_address_of_the_meeting_point():
    meeting = working("b", "c", "d")
    meeting.hear(host("a"), host("c", WORKS))
    assert meeting.names == ["a", "c", "d"]


# What is written

WRITTEN = host("a", WORKS)


def test_entries_are_read_as_they_were_written():
    assert read(Host, text_of(WRITTEN).encode()) == WRITTEN
    assert read(Member, text_of(working("a", "b", "c").agreement.members[0]).encode()).node_ports == [6401]


WRONG = [
    ("name", "a b"),
    ("name", "a" * 65),
    ("run", "x"),
    ("role", "leads"),
    ("stage", "sleeps"),
    ("address", "example.org"),
    ("address", ""),
    ("ports", "1,2,3"),
    ("ports", "x"),
    ("nodes", "x"),
    ("code", "1000"),
    ("terms", ""),
    ("terms", "x\ny"),
]


@every_row("field, text", WRONG)
def test_what_no_host_writes_is_no_entry(field, text):
    assert read(Host, text_of(WRITTEN._replace(**{field: text})).encode()) is None


@every_row("data", [b"", b"\xff", b"x" * 100_000, b"name=a"])
def test_bytes_that_are_no_entry(data):
    assert read(Host, data) is None
    with pytest.raises(MeetingError):
        read_agreement({b"version": data})


@every_row("field, text", [("phase", "sleeps"), ("version", "x"), ("more", "1"), ("host 0", "x"), ("guest 0", "a b")])
def test_what_is_no_agreement_is_refused(field, text):
    fields = {**working("a", "b", "c").agreement.fields, field: text}
    with pytest.raises(MeetingError):
        read_agreement({name.encode(): value.encode() for name, value in fields.items()})
