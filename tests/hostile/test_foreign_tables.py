"""Foreign bytes in the blobs of tables, whose gradients are rows, and in what the record says of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.planting import raw_text

import redisacc
from redisacc._format.keys import Keys, ParameterKeys

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

NAME = "w"
RECORD = ParameterKeys(NAME).record
WEIGHTS = {"a": np.ones(5, np.float32), "t": np.ones((100, 2), np.float32)}
VERSION = b"0123456789abcdef"


@pytest.fixture
def trained(client, background):
    """Two updates were made, and the chief has ended. A worker's gradient of the next step is there."""

    def work():
        with redisacc.Worker(NAME, redis=client) as worker:
            for step, parameters in worker.steps():
                worker.apply({"a": parameters["a"], "t": ([step, 50], np.ones((2, 2), np.float32))})
                if step == 2:
                    return

    with lead(client) as chief:
        crew = background(work)
        for step in chief.updates():
            if step == 2:
                break
        crew.result(20)
    assert re.fullmatch(rb"\S+-flat:2:2:0:\d+ \S+-full:0:0:1", client.hget(RECORD, "full"))
    assert len(client.hget(RECORD, "slots").split()) == 2 + 3
    return client


def lead(client):
    optimizer = redisacc.optim.Adam(0.1)
    return redisacc.Chief(
        NAME, WEIGHTS, workers=1, redis=client, optimizer=optimizer, accumulator={"sparse": ["t"]}, patience=5.0
    )


def read_state(client):
    return redisacc.Parameters(NAME, redis=client, create=False).latest_state()


def update_once(client):
    with lead(client) as chief:
        for step in chief.updates():
            return step


def changed(text, how):
    flat, _, table = text.partition(b" ")
    return {
        "the table in the flat blob as well": flat.replace(b":0:", b":0-1:") + b" " + table,
        "no table": flat,
        "no flat blob": table,
        "two flat blobs": flat + b" " + flat.replace(b":0:", b":1:"),
        "a blob without leaves": text + b" " + VERSION + b"-base:0:0:",
        "a table that is no leaf": flat + b" " + table.replace(b":1", b":2"),
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        "the table in the flat blob as well",
        "no table",
        "no flat blob",
        "two flat blobs",
        "a blob without leaves",
        "a table that is no leaf",
    ],
)
def test_forged_blobs_of_leaves(trained, how):
    trained.hset(RECORD, "full", changed(trained.hget(RECORD, "full"), how))
    refused(trained, read_state)
    refused(trained, update_once)


@pytest.mark.parametrize("how", ["fewer", "more", "longer", "another sort", "twice"])
def test_forged_lists_of_state(trained, how):
    slots = trained.hget(RECORD, "slots").split()
    kept = [entry for entry in slots if b"-kept_" in entry]
    trained.hset(
        RECORD,
        "slots",
        b" ".join(
            {
                "fewer": slots[:-1],
                "more": [*slots, VERSION + b"-kept_base:1600"],
                "longer": [*slots[:-1], kept[-1] + b"0"],
                "another sort": [*slots[:-1], kept[-1].replace(b"-kept_rows", b"-rows")],
                "twice": [*slots, *kept[:1] * 10_000],
            }[how]
        ),
    )
    refused(trained, read_state if how != "twice" else update_once)
    refused(trained, update_once)


@pytest.mark.parametrize("sort", ["full", "rows", "kept_full", "kept_rows"])
@pytest.mark.parametrize("how", ["shorter", "longer", "empty", "missing"])
def test_parts_of_tables_that_are_not_what_they_were(trained, sort, how):
    key = next(key for key in trained.scan_iter(f"{RECORD}:object:*-{sort}:0") if trained.pttl(key) == -1)
    held = trained.get(key)
    trained.delete(key)
    if how != "missing":
        trained.set(key, {"shorter": held[:-1], "longer": held + b"x", "empty": b""}[how])
    refused(trained, update_once)
    # The gradient is still there, in this round or in one that was taken.
    assert trained.hlen(Keys(NAME).taken) + int(trained.hget(Keys(NAME).record, "num_accumulated")) == 1


@pytest.mark.parametrize("indices", [[-1, 50], [50, 1], [50, 50], [1, 100], [1, 2**62]])
def test_rows_that_do_not_exist(trained, indices):
    key = next(key for key in trained.scan_iter(f"{RECORD}:object:*-rows:0") if trained.pttl(key) == -1)
    trained.setrange(key, 0, np.array(indices, "<i8").tobytes())
    refused(trained, update_once)
    refused(trained, read_state)


def refused(client, read):
    """Checks that an error of a known type says what is wrong, and that nothing changes."""
    before = client.hgetall(RECORD)
    with pytest.raises((redisacc.CorruptDataError, redisacc.DataLossError)) as caught:
        read(client)
    assert raw_text(str(caught.value)) == []
    assert len(str(caught.value)) < 2000
    assert client.hgetall(RECORD) == before
