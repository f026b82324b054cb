"""Parameters whose values lie in several slots: what differs from those that lie in one."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from support.interposing import before_next_call
from support.leaks import leftovers, remaining
from support.selection import REAL

import redisacc
from redisacc._admin.garbage import find_garbage, remove_garbage
from redisacc._format import parameter_record
from redisacc._format.attempts import MOST_PARTS, StoredAttempt, part_keys
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import blob_lengths
from redisacc._protocol.applying import partition_writer
from redisacc._protocol.parameters.deletion import read_partitions
from redisacc._protocol.parts.sweep import remove_parts, sweep
from redisacc._protocol.scripts.attempts import AttemptScripts
from redisacc._protocol.scripts.parameters import ParameterScripts, RegisteredVersion
from redisacc._redis.connect import connect
from redisacc._redis.transport import Transport

pytestmark = [pytest.mark.fixed("client", "partitions")]

RECORD = "redisacc:{w}:parameters"
ATTEMPTS = f"{RECORD}:attempts"


def version(step):
    return np.arange(30, dtype=np.float32) * (step + 1)


@pytest.fixture(autouse=True)
def _cut_small_blobs(monkeypatch):
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)


@pytest.fixture
def weights(open_parameters):
    made = open_parameters("w", partitions=3)
    yield made
    made.delete()


@pytest.fixture
def reader(open_parameters, weights):
    return open_parameters("w")


def parts_of(client):
    return sorted(key.decode() for key in client.scan_iter("redisacc:{*/*}:parameters:partition:*"))


def attempts_of(client):
    return {member.decode(): int(score) for member, score in client.zrange(ATTEMPTS, 0, -1, withscores=True)}


def partitioned_keys(client):
    return read_partitions(connect(client), ParameterKeys("w"))


def end_leases(client):
    """Makes every lease in the list end, also those of retired blobs."""
    for member in client.zrange(ATTEMPTS, 0, -1):
        client.zadd(ATTEMPTS, {member: 1})


def published(client):
    return client.hget(RECORD, "version").decode()


@pytest.fixture
def between(monkeypatch):
    """Does something when the parts of the next version have been written, and before it is committed."""

    def arm(action):
        before_next_call(monkeypatch, ParameterScripts, "publish", lambda options: action(options["blobs"]))

    return arm


class PublisherDiesError(BaseException):
    """Stands for the death of the process."""


def die(blobs):
    raise PublisherDiesError


@pytest.mark.parametrize("value", [0, -1, 1001, 10_000, True, 1.5, "many", "3", b"auto", [3]])
def test_an_invalid_number_is_refused(open_parameters, client, value):
    with pytest.raises(redisacc.InvalidArgumentError, match=r"partitions must be an integer from 1 to 1000, \"auto\""):
        open_parameters("w", partitions=value)
    assert remaining(client) == []


def test_existing_parameters_keep_their_partitions(open_parameters, weights):
    early = open_parameters("w", partitions=2)
    weights.publish(version(0), 0)
    kept = partitioned_keys(weights._transport.where).partitions
    assert len(kept) == 3
    for step, same in enumerate((3, None, "auto"), start=1):
        handle = open_parameters("w", partitions=same)
        handle.publish(version(step), step)
        assert partitioned_keys(weights._transport.where).partitions == kept
    for other in (1, 2, 4):
        with pytest.raises(redisacc.InvalidArgumentError, match=f"number of partitions is 3, not {other}"):
            open_parameters("w", partitions=other)
    with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is 3, not 2"):
        early.publish(version(9), 9)
    assert early.latest()[0] == 3


def test_parameters_without_partitions_get_none_later(open_parameters):
    open_parameters("w").publish(version(0), 0)
    with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is 1, not 3"):
        open_parameters("w", partitions=3)
    open_parameters("w", partitions=1).publish(version(1), 1)


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
    keys = partitioned_keys(client)
    found = parts_of(client)
    assert len(found) == 6
    assert all(client.pttl(key) == -1 for key in found)
    for place in range(3):
        of_one = [key for key in found if key.startswith(keys.partition(place) + ":")]
        assert [client.strlen(key) for key in of_one] == [40, 40]
    assert attempts_of(client) == {}
    assert reader.latest()[1].tolist() == version(0).tolist()
    assert reader.latest_state()[1].tolist() == version(7).tolist()
    table = version(0).reshape(10, 3)
    table.setflags(write=True)
    other = redisacc.Parameters("v", redis=weights._transport.where, partitions=3)
    other.publish({"table": table}, 0)
    assert leftovers(client) == []
    for step in range(1, 40):
        table[step % 10] += 1
        other.publish({"table": table}, step, changed={"table": [step % 10]})
        assert redisacc.Parameters("v", redis=weights._transport.where).latest()[1]["table"].tolist() == table.tolist()
    other.delete()
    assert [key for key in parts_of(client) if "{v/" in key] == []


@pytest.mark.parametrize("partitions", [2, 3, 7, 1000])
@pytest.mark.parametrize("nbytes", [0, 1, 64 * 1024, 64 * 1024 + 1, 10**6, 3 * 2**21, 10**8 + 7])
def test_every_partition_gets_equally_many_parts(monkeypatch, nbytes, partitions):
    monkeypatch.undo()
    lengths = blob_lengths(nbytes, partitions)
    assert sum(lengths) == nbytes
    assert max(lengths, default=0) <= 2 * 2**20
    if nbytes <= 64 * 1024:
        assert len(lengths) == (nbytes > 0)
    else:
        of_each = [sum(lengths[place::partitions]) for place in range(partitions)]
        assert max(of_each) - min(of_each) <= max(lengths) * (1 if nbytes % partitions else 0)


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
    assert reader.latest()[1].tolist() == version(2).tolist()


def test_a_reader_that_meets_a_removed_blob_reads_the_newer_version(weights, reader, client, monkeypatch):
    weights.publish(version(0), 0)
    late = reader._reader.poll()
    weights.publish(version(1), 1)
    end_leases(client)
    assert sweep(connect(client), partitioned_keys(client)) == 1
    # It asks for the record before and reads the values after all that.
    records = iter([late])
    poll = reader._reader.poll
    monkeypatch.setattr(reader._reader, "poll", lambda: next(records, None) or poll())
    step, found = reader.latest()
    assert (step, found.tolist()) == (1, version(1).tolist())


@pytest.mark.every_server
def test_an_attempt_that_was_swept_is_refused_and_its_publisher_begins_a_new_one(weights, reader, client, between):
    weights.publish(version(0), 0)
    removed = []

    def give_up(blobs):
        end_leases(client)
        assert sweep(connect(client), partitioned_keys(client)) == 1
        removed.extend(blobs)
        assert len(parts_of(client)) == 3

    between(give_up)
    weights.publish(version(1), 1)
    assert len(removed) == 1
    assert not [key for key in parts_of(client) if removed[0].id in key]
    assert reader.latest()[1].tolist() == version(1).tolist()


def test_an_attempt_is_refused_from_the_moment_in_which_a_sweeper_begins(weights, reader, client, between):
    """It dies before it has removed the first part."""

    def begin_to_sweep(blobs):
        end_leases(client)
        assert AttemptScripts(connect(client), partitioned_keys(client)).sweep(limit=1) == blobs
        given_up.append(blobs[0].id)
        assert len(parts_of(client)) == 3

    given_up = []
    between(begin_to_sweep)
    weights.publish(version(0), 0)
    assert not [key for key in parts_of(client) if given_up[0] in key]
    assert reader.latest()[1].tolist() == version(0).tolist()
    assert attempts_of(client) == {}


def test_an_attempt_whose_lease_is_over_still_counts_if_nobody_has_swept_it(weights, reader, client, between):
    between(lambda _: end_leases(client))
    weights.publish(version(0), 0)
    assert reader.latest()[1].tolist() == version(0).tolist()
    assert len(parts_of(client)) == 3


def test_the_next_publisher_removes_what_a_dead_one_has_left(weights, reader, client, between, clock):
    between(die)
    with pytest.raises(PublisherDiesError):
        weights.publish(version(0), 0)
    assert len(parts_of(client)) == 3
    assert reader.latest() is None
    assert 0 < client.pttl(RECORD) <= 60_000 + partition_writer.ATTEMPT_MS
    clock.advance(partition_writer.ATTEMPT_MS / 1000 + 1)
    weights.publish(version(0), 0)
    assert client.pttl(RECORD) == -1
    assert len(parts_of(client)) == 3
    assert reader.latest()[1].tolist() == version(0).tolist()
    assert attempts_of(client) == {}


def test_a_first_publisher_takes_the_partitions_of_another_that_has_begun(open_parameters, client, between):
    between(die)
    with pytest.raises(PublisherDiesError):
        open_parameters("w", partitions=3).publish(version(0), 0)
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match=r"somebody has begun to publish parameters 'w' with 3 partitions, not 2, .*\. Publish with their "
        r"number of partitions; or, if they have died, delete\(\) the parameters, or wait 2 min,",
    ):
        open_parameters("w", partitions=2).publish(version(1), 1)
    other = open_parameters("w")
    assert other.latest() is None
    other.publish(version(1), 1)
    assert len(partitioned_keys(client).partitions) == 3
    assert other.latest()[1].tolist() == version(1).tolist()
    other.delete()
    assert remaining(client) == []


def test_a_first_version_that_was_begun_can_be_deleted(open_parameters, client, between):
    between(die)
    with pytest.raises(PublisherDiesError):
        open_parameters("w", partitions=3).publish(version(0), 0)
    assert len(parts_of(client)) == 3
    weights = open_parameters("w", partitions=2)
    weights.delete()
    assert remaining(client) == []
    weights.publish(version(1), 1)
    assert len(parts_of(client)) == 2
    weights.delete()


def test_a_first_publisher_whose_attempt_is_deleted_begins_anew(open_parameters, client, between):
    weights, other = open_parameters("w", partitions=3), open_parameters("w")
    between(lambda _: other.delete())
    weights.publish(version(0), 0)
    assert other.latest()[1].tolist() == version(0).tolist()
    assert len(parts_of(client)) == 3
    weights.delete()


def test_a_second_registration_shortens_no_lease(open_parameters, client, between, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(partition_writer, "ATTEMPT_MS", 600_000)
        between(die)
        with pytest.raises(PublisherDiesError):
            open_parameters("w", partitions=3).publish(version(0), 0)
    between(die)
    with pytest.raises(PublisherDiesError):
        open_parameters("w").publish(version(0), 0)
    assert client.pttl(RECORD) > 650_000
    redisacc.Parameters("w", redis=client).delete()


def test_two_first_publishers(open_parameters, client, between):
    one, other = open_parameters("w", partitions=3), open_parameters("w", partitions="auto")
    between(lambda _: other.publish(version(1), 1))
    with pytest.raises(redisacc.ConflictError, match="already"):
        one.publish(version(0), 0)
    assert one.latest()[0] == 1
    # The parts of the one that was refused are gone.
    assert len(parts_of(client)) == 3
    assert attempts_of(client) == {}
    one.delete()


def test_a_late_copy_of_a_registration_revives_nothing(weights, client, between):
    """It gets a number of its own, and the commit of the swept attempt stays refused."""
    weights.publish(version(0), 0)
    registered, committed = [], []
    register, commit = ParameterScripts.register_version, ParameterScripts.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ParameterScripts,
            "register_version",
            lambda self, *args, **options: registered.append((args, options)) or register(self, *args, **options),
        )
        patch.setattr(
            ParameterScripts,
            "publish",
            lambda self, *args, **options: committed.append((args, options)) or die([]),
        )
        with pytest.raises(PublisherDiesError):
            weights.publish(version(1), 1)
    end_leases(client)
    keys = partitioned_keys(client)
    assert sweep(connect(client), keys) == 1
    scripts = ParameterScripts(connect(client), keys)
    ((args, options),) = registered
    assert register(scripts, *args, **options) == RegisteredVersion(3)
    ((args, options),) = committed
    assert commit(scripts, *args, **options) == "expired"
    assert client.hget(RECORD, "step") == b"0"
    end_leases(client)
    assert sweep(connect(client), keys) == 1


def test_late_copies_of_everything_change_nothing(weights, reader, client, monkeypatch):
    sent, committed = [], []
    scatter, commit = Transport.scatter, ParameterScripts.publish
    with monkeypatch.context() as patch:
        patch.setattr(
            Transport,
            "scatter",
            lambda self, batches, **options: sent.extend(batches) or scatter(self, batches, **options),
        )
        patch.setattr(
            ParameterScripts,
            "publish",
            lambda self, *args, **options: committed.append((args, options)) or commit(self, *args, **options),
        )
        weights.publish(version(0), 0)
    ((args, options),) = committed
    scripts = ParameterScripts(connect(client), partitioned_keys(client))
    for set_part, *_ in sent:
        connect(client).call(*set_part)
    assert commit(scripts, *args, **options) == "published"
    assert [client.pttl(key) for key in parts_of(client)] == [-1, -1, -1]
    assert attempts_of(client) == {}
    weights.publish(version(1), 1)
    before = attempts_of(client)
    # Slow readers of the first version keep their minute.
    assert commit(scripts, *args, **options) == "changed"
    assert attempts_of(client) == before
    assert reader.latest()[1].tolist() == version(1).tolist()


def test_a_node_that_has_not_stored_a_part_keeps_the_version_from_being_published(weights, reader, client, monkeypatch):
    weights.publish(version(0), 0)
    scatter = Transport.scatter

    def lose_one(self, batches, **options):
        replies = scatter(self, batches, **options)
        monkeypatch.undo()
        monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
        replies[1][2] = 0
        return replies

    monkeypatch.setattr(Transport, "scatter", lose_one)
    weights.publish(version(1), 1)
    # The number of the attempt after the one that failed.
    assert published(client).endswith("-3")
    assert reader.latest()[1].tolist() == version(1).tolist()
    assert len(parts_of(client)) == 6


def test_a_publisher_whose_parts_keep_disappearing_pauses_and_says_so(
    durations, weights, reader, client, monkeypatch, caplog
):
    tries, waited = [], []

    def clock(*, waited=0.0, pauses=waited):
        """It runs only while the publisher pauses, so that a slow machine changes nothing."""
        pauses.append(waited)
        return sum(pauses)

    started = time.monotonic()
    with monkeypatch.context() as patch:
        durations(call=0.3)
        patch.setattr("redisacc._protocol.parameters.publisher.running_time", clock)
        patch.setattr(
            "redisacc._protocol.parameters.version_writer.write_parts",
            lambda *_, **__: tries.append(1) or None,
        )
        with (
            caplog.at_level(logging.WARNING, "redisacc"),
            pytest.raises(redisacc.ServerError, match=r"step 0 .* in 3 tries within 0 s\. .* parts of it disappeared"),
        ):
            weights.publish(version(0), 0)
    # At once, and after 50 and 100 milliseconds.
    assert len(tries) == 3
    assert [pause for pause in waited if pause] == [0.05, 0.1]
    assert time.monotonic() - started >= 0.15
    (said,) = [record.getMessage() for record in caplog.records]
    assert "w: step 0 could not be published yet, because parts of it disappeared" in said
    weights.publish(version(0), 0)
    assert reader.latest()[0] == 0
    assert attempts_of(client) == {}


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
    assert reader.latest()[1].tolist() == version(0).tolist()
    client.delete(next(key for key in parts_of(client) if "-full:2" in key and published(client) in key))
    weights.publish(version(1), 1)
    assert reader.latest()[1].tolist() == version(1).tolist()
    with pytest.raises(redisacc.ConflictError, match="already"):
        weights.publish(version(0), 0)


@pytest.mark.forges
def test_rows_that_changed_in_a_lost_table_are_published_with_the_whole_table(open_parameters, weights, client):
    table = np.zeros((20, 50))
    weights.publish({"table": table}, 0)
    client.delete(next(key for key in parts_of(client) if key.endswith("-full:1")))
    table[3] += 1
    weights.publish({"table": table}, 1, changed={"table": [3]})
    assert open_parameters("w").latest()[1]["table"].tolist() == table.tolist()


def test_deletion_removes_all_parts(open_parameters, client, between):
    weights = open_parameters("w", partitions=3)
    for step in range(2):
        weights.publish(version(step), step, state=version(9))
    between(die)
    with pytest.raises(PublisherDiesError):
        weights.publish(version(3), 3)
    # Two blobs of two versions each, and one of the attempt.
    assert len(parts_of(client)) == 15
    weights.delete()
    assert remaining(client) == []


def test_a_publisher_whose_parameters_are_deleted_leaves_nothing(open_parameters, client, between):
    weights, other = open_parameters("w", partitions=3), open_parameters("w")
    weights.publish(version(0), 0)
    between(lambda _: other.delete())
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        weights.publish(version(1), 1)
    assert remaining(client) == []


def test_a_publisher_that_writes_after_the_deletion_removes_its_parts(open_parameters, client, monkeypatch):
    weights, other = open_parameters("w", partitions=3), open_parameters("w")
    weights.publish(version(0), 0)
    register = ParameterScripts.register_version

    def then_delete(self, *args, **options):
        registered = register(self, *args, **options)
        other.delete()
        return registered

    monkeypatch.setattr(ParameterScripts, "register_version", then_delete)
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        weights.publish(version(1), 1)
    assert remaining(client) == []


def test_an_interrupted_deletion_is_finished_by_who_publishes(open_parameters, client, monkeypatch):
    old = open_parameters("w", partitions=3)
    old.publish(version(0), 0)
    with monkeypatch.context() as patch:
        patch.setattr("redisacc._protocol.parameters.deletion.listed_objects", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            old.delete()
    new = open_parameters("w", partitions=2)
    assert new.latest() is None
    new.publish(version(1), 0)
    assert new.latest()[1].tolist() == version(1).tolist()
    assert len(parts_of(client)) == 2


@pytest.mark.servers(*REAL)
def test_gc_finds_attempts_that_are_over_and_retired_blobs(weights, reader, client, between):
    weights.publish(version(0), 0)
    weights.publish(version(1), 1)
    between(die)
    with pytest.raises(PublisherDiesError):
        weights.publish(version(2), 2)
    transport = connect(client)
    assert find_garbage(transport) == []
    end_leases(client)
    (leftover,) = find_garbage(transport)
    assert (leftover.name, leftover.why) == ("w", "blobs")
    assert remove_garbage(transport, leftover) == 1
    assert (len(parts_of(client)), find_garbage(transport)) == (3, [])
    assert reader.latest()[1].tolist() == version(1).tolist()


@pytest.mark.servers(*REAL)
def test_gc_removes_parts_that_no_version_has_and_no_others(open_parameters, weights, client):
    # Its name is that of a partition.
    other = open_parameters("w/0", partitions=None)
    other.publish(version(4), 0)
    weights.publish(version(0), 0)
    weights.publish(version(1), 1)
    transport, keys = connect(client), partitioned_keys(client)
    assert find_garbage(transport) == []
    orphan = keys.part("0123456789abcdef-1-full", 0)
    client.set(orphan, b"late")
    client.set(keys.part("0123456789abcdef-2-full", 1), b"expires", px=60_000)
    (leftover,) = find_garbage(transport)
    assert (leftover.name, leftover.why, list(leftover.keys)) == ("w", "blob", [orphan])
    assert remove_garbage(transport, leftover) == 1
    assert find_garbage(transport) == []
    other.delete()
    # A record that somebody has removed leaves its parts, and the list of attempts.
    client.delete(RECORD)
    found = find_garbage(transport)
    assert sorted(leftover.why for leftover in found) == ["blob", "name", "object"]
    for leftover in found:
        assert remove_garbage(transport, leftover)
    assert len(parts_of(client)) == 1
    assert find_garbage(transport) == []


@pytest.fixture
def forgotten(open_parameters, client, between):
    """Parts of a first publisher that died with 3 partitions, and whose record has expired."""
    between(die)
    with pytest.raises(PublisherDiesError):
        open_parameters("w", partitions=3).publish(version(0), 0)
    # What the server does at the end of the expiry.
    client.delete(RECORD)
    found = parts_of(client)
    assert len(found) == 3
    return found


@pytest.mark.servers(*REAL)
@pytest.mark.parametrize("partitions", [None, 2])
def test_gc_removes_the_parts_of_a_first_publisher_that_was_forgotten(open_parameters, client, forgotten, partitions):
    """The next one has no partitions, or others."""
    weights = open_parameters("w", partitions=partitions)
    weights.publish(version(1), 1)
    transport = connect(client)
    found = find_garbage(transport)
    for leftover in found:
        assert remove_garbage(transport, leftover)
    assert {leftover.why for leftover in found} == ({"blob", "blobs"} if partitions is None else {"blob"})
    assert not set(forgotten) & set(parts_of(client))
    assert find_garbage(transport) == []
    assert attempts_of(client) == {}
    assert weights.latest()[1].tolist() == version(1).tolist()
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
    client.zadd(ATTEMPTS, {"foreign member": 1, "x-1 999999999": 1, f"x-2 {MOST_PARTS + 1}": 1, "x-3 0": 1})
    weights.publish(version(1), 1)
    assert [member for member in attempts_of(client) if member.startswith(("x-", "foreign"))] == []
    assert open_parameters("w").latest()[1].tolist() == version(1).tolist()


def test_the_parts_of_an_attempt_are_removed_in_slices(client, monkeypatch):
    """Somebody may have listed an attempt that claims very many of them."""
    keys = ParameterKeys("w", (0, 1, 2))
    attempts = [StoredAttempt("x-1", 100_000), StoredAttempt("x-2", 7)]
    expected = [keys.part("x-1", number) for number in range(100_000)]
    expected += [keys.part("x-2", number) for number in range(7)]
    assert [key for some in part_keys(keys, attempts) for key in some] == expected
    sent = []
    monkeypatch.setattr(Transport, "scatter", lambda self, batches, **_: sent.append(sum(map(len, batches))))
    remove_parts(connect(client), keys, attempts)
    assert sent == [10_000] * 10 + [7]
    with pytest.raises(redisacc.CorruptDataError, match="x-1 100001"):
        StoredAttempt.parse("key", b"x-1 100001")


def test_an_attempt_is_listed_like_that_of_a_gradient():
    blob = parameter_record.Blob("0123456789abcdef-999999999999999-state", 2**33)
    member = str(blob.attempt(ParameterKeys("w", tuple(range(1000)))))
    assert len(member) <= 72
    assert str(StoredAttempt.parse("key", member.encode())) == member
