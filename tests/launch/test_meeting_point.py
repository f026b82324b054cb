"""The meeting point itself: leases of hosts, and the hash that each of them brings back."""

from __future__ import annotations

import dataclasses

import pytest

from redisacc.tools.launch.hosts.agreement import CAME, READY, TAKES_PART, WORKS, Agreement, Host, Member
from redisacc.tools.launch.hosts.meeting_point import Meet, MeetingPoint

pytestmark = pytest.mark.servers("valkey")

KNOWN = Agreement("1" * 32, 3, READY, "terms", (Member("a", "10.0.0.1", "", ""),))


def host(name="b", stage=WORKS, run="0"):
    return Host(name, run * 32, TAKES_PART, stage, "10.0.0.2", "", "", "0", "terms")


@pytest.fixture
def point(real_server):
    found = MeetingPoint(Meet("127.0.0.1", real_server.port), None, None)
    yield found
    for name in "abc":
        found.leave(name)
    found._client.delete("redisacc:meeting")
    found.close()


def test_hosts_bring_the_agreement_back_the_highest_version_first(point):
    newer = dataclasses.replace(KNOWN, version=4, guests=("c",))
    assert point.beat(host("c"), None).agreement is None
    assert point.beat(host(), KNOWN).agreement == KNOWN
    assert point.beat(host("a"), newer).agreement == newer
    for known in (KNOWN, None):
        assert point.beat(host(), known).agreement == newer
    assert point.look()[0] == newer


def test_nobody_brings_another_training_back(point):
    other = dataclasses.replace(KNOWN, training="2" * 32, version=1)
    point.write(other)
    assert point.beat(host(), KNOWN).agreement == other


def test_a_lease_belongs_to_one_command(point):
    first, second = host(stage=CAME, run="1"), host(stage=CAME, run="2")
    assert not point.beat(first, None).is_taken
    found = point.beat(second, None)
    assert found.is_taken
    assert found.hosts == {"b": first}


def test_a_host_that_works_takes_its_lease_from_a_command_that_has_just_come(point):
    point.beat(host(stage=CAME, run="1"), None)
    found = point.beat(host(run="2"), KNOWN)
    assert not found.is_taken
    assert point.beat(host(stage=CAME, run="1"), None).is_taken
    assert point.beat(host(run="3"), None).is_taken


def test_a_host_that_has_not_shown_for_a_while_that_it_lives_is_late(point, clock):
    point.beat(host(), None)
    assert not point.beat(host("a"), None).late
    clock.advance(3.0)
    found = point.beat(host("a"), None)
    assert found.late == {"b"}
    assert set(found.hosts) == {"a", "b"}
    clock.advance(3.0)
    assert set(point.beat(host("a"), None).hosts) == {"a"}
