"""Parameters whose values lie in several slots: what differs from those that lie in one."""

import logging
import re
import time

import numpy as np
import pytest
from support.leaks import remaining

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

    between(begin_to_sweep)
    weights.publish(version(0), 0)
    assert not [key for key in parts_of(client) if given_up[0] in key]
    is_version(reader, 0)
    assert attempts_of(client) == {}


def test_a_first_publisher_takes_the_partitions_of_another_that_has_begun(open_parameters, client, begun):
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match=r"another process has begun to publish parameters 'w' with 3 partitions, not 2, .*\. Publish with the "
        r"same number of partitions; or, if that process has ended, delete\(\) the parameters, or wait 2 min,",
    ):
        open_parameters("w", partitions=2).publish(version(1), 1)
    other = open_parameters("w")
    assert other.latest() is None
    other.publish(version(1), 1)
    assert len(client.hget(RECORD, "partitions").split(b",")) == 3
    is_version(other, 1)
    other.delete()
    assert remaining(client) == []


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
