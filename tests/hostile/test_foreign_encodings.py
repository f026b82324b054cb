"""Planted gradients that claim to be encoded: a typed error that names the key, and the round stays."""

from __future__ import annotations

import re

import msgpack
import numpy as np
import pytest
from support.memory import limited_memory
from support.servers import contents

import redisacc
from redisacc._format import buffered as buffered_format

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

RECORD = "redisacc:{w}"
BLOCK_BYTES = 260


@pytest.fixture(autouse=True)
def little_memory():
    with limited_memory(3 * 2**30):
        yield


@pytest.fixture(params=["inline", "parts"])
def forge(request, monkeypatch, open_dense, open_sparse, client):
    """Makes an accumulator with two gradients, of which the second is overwritten, and returns it."""
    if request.param == "parts":
        monkeypatch.setattr(buffered_format, "INLINE_BYTES", 0)

    def make(wire, *, change=lambda data: data, sparse=False, **header):
        if sparse:
            acc = open_sparse("float32", [99, 600], "w", in_place_limit=0, wire=wire)
            given = [3], np.ones((1, 600), np.float32)
        else:
            acc = open_dense("float32", [600], "w", in_place_limit=0, wire=wire)
            given = (np.ones(600, np.float32),)
        acc.apply_grad(*given)
        acc.apply_grad(*given)
        entries = client.hgetall(f"{RECORD}:buffered")
        identity = max(entries, key=lambda field: int(entries[field].split(b" ")[0]))
        order, _, packed = entries[identity].partition(b" ")
        old = msgpack.unpackb(packed)
        if request.param == "inline":
            data = change(client.hget(f"{RECORD}:inline", identity))
            client.hset(f"{RECORD}:inline", identity, data)
            # The hash of a round that was taken has another key.
            acc.key = f":inline {identity.decode()}"
        else:
            acc.key = f"{RECORD}:part:{identity.decode()}:0"
            data = change(client.get(acc.key))
            client.set(acc.key, data)
            old["parts"] = [len(data)]
        new = {**old, **header}
        client.hset(f"{RECORD}:buffered", identity, order + b" " + msgpack.packb(new))
        return acc

    return make


def refuse(acc, client, match):
    """Everything that reads the round fails, the round stays as it is, and it can be deleted."""
    for _ in range(2):
        before = contents(client)
        with pytest.raises(redisacc.CorruptDataError, match=match):
            acc.peek()
        assert contents(client) == before
    with pytest.raises(redisacc.CorruptDataError, match=match):
        acc.take_grad(2, timeout=5)
    left = acc.info().unacknowledged
    if left:
        # Its owner may look at it, throw it away or repair it.
        assert [one.num_accumulated for one in left] == [2]
        with pytest.raises(redisacc.CorruptDataError, match=match), acc.recover():
            pytest.fail("it was read")
    acc.apply_grad(*[np.ones(600, np.float32)] if acc.shape == (600,) else ([3], np.ones((1, 600))), local_step=9)
    acc.delete()
    assert list(client.scan_iter("redisacc:{w}*")) == []


def scale_at(block, scale):
    def change(data):
        # The values are what comes last, and end with whole blocks.
        start = len(data) - (3 - block) * BLOCK_BYTES
        return data[:start] + np.array([scale], "<f4").tobytes() + data[start + 4 :]

    return change


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("scale", "block"), [(-1.0, 0), (np.nan, 2), (np.inf, 1), (-np.inf, 2), (3e38, 0)])
def test_scales(forge, client, sparse, scale, block):
    acc = forge("int8", change=scale_at(block, scale), sparse=sparse)
    refuse(acc, client, f"{re.escape(acc.key)}: a block of int8 has the scale")


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("claimed", ["float32", "bfloat16", "int8"])
def test_a_header_that_claims_another_encoding(forge, client, wire, claimed):
    if wire != claimed:
        refuse(forge(wire, sections=[[claimed, [600]]]), client, r"redisacc:{w}:.* (bytes|parts)")


@pytest.mark.parametrize("change", [lambda data: data[:-BLOCK_BYTES], lambda data: data[:-1], lambda data: data + b"x"])
def test_lengths_that_do_not_fit(forge, client, change):
    refuse(forge("int8", change=change), client, r"redisacc:{w}:.* bytes")


def test_a_missing_block(forge, client):
    acc = forge("int8", change=lambda data: data[:-BLOCK_BYTES], sections=[["int8", [512]]])
    refuse(acc, client, r"its shape is \[512\] in a round of \[600\]")


@pytest.mark.parametrize("name", ["int4", "float64", "int8\0", 8, None, ["int8"]])
def test_encodings_that_this_version_does_not_know(forge, client, name):
    acc = forge("int8", sections=[[name, [600]]])
    refuse(acc, client, "it stores elements as .*, and this version of redisacc reads float32, bfloat16, int8")


@pytest.mark.parametrize("sections", [[["int8", [600], 256]], [["int8"]], [["int8", [600]], ["int8", [600]]], ["int8"]])
def test_sections_that_are_none(forge, client, sections):
    refuse(forge("int8", sections=sections), client, "gradient .* header that redisacc did not write")


def test_a_header_that_promises_too_much(forge, client):
    acc = forge("int8", sections=[["int8", [2**40]]])
    client.hset(RECORD, "round_shape", f"[{2**40}]")
    before = contents(client)
    with pytest.raises(redisacc.CorruptDataError, match=r"redisacc:{w}:"):
        acc.peek()
    assert contents(client) == before


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64"])
def test_an_encoding_where_nothing_is_encoded(open_dense, client, dtype):
    acc = open_dense(dtype, [600], "w", in_place_limit=0)
    acc.apply_grad(np.ones(600, acc.dtype))
    ((identity, entry),) = client.hgetall(f"{RECORD}:buffered").items()
    header = {**msgpack.unpackb(entry.partition(b" ")[2]), "sections": [["int8", [600]]]}
    client.hset(f"{RECORD}:buffered", identity, b"0 " + msgpack.packb(header))
    before = contents(client)
    with pytest.raises(
        redisacc.CorruptDataError, match="it stores elements as 'int8', and this version of redisacc reads"
    ):
        acc.peek()
    assert contents(client) == before


def test_any_bytes_in_blocks_are_numbers(open_dense, client):
    """-128 is no step that redisacc writes, but a number like any other. The padding of the last block is ignored."""
    acc = open_dense("float32", [600], "w", in_place_limit=0, wire="int8")
    acc.apply_grad(np.ones(600, np.float32))
    ((identity, data),) = client.hgetall(f"{RECORD}:inline").items()
    block = np.array([0.5], "<f4").tobytes() + b"\x80" * 256
    client.hset(f"{RECORD}:inline", identity, block * (len(data) // BLOCK_BYTES))
    assert (acc.take_grad(1) == -64).all()
