"""Foreign values where an accumulator of a tree keeps its structure, its sums and its gradients.

A typed error that names the key, no damage, and no huge allocation. What test_foreign_bytes.py forges in every
accumulator is not repeated.
"""

from __future__ import annotations

import itertools
import json
import struct

import msgpack
import numpy as np
import pytest
from support.memory import limited_memory
from support.planting import raw_text
from support.selection import IN_PARTS, STORAGES
from support.servers import contents

import redisacc
from redisacc import Sparse
from redisacc._data import tree as trees
from redisacc._format.keys import Keys
from redisacc._handles.existing import open_existing

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

RECORD = "redisacc:{w}"
SPEC = {"d": ("float32", (2, 2)), "i": ("int32", (3,)), "s": Sparse("float32", (9, 2))}
GRAD = {"d": np.ones((2, 2), np.float32), "i": [1, 2, 3], "s": ([1, 4], [[1, 1], [2, 2]])}


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    with limited_memory(3 * 2**30):
        yield


@pytest.fixture
def acc(request, open_tree):
    """An accumulator with two gradients, stored in the way that `only` names."""
    if request.param in IN_PARTS:
        request.getfixturevalue("force_parts")
    options = {"partitions": 3} if request.param == "partitions" else {}
    made = open_tree(SPEC, "w", in_place_limit=STORAGES[request.param], missing="skip", worker="ann", **options)
    for _ in range(2):
        made.apply_grad(GRAD)
    return made


only = {way: pytest.mark.parametrize("acc", [way], indirect=True) for way in STORAGES}


def refused(call, client, match=r"redisacc:\{w\}", error=redisacc.CorruptDataError):
    """The call fails with a typed error whose message is short and printable, and changes nothing."""
    before = contents(client)
    with pytest.raises(error, match=match) as failure:
        call()
    assert contents(client) == before
    assert raw_text(str(failure.value)) == []
    assert len(str(failure.value)) < 2000


def unreadable(acc, client):
    """The round can neither be peeked at nor taken, and a take that was granted keeps it."""
    refused(acc.peek, client)
    step, count = acc.global_step(), acc.num_accumulated()
    held = held_in(client)
    with pytest.raises(redisacc.CorruptDataError):
        acc.take_grad(1, timeout=5)
    assert held_in(client) == held
    listed = [(one.global_step, one.num_accumulated) for one in acc.info().unacknowledged]
    assert (step, count) in listed or acc.global_step() == step
    acc.delete()


def held_in(client):
    return sorted(str(value) for key, value in contents(client).items() if b":sums" in key or b":part" in key)


# The structure

RIGHT = '{"d":"float32 [2,2]","i":"int32 [3]","s":"sparse float32 [9,2]"}'
STRUCTURES = {
    "missing": None,
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "escape": b'{"\x1b]0;pwn\x07pwn":"float32 []"}',
    "escaped escape": b'{"\\u001b[31mpwn":"float32 []"}',
    "no JSON": b"{" * 3000,
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "65 levels": b"[" * 65 + b'"float32 []"' + b"]" * 65,
    "number": b"7",
    "null": b"null",
    "no leaf": b"{}",
    "duplicate keys": b'{"d":"float32 [2,2]",' + RIGHT[1:].encode(),
    "spaces": RIGHT.replace(",", ", ").encode(),
    "unknown dtype": RIGHT.replace("int32", "int31").encode(),
    "unknown dimension": RIGHT.replace("[3]", "[-1]").encode(),
    "huge": RIGHT.replace("[3]", "[9223372036854775807]").encode(),
    "too many dimensions": RIGHT.replace("[3]", f"[{'1,' * 200}1]").encode(),
    "lone surrogate": b'["\\ud800"]',
    "a leaf named like a node": b'{"d":"a dict"}',
    "many leaves": json.dumps(["float32 []"] * 100_001, separators=(",", ":")).encode(),
}


@pytest.mark.parametrize("case", STRUCTURES)
@only["in_place"]
def test_a_forged_structure(acc, client, open_tree, case):
    assert client.hget(RECORD, "tree") == RIGHT.encode()
    if STRUCTURES[case] is None:
        client.hdel(RECORD, "tree")
    else:
        client.hset(RECORD, "tree", STRUCTURES[case])
    refused(lambda: open_existing(Keys("w"), redis=client), client)
    refused(
        lambda: open_tree(SPEC, "w"), client, match="w", error=(redisacc.CorruptDataError, redisacc.SchemaMismatchError)
    )
    # A handle that was opened before does not look at it again.
    assert acc.take_grad(2)["i"].tolist() == [1, 2, 3]
    acc.delete()


@only["in_place"]
def test_a_structure_that_is_too_long(acc, client, monkeypatch):
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(RIGHT))
    open_existing(Keys("w"), redis=client).close()
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(RIGHT) - 1)
    refused(lambda: open_existing(Keys("w"), redis=client), client, f"structure of a tree has {len(RIGHT)} characters")


@only["buffered_inline"]
def test_another_structure_of_the_same_name(acc, client):
    """Whoever opens the forged tree cannot read the gradients of the true one."""
    client.hset(RECORD, "tree", RIGHT.replace("[3]", "[4]"))
    other = open_existing(Keys("w"), redis=client)
    refused(other.peek, client)
    client.hset(RECORD, "tree", RIGHT)
    assert acc.take_grad(2)["i"].tolist() == [1, 2, 3]
    other.close()


@pytest.mark.parametrize("value", [None, b"", b"one", b"\x1b[31m", b"zero\n", b"x" * 10_000])
@only["in_place"]
def test_garbage_in_missing(acc, client, open_tree, value):
    if value is None:
        client.hdel(RECORD, "missing")
    else:
        client.hset(RECORD, "missing", value)
    for call in (
        lambda: open_existing(Keys("w"), redis=client),
        lambda: open_tree(SPEC, "w", missing="skip"),
    ):
        refused(call, client, match="missing", error=(redisacc.CorruptDataError, redisacc.SchemaMismatchError))
    acc.delete()


@pytest.mark.parametrize("kind", [b"dense", b"sparse", b"Tree", b"tree\n"])
@only["in_place"]
def test_another_kind(acc, client, open_tree, kind):
    client.hset(RECORD, "kind", kind)
    refused(lambda: open_existing(Keys("w"), redis=client), client)
    refused(lambda: open_tree(SPEC, "w", missing="skip"), client, match="kind", error=redisacc.RedisAccError)
    acc.delete()


def test_an_array_whose_record_says_that_it_is_a_tree(client, open_dense):
    dense = open_dense("float32", [2], "array")
    client.hset("redisacc:{array}", mapping={"kind": "tree", "shape": "1 leaf", "tree": '["float32 [2]"]'})
    dense.apply_grad([1, 2])
    forged = open_existing(Keys("array"), redis=client)
    refused(forged.peek, client, match=r"redisacc:\{array\}")
    forged.close()
    client.hset("redisacc:{array}", mapping={"kind": "dense", "shape": "[2]", "tree": ""})
    dense.delete()


# The sums

FIELDS = [
    b"x", b":", b":0", b"0", b"dense:float32", b"dense:float32:", b"dense:float32:00", b"dense:float32:1",
    b"dense:float64:0", b"dense:int32:-1", b"sparse:s:x", b"sparse:s:9", b"sparse:s:9223372036854775808",
    b"sparse:nothing:1", b"sparse:s:1:1", b"present:1", b"total:0", b"\xff\x1b[31m:1", b"x" * 5000 + b":1",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: repr(field[:20]))
@only["in_place"]
def test_foreign_fields_among_the_sums(acc, client, field):
    like = b"sparse:s:1" if field.startswith(b"sparse") else b"dense:float32:0"
    client.hset(f"{RECORD}:sums", field, client.hget(f"{RECORD}:sums", like))
    unreadable(acc, client)


@pytest.mark.parametrize("field", ["dense:float32:0", "dense:int32:0", "sparse:s:1", "present:0", "total"])
@pytest.mark.parametrize("how", ["removed", "cut", "longer", "empty", "count"])
@only["in_place"]
def test_rows_of_each_section_that_were_changed(acc, client, field, how):
    sums = f"{RECORD}:sums"
    row = client.hget(sums, field)
    client.hdel(sums, field)
    changed = {"cut": row[:-1], "longer": row + b"\0", "empty": b"", "count": b"\x03" + row[1:]}
    if how != "removed":
        client.hset(sums, field, changed[how])
    # A total that lacks its last digit is still a total. Whoever reads the round counts the rows.
    if how not in ("removed", "count") and (field, how) != ("total", "cut"):
        refused(lambda: acc.apply_grad(GRAD), client, match="sums")
    unreadable(acc, client)


@pytest.mark.parametrize("present", [-1, 3, 2**31, 2**32 + 1, 2**53, 0.5, float("nan"), float("inf")])
@only["in_place"]
def test_forged_counts_of_leaves_in_the_sums(acc, client, present):
    row = client.hget(f"{RECORD}:sums", "present:0")
    assert struct.unpack("<Q3d", row) == (2, 2.0, 2.0, 2.0)
    client.hset(f"{RECORD}:sums", "present:0", row[:8] + struct.pack("<3d", 2, present, 2))
    unreadable(acc, client)


# Buffered gradients


def headers(client):
    """Yields the field, the order and the header of each buffered gradient."""
    for field, entry in sorted(client.hgetall(f"{RECORD}:buffered").items()):
        order, _, packed = entry.partition(b" ")
        yield field, order, msgpack.unpackb(packed)


def write(client, field, order, header):
    client.hset(f"{RECORD}:buffered", field, order + b" " + msgpack.packb(header))


# The sections in order: 2·2 float32, 3 int32, 2 rows of 2 float32, and 3 int32 that count leaves.
D, N, S, P = ["float32", [4]], ["int32", [3]], ["float32", [2, 2]], ["int32", [3]]
SECTIONS = {
    "none": [],
    "one less": [D, N, S],
    "one more": [D, N, S, P, P],
    "in another order": [D, S, N, P],
    "another dtype": [["float64", [4]], N, S, P],
    "no dtype": [["O", [4]], N, S, P],
    "another size": [["float32", [5]], N, S, P],
    "another rank": [["float32", [2, 2]], N, S, P],
    "rows of another shape": [D, N, ["float32", [2, 3]], P],
    "fewer rows": [D, N, ["float32", [1, 2]], P],
    "more rows": [D, N, ["float32", [3, 2]], P],
    "huge": [D, N, ["float32", [2**55, 2]], P],
    "negative": [D, N, ["float32", [-1, 2]], P],
    "rows without a number": [D, N, ["float32", []], P],
    "the sum dtype": [D, ["int64", [3]], S, P],
    "no pairs": [D, N, S, "present"],
    "no list": "sections",
    "nothing": None,
}


@pytest.mark.parametrize("case", SECTIONS)
@only["buffered_inline"]
def test_forged_sections_of_an_inline_gradient(acc, client, case):
    field, order, header = next(headers(client))
    assert header["sections"] == [D, N, S, P]
    write(client, field, order, {**header, "sections": SECTIONS[case]})
    unreadable(acc, client)


@pytest.mark.parametrize("case", SECTIONS)
@only["buffered_parts"]
def test_forged_sections_of_a_gradient_in_parts(acc, client, case):
    field, order, header = next(headers(client))
    sections = SECTIONS[case]
    # Once with lengths that are consistent with the sections, as far as they go.
    if case == "huge":
        header["parts"] = [2**55 * 16, sum(header["parts"][1:])]
    write(client, field, order, {**header, "sections": sections})
    unreadable(acc, client)


# The sparse section has 16 bytes of indices and 16 of rows, and the dense ones have 16, 12 (and 4 between them) and 12.
@pytest.mark.parametrize(
    "parts",
    [
        [76],
        [32, 44, 0],
        [0, 76],
        [32, 43],
        [44, 32],
        [16, 60],
        [31, 45],
        [32] * 3,
        [2**63, 1],
        [-1, 77],
        "x",
        None,
        [32.0, 44.0],
    ],
)
@only["buffered_parts"]
def test_forged_parts(acc, client, parts):
    for field, order, header in headers(client):
        assert header["parts"] == [32, 44]
        write(client, field, order, {**header, "parts": parts})
    unreadable(acc, client)


@pytest.mark.parametrize("parts", [[76], [16, 60], [8, 24, 44], [32, 3, 41], [31, 45], [36, 40], [1] * 76])
@only["buffered_parts"]
def test_a_gradient_that_is_cut_elsewhere_is_read_all_the_same(acc, client, parts):
    expected = acc.peek().gradient
    for field, order, header in headers(client):
        keys = [f"{RECORD}:part:{field.decode()}:{number}" for number in range(2)]
        data = b"".join(client.mget(keys))
        client.delete(*keys)
        ends = np.cumsum([0, *parts]).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(ends)):
            client.set(f"{RECORD}:part:{field.decode()}:{number}", data[start:stop])
        write(client, field, order, {**header, "parts": parts})
    found = acc.take_grad(2, timeout=5)
    assert found["d"].tolist() == expected["d"].tolist() == [[1, 1], [1, 1]]
    assert found["s"].values.tolist() == expected["s"].values.tolist()
    acc.delete()


@pytest.mark.parametrize("present", [[-1, 1, 1], [1, 2, 1], [2**31 - 1] * 3])
@only["buffered_inline"]
def test_forged_counts_of_leaves_in_a_buffered_gradient(acc, client, present):
    field, _, _ = next(headers(client))
    data = client.hget(f"{RECORD}:inline", field)
    assert data[-12:] == np.ones(3, "<i4").tobytes()
    client.hset(f"{RECORD}:inline", field, data[:-12] + np.array(present, "<i4").tobytes())
    # The sum of both gradients is checked, so -1 in one of them may look like a leaf that it lacks.
    if present[0] == -1:
        client.hset(f"{RECORD}:inline", field, data[:-12] + np.array([-2, 1, 1], "<i4").tobytes())
    unreadable(acc, client)


@pytest.mark.parametrize("indices", [[4, 1], [1, 1], [-1, 4], [1, 9], [1, 2**63 - 1]])
@only["buffered_inline"]
def test_forged_indices(acc, client, indices):
    field, _, _ = next(headers(client))
    data = client.hget(f"{RECORD}:inline", field)
    assert data[:16] == np.array([1, 4], "<i8").tobytes()
    client.hset(f"{RECORD}:inline", field, np.array(indices, "<i8").tobytes() + data[16:])
    unreadable(acc, client)


@pytest.mark.parametrize("counts", [[0, 2], [3, 1], [2**64 - 1, 1]])
@only["buffered_inline"]
def test_forged_counts_of_a_compacted_gradient(acc, client, counts):
    fields = [(field, order, header) for field, order, header in headers(client)]
    field, order, header = fields[0]
    data = client.hget(f"{RECORD}:inline", field)
    client.hdel(f"{RECORD}:buffered", fields[1][0])
    client.hdel(f"{RECORD}:inline", fields[1][0])
    write(client, field, order, {**header, "gradients": 2})
    client.hset(f"{RECORD}:inline", field, data[:16] + np.array(counts, "<u8").tobytes() + data[16:])
    unreadable(acc, client)
