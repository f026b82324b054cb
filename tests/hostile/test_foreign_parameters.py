"""Foreign bytes in the record and the objects of parameters: a typed error that says where, and nothing is trusted."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from support.leaks import remaining

import redisacc
from redisacc._format.keys import ParameterKeys

pytestmark = pytest.mark.forges

KEYS = ParameterKeys("w")


@pytest.fixture
def chief(open_parameters):
    """Has published three versions: a table of which rows changed, a boolean leaf and a dense one, and a state."""
    handle = open_parameters("w")
    tree = {"table": np.zeros((50, 4)), "flags": np.zeros(5, bool), "dense": np.zeros(3)}
    handle.publish(tree, 0)
    for step in (1, 2):
        handle.publish(tree, step, changed={"table": [1, 7], "flags": [2]}, state=[np.zeros(3)])
    return handle


def all_reads(open_parameters):
    """Every way to read, and to publish, by a handle that knows nothing yet."""

    def opened():
        return open_parameters("w")

    tree = {"table": np.zeros((50, 4)), "flags": np.zeros(5, bool), "dense": np.zeros(3)}
    return [
        lambda: opened().latest(),
        lambda: opened().wait(timeout=0),
        lambda: opened().publish(tree, 2, state=[np.zeros(3)]),
    ]


VERSION = b"0123456789abcdef"
FORGERIES = [
    *[("step", value) for value in (b"", b"x", b"1.0", b"-", b"9" * 19, b"1" * 1000, b"\xff")],
    *[("version", value) for value in (b"", b"v" * 100, b"\xff")],
    *[("incarnation", value) for value in (b"", b"v" * 100, b"\xff")],
    *[("rows_since", value) for value in (b"", b"x", b"9" * 30)],
    *[("full", value) for value in (b"", b" ", b"x", b"x:0:0:0-2", VERSION + b"-full:0:0", b":" * 10_000)],
    *[
        ("full", VERSION + b"-full:" + rest)
        for rest in (b"0:0:0-1", b"0:0:0-3", b"0:0:2-0", b"0:0:0-99999", b"0:0:0,0", b"0:0:", b"0:1:0-2", b"3:3:0-2")
    ],
    ("full", VERSION + b"-other:0:0:0-2"),
    *[("rows", VERSION + b"-rows:" + rest) for rest in (b"1", b"1:", b"1:0", b"1:0=", b"1:0=0", b"1:9=1", b"3:2=1")],
    *[("rows", VERSION + b"-rows:" + rest) for rest in (b"1:2=51", b"1:2=1,1=1", b"1:2=1,2=1", b"x:2=1")],
    ("rows", b" ".join([VERSION + b"-rows:1:2=1"] * 2)),
    ("rows", b" ".join([VERSION + b"-rows:1:2=1"] * 20_000)),
    *[("structure", value) for value in (b"", b"x", b"{}", b'{"a":"float32"}', b"\xff", b"[" * 100_000, b'"text []"')],
    *[("encoding", value) for value in (b"", b"int8", b"float64", b"bfloat16 ", b"\xff", b"x" * 10_000)],
    ("structure", b'"float32 [9223372036854775807,9223372036854775807]"'),
    ("structure", b'"float32 [' + b"1," * 300 + b'1]"'),
]


@pytest.mark.parametrize(("field", "value"), FORGERIES)
def test_garbage_in_the_record(chief, open_parameters, client, field, value):
    client.hset(KEYS.record, field, value)
    for read in all_reads(open_parameters):
        with pytest.raises(redisacc.CorruptDataError) as caught:
            read()
        assert len(str(caught.value)) < 2000
    assert client.hget(KEYS.record, field) == value


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("format", "have format 'future' .*: delete them with the version that published them"),
        ("encoding", "are stored with the encoding 'future', .*: read them with the version that published them"),
    ],
)
def test_parameters_of_another_version_say_which_version_can_do_what(chief, open_parameters, client, field, message):
    client.hset(KEYS.record, field, "future")
    for read in all_reads(open_parameters):
        with pytest.raises(redisacc.CorruptDataError, match=message):
            read()


@pytest.mark.parametrize(
    "field", ["format", "incarnation", "version", "step", "full", "rows", "rows_since", "structure"]
)
def test_a_field_that_is_missing(chief, open_parameters, client, field):
    client.hdel(KEYS.record, field)
    for read in all_reads(open_parameters):
        with pytest.raises((redisacc.CorruptDataError, redisacc.NotFoundError)):
            read()


@pytest.mark.parametrize(("encoding", "claimed"), [("float32", b"bfloat16"), ("bfloat16", b"float32")])
def test_another_encoding_than_that_of_the_parts(open_parameters, client, encoding, claimed):
    weights = open_parameters("w", encoding=encoding)
    weights.publish(np.ones((50, 4), np.float32), 1)
    weights.publish(np.ones((50, 4), np.float32), 2, changed={".": [3]})
    client.hset(KEYS.record, "encoding", claimed)
    for read in (open_parameters("w").latest, open_parameters("w").wait):
        with pytest.raises(redisacc.CorruptDataError, match=r"object:.* has \d+ bytes, and the record says \d+"):
            read()


def test_another_format(chief, open_parameters, client):
    client.hset(KEYS.record, "format", b"2")
    for read in (*all_reads(open_parameters), chief.latest):
        with pytest.raises(redisacc.CorruptDataError, match=r"format '2' .* reads format '1'"):
            read()


@pytest.mark.parametrize(
    ("field", "value"),
    [("state", b"x"), ("state", VERSION + b"-state:1"), ("state_structure", b"[]"), ("state_structure", b'"int8 [3]"')],
)
def test_garbage_about_the_state(chief, open_parameters, client, field, value):
    client.hset(KEYS.record, field, value)
    with pytest.raises(redisacc.CorruptDataError):
        open_parameters("w").latest_state()


@pytest.mark.parametrize("retired", [b"x", VERSION + b"-full:0", VERSION + b"-full:" + b"9" * 30, b"\xff"])
def test_garbage_about_what_is_retired(chief, open_parameters, client, retired):
    client.hset(KEYS.record, "retired", retired)
    other = open_parameters("w")
    step, tree = other.latest()
    with pytest.raises(redisacc.CorruptDataError, match="retired holds"):
        other.publish(tree, 3)
    assert other.step() == step


def objects(client, sort):
    return [key for key in client.keys(f"{KEYS.record}:object:*-{sort}:*") if client.pttl(key) == -1]


@pytest.mark.parametrize("sort", ["full", "rows", "state"])
@pytest.mark.parametrize("how", ["shorter", "longer", "empty", "another type", "missing"])
def test_objects_that_are_not_what_they_were(chief, open_parameters, client, sort, how):
    found = objects(client, sort)
    assert found
    for key in found:
        held = client.get(key)
        client.delete(key)
        match how:
            case "shorter":
                client.set(key, held[:-1])
            case "longer":
                client.set(key, held + b"x")
            case "empty":
                client.set(key, b"")
            case "another type":
                client.rpush(key, "x")
    handle = open_parameters("w")
    with pytest.raises(redisacc.CorruptDataError):
        (handle.latest_state if sort == "state" else handle.latest)()
    handle.delete()
    assert remaining(client) == []


@pytest.mark.parametrize("indices", [[-1, 7], [7, 1], [1, 1], [1, 50], [1, 2**62]])
def test_forged_indices(chief, open_parameters, client, indices):
    """They would write outside of the table."""
    rows = objects(client, "rows")
    assert rows
    for key in rows:
        held = client.get(key)
        # The flags come before the table.
        start = held.rindex(np.array([1, 7], "<i8").tobytes())
        client.set(key, held[:start] + np.array(indices, "<i8").tobytes() + held[start + 16 :])
    with pytest.raises(redisacc.CorruptDataError, match="indices that are not ascending, or not below 50"):
        open_parameters("w").latest()


def test_booleans_that_are_none(open_parameters, client):
    handle = open_parameters("w")
    handle.publish(np.zeros(5, bool), 0, state=np.zeros(5, bool))
    for key in client.keys(f"{KEYS.record}:object:*"):
        client.set(key, b"\x00\x01\x02\x00\x00")
    for read in (open_parameters("w").latest, open_parameters("w").latest_state):
        with pytest.raises(redisacc.CorruptDataError, match="a boolean that is neither 0 nor 1"):
            read()


@pytest.mark.servers("valkey")
def test_a_record_that_promises_more_than_there_is_allocates_nothing(chief, open_parameters, client):
    client.hset(KEYS.record, "structure", b'"float64 [1000000000000]"')
    client.hset(KEYS.record, mapping={"full": VERSION + b"-full:0:0:0", "rows": b""})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(redisacc.CorruptDataError):
        open_parameters("w").latest()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("kind", ["string", "list"])
def test_a_record_of_another_type(open_parameters, client, kind):
    if kind == "string":
        client.set(KEYS.record, "x")
    else:
        client.rpush(KEYS.record, "x")
    with pytest.raises(redisacc.RedisAccError):
        open_parameters("w")


EVENTS = [
    b"", b"x", b"deleted", b"published", b"published step=9 blobs=", b"published step=9 blobs=x:1",
    b"published step=9 blobs=" + VERSION + b"-full:1", b"published step=9 blobs=" + VERSION + b"-full:" + b"9" * 30,
    b"published blobs=" + b",".join([VERSION + b"-full:1"] * 50), b"\xff" * 5000,
]  # fmt: skip


@pytest.mark.servers("valkey")
def test_forged_events_are_only_hints(chief, open_parameters, client, background, until):
    reader = open_parameters("w")
    waiting = background(reader.wait, 2)
    until(lambda: reader._lifetime._alarms)
    for event in EVENTS:
        client.publish(KEYS.events, event)
    assert waiting.running
    chief.publish({"table": np.ones((50, 4)), "flags": np.zeros(5, bool), "dense": np.zeros(3)}, 3)
    assert waiting.result()[0] == 3
