"""Parameters: what a publisher publishes is what readers read, whole, and with as few bytes as possible."""

import collections
import logging

import ml_dtypes
import numpy as np
import pytest
from support.leaks import remaining

import redisacc


def same(one, other):
    """Whether two trees have the same structure, dtypes and bytes."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


QUANTISED = np.zeros(2, [("qint8", np.int8)])
TREES = {
    "an array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a scalar": np.float64(2.5),
    "a number": 3,
    "a dict": {"w": np.ones((2, 2), np.float32), "b": np.zeros(2, np.int8)},
    "nested": {"layers": [{"w": np.ones(3)}, (np.arange(4, dtype=np.uint16), None)], "none": None},
    "dtypes": [
        np.array([1.5, -2], dtype)
        for dtype in (np.float16, ml_dtypes.bfloat16, np.complex64, np.complex128, np.float64)
    ]
    + [np.array([True, False, True]), np.array([-1, 5], np.int64), np.array([2**64 - 1], np.uint64), QUANTISED],
    "empty arrays": {"a": np.zeros((0, 3), np.float32), "b": np.zeros((2, 0)), "c": np.ones(1, np.int8)},
    "only empty arrays": [np.zeros(0, np.float32)],
    "not in order": np.arange(12.0).reshape(3, 4).T,
    "odd keys": {"a/b": np.ones(1), "ü 😀": np.zeros(1), "7": np.ones(2)},
}  # fmt: skip


def test_what_is_published_is_what_is_read(open_parameters):
    for what, tree in TREES.items():
        open_parameters(what).publish(tree, 5, state=tree)
        reader = open_parameters(what)
        for step, found in (reader.latest(), reader.latest_state()):
            assert step == 5
            assert same(found, tree if what != "a number" else np.int64(3)), what


def test_a_big_endian_array_is_read_in_the_order_of_the_machine(open_parameters):
    open_parameters().publish(np.arange(3, dtype=">i4"), 0)
    found = open_parameters().latest()[1]
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 2]


def test_a_name_that_must_exist(open_parameters):
    open_parameters("embedding").publish(np.ones(1), 0)
    with pytest.raises(redisacc.NotFoundError, match=r"'embeding', and create=False requires it$"):
        open_parameters("embeding", create=False)
    assert open_parameters("embedding", create=False).step() == 0


def test_memory_is_used_again(open_parameters):
    writer, reader = open_parameters(), open_parameters()
    table = np.zeros((100, 4), np.float32)
    places = collections.defaultdict(set)
    tree = None
    for step in range(20):
        writer.publish({"table": table, "dense": table[:50] + step}, step, changed={"table": [step]} if step else None)
        _, tree = reader.latest()
        for name, array in tree.items():
            places[name].add(array.__array_interface__["data"][0])
    # The first two of the table are of versions in which it was not yet known that only rows change.
    assert len(places["dense"]) <= 3
    assert len(places["table"]) <= 4


def test_the_publisher_may_change_its_arrays(open_parameters):
    weights = open_parameters()
    tree = {"w": np.zeros(3), "v": np.zeros(3)}
    weights.publish(tree, 0)
    tree["w"] += 1
    assert weights.latest()[1]["w"].tolist() == [0, 0, 0]


# Steps


def test_who_publishes_the_same_again_lists_the_name(open_parameters, client):
    """The first publisher may have died before it did."""
    open_parameters().publish(np.ones(2), 0)
    client.delete("redisacc:names")
    open_parameters().publish(np.ones(2), 0)
    assert client.smembers("redisacc:names") == {b"weights"}


@pytest.mark.fixed("partitions")
def test_the_same_again_with_only_rows(open_parameters, client):
    table = np.zeros((100, 4), np.float32)
    writer = open_parameters()
    writer.publish(table, 0)
    table[7] = 1
    writer.publish(table, 1, changed={".": [7]})
    before = client.hgetall("redisacc:{weights}:parameters")
    writer.publish(table, 1, changed={".": [7]})
    successor = open_parameters()
    successor.publish(table, 1, changed={".": [7]})
    assert client.hgetall("redisacc:{weights}:parameters") == before
    # Having found it published, the successor knows which rows differ from it.
    known = objects(client)
    table[8] = 1
    successor.publish(table, 2, changed={".": [8]})
    assert uploaded(client, known) == [8 + 16]
    assert same(open_parameters().latest()[1], table)


def test_something_else_for_the_same_step(open_parameters, client):
    tree = {"v": np.ones(2), "w": np.array([1, 0.0])}
    open_parameters().publish(tree, 3, state=[np.ones(3)])
    before = client.hgetall("redisacc:{weights}:parameters")
    for other, state, where in (
        ({**tree, "w": np.array([1, -0.0])}, [np.ones(3)], "the tree at 'w'"),
        (tree, None, "whether there is a state"),
        (tree, [np.zeros(3)], "the state at '0'"),
        (tree, [np.ones(4)], "the structure of the state"),
    ):
        with pytest.raises(redisacc.ConflictError, match=f"^step 3 of .* is published already, and differs in {where}"):
            open_parameters().publish(other, 3, state=state)
    assert client.hgetall("redisacc:{weights}:parameters") == before


# What cannot be published

TREE = {"table": np.zeros((4, 2), np.float32), "layers": [np.zeros(3), np.zeros(3)], "scalar": np.float32(0)}


OTHER_TREES = [
    (TREE | {"table": np.zeros((4, 2))}, "tree at 'table' must be float32 .4,2., not float64 .4,2."),
    (TREE | {"table": np.zeros((4, 3), np.float32)}, "tree at 'table' must be float32 .4,2., not float32 .4,3."),
    (TREE | {"layers": [np.zeros(3)]}, "tree lacks 'layers/1'"),
    (TREE | {"layers": (np.zeros(3), np.zeros(3))}, "tree at 'layers' must be a list"),
    (TREE | {"more": np.zeros(3)}, "tree has 'more', which is surplus"),
    (np.zeros(3), "tree must be a dict"),
]


def test_a_tree_unlike_the_first(open_parameters, client):
    writer = open_parameters()
    writer.publish(TREE, 0)
    before = client.hgetall("redisacc:{weights}:parameters")
    advice = "Choose another name for another model, or delete this one"
    for tree, message in OTHER_TREES:
        for handle in (writer, open_parameters()):
            with pytest.raises(redisacc.InvalidArgumentError, match=rf"{message}.*\. {advice}"):
                handle.publish(tree, 1)
    assert client.hgetall("redisacc:{weights}:parameters") == before


WRONG_ROWS = [
    ({"other": [1]}, "changed names 'other', which is not the path of a leaf"),
    ({3: [1]}, "changed names 3"),
    ({"table": [4]}, "changed\\['table'\\] must be below 4, the number of rows, but holds 4"),
    ({"table": [-1]}, "must not be negative"),
    ({"table": [0.5]}, "must be integers"),
    ({"table": [True]}, "must be integers"),
    ({"table": [[0]]}, "must be a vector"),
    ({"scalar": []}, "the leaf is a scalar"),
    ([1], "changed must be a dict"),
]


def test_rows_that_cannot_have_changed(open_parameters, client):
    writer = open_parameters()
    writer.publish(TREE, 0)
    before = client.hgetall("redisacc:{weights}:parameters")
    for changed, message in WRONG_ROWS:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            writer.publish(TREE, 1, changed=changed)
    assert client.hgetall("redisacc:{weights}:parameters") == before


NO_VERSIONS = [
    (({}, 0), "tree must have at least one leaf"),
    ((np.array(["text"]), 0), "tree at '.' must have one of the dtypes .*bool.*, not <U4"),
    ((np.zeros(1, object), 0), "tree at '.' must have one of the dtypes"),
    ((np.ma.masked_array([1.0], [True]), 0), "masked"),
    ((np.zeros(1), 0.5), "step must be an integer"),
    ((np.zeros(1), True), "step must be an integer"),
    (({1: np.zeros(1)}, 0), "the keys of tree must be texts"),
]


def test_what_is_no_version(open_parameters, client):
    weights = open_parameters()
    for arguments, message in NO_VERSIONS:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            weights.publish(*arguments)
    assert remaining(client) == []


# Rows


def objects(client):
    """The keys of the parts of all versions."""
    return set(client.scan_iter("redisacc:{weights}:parameters:object:*"))


def uploaded(client, known):
    """The sizes of the parts that are new."""
    return sorted(client.strlen(key) for key in objects(client) - known)


@pytest.mark.fixed("partitions")
def test_only_rows_that_changed_are_uploaded_and_fetched(proxy, open_parameters, client):
    table, other, dense = np.zeros((10_000, 8), np.float32), np.ones((500, 2)), np.zeros(4)
    writer, reader = open_parameters(), open_parameters(redis=proxy.where)
    tree = {"table": table, "other": other, "dense": dense}

    def fetched():
        number = sum(proxy.lengths["reply"])
        proxy.listen_anew()
        return number

    def publish(step, changed):
        known = objects(client)
        writer.publish(tree, step, changed=changed)
        return sum(uploaded(client, known))

    whole = table.nbytes + other.nbytes + dense.nbytes
    assert publish(0, None) == whole
    reader.latest()
    assert fetched() >= whole
    for step in range(1, 5):
        table[[step, 9_000 + step]] = step
        dense += 1
        assert publish(step, {"table": [9_000 + step, step, step], "other": []}) == 2 * (8 + 32) + 32
        assert same(reader.latest()[1], tree)
        # The record, and the rows.
        assert fetched() < 2000
    # A leaf that is not named is uploaded whole, as it is.
    other += 1
    assert publish(5, {"table": []}) == other.nbytes + dense.nbytes
    assert same(reader.latest()[1], tree)
    assert other.nbytes < fetched() < other.nbytes + 2000


def stored(client, *, living):
    """The size of all objects, or of those that the latest version consists of."""
    keys = list(client.scan_iter("redisacc:{weights}:parameters:object:*"))
    return sum(client.strlen(key) for key in keys if not living or client.pttl(key) == -1)


def test_what_is_stored_is_bounded(open_parameters, client):
    table = np.zeros((1000, 16), np.float32)
    writer = open_parameters()
    writer.publish({"table": table, "b": np.zeros(2)}, 0)
    for step in range(1, 400):
        table[step : step + 30] += 1
        writer.publish({"table": table, "b": np.zeros(2)}, step, changed={"table": range(step, step + 30)})
        if step % 19 == 0:
            assert stored(client, living=True) < 2 * table.nbytes
    assert len(client.hget("redisacc:{weights}:parameters", "rows").split()) < 256
    assert stored(client, living=False) < 2 * table.nbytes + 32 * 2**20


def test_a_small_table_does_not_keep_large_arrays_of_an_earlier_version(open_parameters, client):
    table, dense = np.zeros((1000, 4)), np.zeros(50_000)
    writer = open_parameters()
    for step in range(3):
        writer.publish({"table": table, "dense": dense}, step, changed={"table": [step]} if step else None)
        assert stored(client, living=True) < 1.1 * (table.nbytes + dense.nbytes)


# Waiting


@pytest.mark.servers("valkey")
def test_a_wait_for_the_step_after_the_last_one_asks_only_when_it_hears_something(open_parameters, real_client):
    def asked():
        return real_client.info("commandstats")["cmdstat_hmget"]["calls"]

    reader, writer = open_parameters(), open_parameters()
    writer.publish(np.ones(1), 1)
    for _ in range(2):
        # The second time, the channel is subscribed to.
        assert reader.wait(timeout=20)[0] == 1
        with pytest.raises(redisacc.WaitTimeoutError):
            reader.wait(after=1, timeout=0.05)
    before = asked()
    with pytest.raises(redisacc.WaitTimeoutError):
        reader.wait(after=1, timeout=0.05)
    # At its end.
    assert asked() == before + 1
    writer.publish(np.ones(1), 2)
    assert reader.wait(after=1, timeout=20)[0] == 2


@pytest.fixture
def reported(durations, caplog, until):
    """Waits until as many waits for parameters have been logged, and so have begun."""
    durations(report=0.01)
    caplog.set_level(logging.WARNING, "redisacc")

    def wait(number=1):
        until(lambda: len([record for record in caplog.records if "still waiting for" in record.message]) >= number)

    return wait


def test_closing_ends_a_wait(open_parameters, background, reported):
    reader = open_parameters()
    waiting = background(reader.wait)
    reported()
    reader.close()
    reader.close()
    with pytest.raises(redisacc.CancelledError, match="closed while waiting for parameters"):
        waiting.result()
    for call in (reader.latest, reader.step, reader.wait, reader.delete, reader.latest_state):
        with pytest.raises(redisacc.CancelledError):
            call()
    with pytest.raises(redisacc.CancelledError):
        reader.publish(np.ones(1), 0)


def test_the_caller_may_cancel_a_wait(open_parameters):
    writer = open_parameters()
    asked = []

    def cancel():
        asked.append(1)
        return len(asked) > 1

    for publish in (lambda: None, lambda: writer.publish(np.ones(1), 3)):
        publish()
        asked.clear()
        with pytest.raises(redisacc.CancelledError, match="canceled while waiting for parameters"):
            writer.wait(after=3, timeout=20, cancel=cancel)
        assert len(asked) == 2
    # A version that is there is returned all the same.
    assert writer.wait(after=2, timeout=20, cancel=lambda: True)[0] == 3


def test_a_publisher_may_say_that_it_has_finished(open_parameters, background, reported):
    writer, reader = open_parameters(), open_parameters()
    writer.publish(np.ones(1), 0)
    waiting = background(reader.wait, 0)
    reported()
    writer.finish()
    with pytest.raises(redisacc.FinishedError):
        waiting.result()
    # The last version can still be read.
    assert reader.wait(timeout=0)[0] == 0
    assert reader.finished()
    writer.finish(False)
    assert not reader.finished()
    with pytest.raises(redisacc.WaitTimeoutError, match="timed out waiting for parameters"):
        reader.wait(after=0, timeout=0)


def test_whether_it_has_finished_is_a_flag(open_parameters, client):
    for wrong in (1, None):
        with pytest.raises(redisacc.InvalidArgumentError, match="finished"):
            open_parameters().publish(np.ones(1), 0, finished=wrong)
    with pytest.raises(redisacc.InvalidArgumentError, match="skip_last"):
        open_parameters().wait(skip_last="yes", timeout=0)
    assert remaining(client) == []


def test_a_long_wait_says_what_it_waits_for(open_parameters, background, until, caplog, durations):
    durations(report=0.01)
    caplog.set_level(logging.WARNING, "redisacc")
    open_parameters("training").publish(np.ones(1), 0)
    reader = open_parameters("trainings")
    waiting = background(reader.wait)
    until(lambda: caplog.records)
    assert caplog.records[0].getMessage() == (
        "trainings: still waiting for parameters: nothing has been published, so check the name"
    )
    assert caplog.records[0].accumulator == "trainings"
    caplog.clear()
    open_parameters("trainings").publish(np.ones(1), 4)
    waiting.result()
    waiting = background(reader.wait, 4)
    until(lambda: "parameters after step 4: step 4 is the last that was published" in caplog.text)
    reader.close()
    with pytest.raises(redisacc.CancelledError):
        waiting.result()


@pytest.mark.fixed("client")
@pytest.mark.fixed("partitions")
@pytest.mark.parametrize("gone", [False, True])
def test_a_reader_that_was_overtaken_by_another_thread(proxy, open_parameters, client, gone):
    """It reads its version, or the newer one if that is gone. What the other thread has read stays as it is."""
    writer, reader = open_parameters(), open_parameters(redis=proxy.where)
    # Two parts, of which the first is still there when the second is not.
    versions = [np.full(300_000, float(step)) for step in range(3)]
    writer.publish(versions[0], 0)
    reader.latest()
    writer.publish(versions[1], 1)
    read = []

    def overtake():
        writer.publish(versions[2], 2)
        read.append(reader.latest()[1])
        if gone:
            client.delete(*[key for key in objects(client) if key.endswith(b":1") and client.pttl(key) != -1])

    # It has asked for the record, and does not know it yet.
    proxy.after("HMGET", overtake)
    assert same(reader.latest()[1], versions[2 if gone else 1])
    assert same(read[0], versions[2])


# Deletion


def test_a_deletion_leaves_a_mark(open_parameters, client):
    """Deleted and published again, many times: the last incarnations are listed, and the key expires."""
    incarnations = []
    for _ in range(18):
        weights = open_parameters()
        weights.publish(np.ones(1), 0)
        incarnations.insert(0, client.hget("redisacc:{weights}:parameters", "incarnation").decode())
        weights.delete()
    mark = "redisacc:{weights}:parameters:deleted"
    assert client.get(mark).decode().split() == incarnations[:16]
    assert 6.9 * 86_400_000 < client.pttl(mark) <= 7 * 86_400_000


def test_other_parameters_under_the_name(open_parameters):
    old = open_parameters()
    old.publish(np.ones(1), 5)
    old.delete()
    new = open_parameters()
    new.publish({"other": np.ones(2)}, 0)
    for call in (old.latest, old.step, lambda: old.publish(np.ones(1), 6)):
        with pytest.raises(
            redisacc.NotFoundError, match=r"published again after this handle had seen them\. Open them again"
        ):
            call()
    old.delete()
    assert new.step() == 0
