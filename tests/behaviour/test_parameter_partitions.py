"""Parameters whose values lie in several slots: what differs from those that lie in one."""

from __future__ import annotations

import itertools
import logging
import re
import time

import numpy as np
import pytest
from support.leaks import leftovers, remaining
from support.proxy import Fault

import redisacc

# Publishers are interrupted in the main thread.
pytestmark = [pytest.mark.fixed("client", "partitions")]

RECORD = "redisacc:{w}:parameters"
ATTEMPTS = f"{RECORD}:attempts"
# Of 120,000 bytes: smaller ones are not cut.
ELEMENTS = 30_000


def version(step):
    return np.arange(ELEMENTS, dtype=np.float32) * (step + 1)


def is_version(handle, step):
    """Checks which version a handle reads last."""
    found, values = handle.latest()
    np.testing.assert_array_equal((found, *values), (step, *version(step)))


@pytest.fixture
def weights(proxy, open_parameters):
    """A publisher behind the proxy."""
    made = open_parameters("w", partitions=3, redis=proxy.where)
    yield made
    made.delete()


@pytest.fixture
def reader(open_parameters, weights):
    return open_parameters("w")


def parts_of(client):
    return sorted(key.decode() for key in client.scan_iter("redisacc:{*/*}:partition:blob:*"))


def attempts_of(client):
    return {member.decode(): int(score) for member, score in client.zrange(ATTEMPTS, 0, -1, withscores=True)}


def end_leases(client):
    """Makes every lease in the list end, also those of retired blobs."""
    for member in client.zrange(ATTEMPTS, 0, -1):
        client.zadd(ATTEMPTS, {member: 1})


def published(client):
    return client.hget(RECORD, "version").decode()


@pytest.fixture
def between(proxy):
    """Does something when the parts of the next version have been written, and before it is visible."""
    return lambda action: proxy.before("publish", action)


@pytest.fixture
def begun(proxy, open_parameters, client, dies):
    """The parts of a first publisher that died with 3 partitions."""
    dies("publish", open_parameters("w", partitions=3, redis=proxy.where).publish, version(0), 0)
    found = parts_of(client)
    assert len(found) == 3
    return found


def test_an_invalid_number_is_refused(open_parameters, client):
    for value in (0, -1, 1001, 10_000, True, 1.5, "many", "3", b"auto", [3]):
        with pytest.raises(
            redisacc.InvalidArgumentError, match=r"partitions must be an integer from 1 to 1000, \"auto\""
        ):
            open_parameters("w", partitions=value)
    assert remaining(client) == []


def test_existing_parameters_keep_their_partitions(open_parameters, weights, client):
    early = open_parameters("w", partitions=2)
    weights.publish(version(0), 0)
    kept = client.hget(RECORD, "partitions")
    for step, same in enumerate((3, None, "auto"), start=1):
        open_parameters("w", partitions=same).publish(version(step), step)
        assert client.hget(RECORD, "partitions") == kept
    with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is 3, not 2"):
        open_parameters("w", partitions=2)
    with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is 3, not 2"):
        early.publish(version(9), 9)
    is_version(early, 3)


@pytest.mark.parametrize("value", [None, 1, "auto"])
def test_one_partition_is_none_and_a_single_server_needs_none(open_parameters, client, value):
    weights = open_parameters("w", partitions=value)
    weights.publish(version(0), 0)
    assert parts_of(client) == []
    assert not client.hexists(RECORD, "partitions")
    assert not client.exists(ATTEMPTS)


@pytest.mark.every_server
def test_each_partition_has_its_share_of_every_blob(weights, reader, client):
    weights.publish(version(0), 0, state=version(7))
    found = parts_of(client)
    assert len(found) == 6
    assert all(client.pttl(key) == -1 for key in found)
    for partition in client.hget(RECORD, "partitions").decode().split(","):
        of_one = [key for key in found if key.startswith(f"redisacc:{{w/{int(partition):05}}}:partition:")]
        assert [client.strlen(key) for key in of_one] == [4 * ELEMENTS // 3] * 2
    assert attempts_of(client) == {}
    is_version(reader, 0)
    assert reader.latest_state()[1].tolist() == version(7).tolist()


@pytest.mark.every_server
def test_what_a_version_does_without_is_removed_a_minute_later(weights, reader, client):
    weights.publish(version(0), 0)
    first = published(client)
    weights.publish(version(1), 1)
    assert len(parts_of(client)) == 6
    ((member, until),) = attempts_of(client).items()
    assert member == f"{first}-full 3"
    assert 50 < until / 1000 - time.time() <= 61
    end_leases(client)
    weights.publish(version(2), 2)
    assert not [key for key in parts_of(client) if first in key]
    assert len(attempts_of(client)) == 1
    is_version(reader, 2)


def test_a_reader_that_meets_a_removed_blob_reads_the_newer_version(proxy, open_parameters, client, gc):
    writer, reader = open_parameters("w", partitions=3), open_parameters("w", redis=proxy.where)
    writer.publish(version(0), 0)

    def publish_and_remove():
        writer.publish(version(1), 1)
        end_leases(client)
        assert gc("w", "--yes") == ([("w", "blobs")], 1)

    # It has asked for the record, and is about to fetch the values.
    proxy.before("GET", publish_and_remove)
    is_version(reader, 1)
    writer.delete()


@pytest.mark.every_server
def test_an_attempt_that_was_swept_is_refused_and_its_publisher_begins_a_new_one(weights, reader, client, between, gc):
    weights.publish(version(0), 0)
    removed = []

    def give_up():
        removed.extend(attempt.split()[0] for attempt in attempts_of(client))
        end_leases(client)
        assert gc("w", "--yes") == ([("w", "blobs")], 1)
        assert len(parts_of(client)) == 3

    between(give_up)
    weights.publish(version(1), 1)
    assert len(removed) == 1
    assert not [key for key in parts_of(client) if removed[0] in key]
    is_version(reader, 1)


def test_an_attempt_is_refused_from_the_moment_in_which_a_sweeper_begins(weights, reader, client, between):
    """It dies before it has removed the first part."""
    given_up = []

    def begin_to_sweep():
        (attempt,) = attempts_of(client)
        client.zadd(ATTEMPTS, {attempt: 0})
        given_up.append(attempt.split()[0])
        assert len(parts_of(client)) == 3

    between(begin_to_sweep)
    weights.publish(version(0), 0)
    assert not [key for key in parts_of(client) if given_up[0] in key]
    is_version(reader, 0)
    assert attempts_of(client) == {}


def test_an_attempt_whose_lease_is_over_still_counts_if_nobody_has_swept_it(weights, reader, client, between):
    between(lambda: end_leases(client))
    weights.publish(version(0), 0)
    is_version(reader, 0)
    assert len(parts_of(client)) == 3


def test_the_next_publisher_removes_what_a_dead_one_has_left(open_parameters, client, clock, begun):
    weights = open_parameters("w")
    assert weights.latest() is None
    # An attempt has a minute, and the record another one.
    assert 0 < client.pttl(RECORD) <= 121_000
    clock.advance(62.0)
    weights.publish(version(0), 0)
    assert client.pttl(RECORD) == -1
    assert not set(begun) & set(parts_of(client))
    is_version(weights, 0)
    assert attempts_of(client) == {}
    weights.delete()


def test_a_first_publisher_takes_the_partitions_of_another_that_has_begun(open_parameters, client, begun):
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match=r"somebody has begun to publish parameters 'w' with 3 partitions, not 2, .*\. Publish with their "
        r"number of partitions; or, if they have died, delete\(\) the parameters, or wait 2 min,",
    ):
        open_parameters("w", partitions=2).publish(version(1), 1)
    other = open_parameters("w")
    assert other.latest() is None
    other.publish(version(1), 1)
    assert len(client.hget(RECORD, "partitions").split(b",")) == 3
    is_version(other, 1)
    other.delete()
    assert remaining(client) == []


def test_a_first_version_that_was_begun_can_be_deleted(open_parameters, client, begun):
    weights = open_parameters("w", partitions=2)
    weights.delete()
    assert remaining(client) == []
    weights.publish(version(1), 1)
    assert len(parts_of(client)) == 2
    weights.delete()


def test_a_first_publisher_whose_attempt_is_deleted_begins_anew(weights, reader, client, between):
    between(reader.delete)
    weights.publish(version(0), 0)
    is_version(reader, 0)
    assert len(parts_of(client)) == 3


def test_a_second_registration_shortens_no_lease(proxy, open_parameters, client, dies):
    for elements in (2**22, ELEMENTS):
        publisher = open_parameters("w", partitions=3, redis=proxy.where)
        dies("publish", publisher.publish, np.zeros(elements, np.float32), 0)
    # The first one has a lease of a minute, and 131 seconds for 16 MiB.
    assert client.pttl(RECORD) > 200_000
    publisher.delete()


def test_two_first_publishers(weights, reader, client, between):
    between(lambda: reader.publish(version(1), 1))
    with pytest.raises(redisacc.ConflictError, match="already"):
        weights.publish(version(0), 0)
    is_version(weights, 1)
    # The parts of the one that was refused are gone.
    assert len(parts_of(client)) == 3
    assert attempts_of(client) == {}


def test_late_copies_of_everything_change_nothing(weights, reader, proxy, client):
    weights.publish(version(0), 0)
    for number in itertools.count():
        step = number + 1
        proxy.arm(Fault("request", number, 0, "late"))
        weights.publish(version(step), step)
        before = attempts_of(client)
        if not proxy.deliver_late():
            break
        # Nothing expires, and slow readers of the version before keep their minute.
        assert [client.pttl(key) for key in parts_of(client) if published(client) in key] == [-1, -1, -1]
        assert before.items() <= attempts_of(client).items()
        is_version(reader, step)
    # The registration, three commands for each part, and the publication.
    assert number >= 11


@pytest.fixture
def losing(client, until):
    """Returns what deletes the part that was stored last, which no version has."""

    def lose():
        known = client.hget(RECORD, "version") or b"none"
        client.delete(*until(lambda: [key for key in parts_of(client) if known.decode() not in key]))

    return lose


def test_a_node_that_has_not_stored_a_part_keeps_the_version_from_being_published(
    weights, reader, proxy, client, losing
):
    weights.publish(version(0), 0)
    proxy.before("STRLEN", losing)
    weights.publish(version(1), 1)
    # The number of the attempt after the one that failed.
    assert published(client).endswith("-3")
    is_version(reader, 1)
    assert len(parts_of(client)) == 6


def test_a_publisher_whose_parts_keep_disappearing_pauses_and_says_so(
    weights, reader, proxy, client, durations, caplog, losing
):
    durations(call=1.0)
    proxy.before("STRLEN", losing, times=1000)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "redisacc"),
        pytest.raises(redisacc.ServerError, match=r"step 0 .* tries within 1 s\. .* parts of it disappeared") as e,
    ):
        weights.publish(version(0), 0)
    # It pauses for 50 ms, and for twice as long each time.
    tries = int(re.search(r"in (\d) tries", str(e.value))[1])
    assert 2 <= tries <= 5
    assert time.monotonic() - began >= 0.05 * (2 ** (tries - 1) - 1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "w: step 0 could not be published yet, because parts of it disappeared" in said
    assert (parts_of(client), reader.latest()) == ([], None)


@pytest.mark.forges
@pytest.mark.every_server
def test_a_lost_part_is_named_and_the_version_can_be_published_again(weights, reader, client, caplog):
    weights.publish(version(0), 0, state=version(5))
    lost = next(key for key in parts_of(client) if key.endswith("-full:1"))
    client.delete(lost)
    for call in (reader.latest, lambda: reader.wait(timeout=10)):
        with pytest.raises(
            redisacc.DataLossError, match=r"is lost.*\. Publish the values again, for this step or a later"
        ) as caught:
            call()
        assert caught.value.part == lost
    assert reader.latest_state()[1].tolist() == version(5).tolist()
    with caplog.at_level(logging.WARNING, "redisacc"):
        weights.publish(version(0), 0, state=version(5))
    assert lost in caplog.text
    is_version(reader, 0)
    client.delete(next(key for key in parts_of(client) if "-full:2" in key and published(client) in key))
    weights.publish(version(1), 1)
    is_version(reader, 1)
    with pytest.raises(redisacc.ConflictError, match="already"):
        weights.publish(version(0), 0)


@pytest.mark.forges
def test_rows_that_changed_in_a_lost_table_are_published_with_the_whole_table(reader, weights, client):
    table = np.zeros((2000, 50))
    weights.publish({"table": table}, 0)
    client.delete(next(key for key in parts_of(client) if key.endswith("-full:1")))
    table[3] += 1
    weights.publish({"table": table}, 1, changed={"table": [3]})
    assert reader.latest()[1]["table"].tolist() == table.tolist()


def test_deletion_removes_all_parts(proxy, open_parameters, client, dies):
    weights = open_parameters("w", partitions=3, redis=proxy.where)
    for step in range(2):
        weights.publish(version(step), step, state=version(9))
    dies("publish", weights.publish, version(3), 3)
    # Two blobs of two versions each, and one of the attempt.
    assert len(parts_of(client)) == 15
    weights.delete()
    assert remaining(client) == []


@pytest.mark.parametrize("moment", ["SET", "publish"])
def test_a_publisher_whose_parameters_are_deleted_leaves_nothing(proxy, open_parameters, client, moment):
    """Before it has written the first part, or after the last one."""
    weights, other = open_parameters("w", partitions=3, redis=proxy.where), open_parameters("w", partitions=3)
    weights.publish(version(0), 0)
    other.latest()
    proxy.before(moment, other.delete)
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        weights.publish(version(1), 1)
    assert remaining(client) == []


def test_an_interrupted_deletion_is_finished_by_who_publishes(proxy, open_parameters, client, dies):
    old = open_parameters("w", partitions=3, redis=proxy.where)
    old.publish(version(0), 0)
    dies("UNLINK", old.delete)
    assert len(parts_of(client)) == 3
    new = open_parameters("w", partitions=2)
    assert new.latest() is None
    new.publish(version(1), 1)
    is_version(new, 1)
    assert len(parts_of(client)) == 2


def test_gc_finds_attempts_that_are_over_and_retired_blobs(weights, reader, client, dies, gc):
    weights.publish(version(0), 0)
    weights.publish(version(1), 1)
    dies("publish", weights.publish, version(2), 2)
    assert gc() == ([], 0)
    end_leases(client)
    assert gc("--yes") == ([("w", "blobs")], 1)
    assert (len(parts_of(client)), gc()) == (3, ([], 0))
    is_version(reader, 1)


def test_gc_removes_parts_that_no_version_has_and_no_others(open_parameters, weights, client, gc):
    # Its name is that of a partition.
    other = open_parameters("w/0", partitions=None)
    other.publish(version(4), 0)
    weights.publish(version(0), 0)
    weights.publish(version(1), 1)
    assert gc() == ([], 0)
    first, second, _ = client.hget(RECORD, "partitions").decode().split(",")
    orphan = f"redisacc:{{w/{int(first):05}}}:partition:blob:0123456789abcdef-1-full:0"
    client.set(orphan, b"late")
    client.set(f"redisacc:{{w/{int(second):05}}}:partition:blob:0123456789abcdef-2-full:1", b"expires", px=60_000)
    assert gc("--yes") == ([("w", "blob")], 1)
    assert not client.exists(orphan)
    assert gc() == ([], 0)
    other.delete()
    # A record that somebody has removed leaves its parts, and the list of attempts.
    client.delete(RECORD)
    found, _ = gc("--yes")
    assert sorted(why for _, why in found) == ["blob", "name", "object"]
    assert len(parts_of(client)) == 1
    assert gc() == ([], 0)


@pytest.mark.parametrize("partitions", [None, 2])
def test_gc_removes_the_parts_of_a_first_publisher_that_was_forgotten(open_parameters, client, gc, begun, partitions):
    """The next one has no partitions, or others."""
    # What the server does at the end of the expiry.
    client.delete(RECORD)
    weights = open_parameters("w", partitions=partitions)
    weights.publish(version(1), 1)
    found, _ = gc("--yes")
    assert {why for _, why in found} == ({"blob", "blobs"} if partitions is None else {"blob"})
    assert not set(begun) & set(parts_of(client))
    assert gc() == ([], 0)
    assert attempts_of(client) == {}
    is_version(weights, 1)
    weights.delete()


def test_foreign_bytes_are_refused(weights, open_parameters, client):
    weights.publish(version(0), 0)
    # On a cluster, the numbers are those of slots that lie on different nodes.
    written = client.hget(RECORD, "partitions")
    for text in (b"0", b"0,0", b"0,1,", b"01,2", b"0,1\x00", b"-1,2", b"0,100000"):
        client.hset(RECORD, "partitions", text)
        with pytest.raises(redisacc.CorruptDataError, match="partitions"):
            open_parameters("w")
    client.hset(RECORD, "partitions", written)
    client.zadd(ATTEMPTS, {"foreign member": 1, "x-1 999999999": 1, "x-2 100001": 1, "x-3 0": 1})
    weights.publish(version(1), 1)
    assert [member for member in attempts_of(client) if member.startswith(("x-", "foreign"))] == []
    is_version(open_parameters("w"), 1)
    assert leftovers(client) == []
