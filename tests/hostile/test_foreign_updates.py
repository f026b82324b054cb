"""Foreign bytes in what an optimiser's training stores: typed errors, no hang, and no memory for a forged number."""

from __future__ import annotations

import json
import resource
import time

import numpy as np
import pytest
from click.testing import CliRunner
from support.planting import raw_text
from support.training_options import grouped

import redisacc
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._protocol.sums.dense_parts import SumPart
from redisacc._protocol.updates import updater
from redisacc._protocol.updates.record import read_update_record
from redisacc._protocol.updates.updater import PartUpdater
from redisacc._redis.connect import connect
from redisacc.cli import main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

NAME = "w"
KEYS, RECORD = Keys(NAME), ParameterKeys(NAME).record
WEIGHTS = {"a": np.ones((100, 5), np.float32), "b": np.zeros(3)}
OPTIMIZER = redisacc.optim.AdamW(0.1, weight_decay=0.5, no_decay=["b"])
CLIPPED = redisacc.optim.AdamW(0.1, weight_decay=0.5, no_decay=["b"], clip_norm=1.0)
VERSION = b"0123456789abcdef"


def lead(client, **options):
    given = {"workers": 1, "redis": client, "optimizer": OPTIMIZER, "patience": 5.0, **options}
    return redisacc.Chief(NAME, WEIGHTS, **grouped(given))


@pytest.fixture
def trained(client, background):
    """Updates were made, and the chief has ended. A worker's gradient of the next step is there."""

    def work():
        with redisacc.Worker(NAME, redis=client) as worker:
            for step, parameters in worker.steps():
                worker.apply(parameters)
                if step == 2:
                    return

    with lead(client) as chief:
        crew = background(work)
        for _ in chief.updates(until=None):
            if chief.step == 2:
                break
        crew.result(20)
    return client


def updater_of(client):
    """Returns what a reducer updates parts with, which has been told of the first part."""
    found = PartUpdater(connect(client), KEYS)
    found._numbers.add(0)
    return found


def update_once(client, **options):
    """Makes the next update, in a new chief."""
    with lead(client, **options) as chief:
        for step in chief.updates(until=None):
            return step


def config(**changes):
    return json.dumps({**OPTIMIZER.to_config(), **changes}).encode()


GARBAGE = [b"x", b"\xff", b"-1", b"9" * 5000]
FORGERIES = [
    *[("optimizer", value) for value in (*GARBAGE, b"{}", b"[]", b"null", b"[" * 100_000, b'{"name":"future"}')],
    *[("optimizer", config(**{name: value})) for name, value in [("eps", "nan"), ("betas", ["0x1.0p+0"] * 9)]],
    ("optimizer", config(lr_factor=[["*", "0x1.0p+0"]] * 2000)),
    ("optimizer", config(name="\x1b]0;pwn\x07pwn")),
    ("optimizer", b" " * (2**20 + 1)),
    *[("updates", value) for value in (b"", *GARBAGE, b"1.5")],
    *[("slots", value) for value in (*GARBAGE, VERSION + b"-exp_avg:1:1", VERSION + b"-exp_avg:9999999999:100000")],
    ("slots", VERSION + b"-exp_avg:2032"),
    ("slots", VERSION + b"-exp_avg:2032:1 " + b" ".join([VERSION + b"-exp_avg_sq:2032:1"] * 20_000)),
    *[("full", VERSION + b"-flat:2:2:0-1:" + size) for size in (b"", b"x", b"-1", b"9" * 30, b"1")],
    ("full", VERSION + b"-flat:2:2:0:512"),
    ("retired", VERSION + b"-flat:" + b"9" * 30),
]
# `redisacc show` does without these, and does not compare patterns with paths.
OF_UPDATERS = [
    ("optimizer", config(no_decay=["nothing/*"])),
    *[("scalars", value) for value in (*GARBAGE, b";" * 10_000, b"0x1.0p+0", b"nan,nan,nan", b"inf")],
    *[("attempts", value) for value in GARBAGE],
    ("attempts", b"1.5"),
]


@pytest.mark.slow(keep="-1|value")
@pytest.mark.parametrize(("field", "value"), FORGERIES + OF_UPDATERS)
def test_garbage_in_the_record(trained, field, value):
    """An error of a known type that says what is wrong, in the chief; an updater does without; nobody writes."""
    trained.hset(RECORD, field, value)
    before = (trained.hgetall(RECORD), set(trained.scan_iter(f"{RECORD}*")))
    for read in (lambda: read_update_record(connect(trained), ParameterKeys(NAME)), lambda: update_once(trained)):
        with pytest.raises(redisacc.CorruptDataError) as caught:
            read()
        assert raw_text(str(caught.value)) == []
        assert len(str(caught.value)) < 2000
    one = updater_of(trained)
    one.work()
    assert one._record is None
    assert (trained.hgetall(RECORD), set(trained.scan_iter(f"{RECORD}*"))) == before
    shown = CliRunner().invoke(main, ["show", NAME, "--redis", url_of(trained)])
    assert shown.exit_code == (1 if (field, value) in FORGERIES else 0), shown.output
    assert raw_text(shown.output) == []


def url_of(client):
    given = client.connection_pool.connection_kwargs
    return f"redis://{given['host']}:{given['port']}/{given.get('db', 0)}"


@pytest.mark.parametrize("sort", ["flat", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("how", ["shorter", "longer", "empty", "missing"])
def test_parts_that_are_not_what_they_were(trained, sort, how, durations):
    """They are looked at before the round is used, and the round stays."""
    durations(gathering=0.2)
    (key,) = [key for key in trained.scan_iter(f"{RECORD}:object:*-{sort}:0") if trained.pttl(key) == -1]
    held = trained.get(key)
    trained.delete(key)
    if how != "missing":
        trained.set(key, {"shorter": held[:-1], "longer": held + b"x", "empty": b""}[how])
    one = updater_of(trained)
    one.work()
    assert one._record is None
    taken = trained.hgetall(KEYS.record)[b"num_accumulated"]
    with pytest.raises((redisacc.CorruptDataError, redisacc.DataLossError)) as caught:
        update_once(trained)
    # Of a part that is gone, the error names one of the keys.
    assert key.decode() in str(caught.value) or how == "missing" or sort == "flat"
    # Nothing was counted as used: the gradient is still there, in this round or in one that was taken.
    assert taken == b"1"
    assert trained.hlen(KEYS.taken) + int(trained.hget(KEYS.record, "num_accumulated")) >= 1


def test_a_record_that_promises_more_than_there_is_allocates_nothing(trained):
    trained.hset(RECORD, "structure", b'{"a":"float32 [100000000000]","b":"float64 [3]"}')
    trained.hset(RECORD, "full", VERSION + b"-flat:2:2:0-1:99999999999")
    trained.hset(RECORD, "slots", b"")
    trained.hset(RECORD, "optimizer", json.dumps(redisacc.optim.SGD(0.1).to_config()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one = updater_of(trained)
    one.work()
    with pytest.raises(redisacc.RedisAccError):
        update_once(trained)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


ORDERS = [
    "order", "order ", "order 1", "order 1 x y z 1 1 1", "order " + "9" * 100, "order " + " " * 100,
    "order 0 " + "a " * 6, "order " + "x" * 2**21,
    "order \x1b]0;pwn\x07", "order 1 " + "a" * 16 + " " + " ".join(["b" * 32] * 2) + " 0 nan ;",
    "order 1 " + "a" * 16 + " " + " ".join(["b" * 32] * 2) + " inf 0x1.0p+0 0x1.0p+0",
]  # fmt: skip


def test_forged_orders_are_only_hints(trained):
    one = updater_of(trained)
    one.work()
    record = one._record
    assert record is not None
    one._sums[0] = "b" * 32, [np.ones(500, np.float32), np.ones(3)]
    before = set(trained.scan_iter("*"))
    for order in ORDERS:
        one.hear(order)
        one.work()
    assert set(trained.scan_iter("*")) == before
    for _ in range(100):
        one.hear(ORDERS[1])
    assert len(one._orders) == updater.MOST_ORDERS


@pytest.mark.parametrize("value", [b"x", b"", b"-0x1.0p+3", b"nan", b"1e400", b"0x1.0p+99999", b"0" * 10_000, b"\xff"])
def test_forged_sums_of_squares_end_in_numbers(trained, monkeypatch, durations, value):
    """Whoever may write them may also write gradients; but no text makes the chief crash, hang or allocate."""
    durations(least_patience=0.01)
    monkeypatch.setattr("redisacc._protocol.updates.committer._Round.has_updaters", True)
    monkeypatch.setattr("redisacc._protocol.updates.committer.digest_of", lambda _: "c" * 32)
    trained.set(KEYS.squares("c" * 32, 0), value)
    began = time.monotonic()
    assert update_once(trained, optimizer=CLIPPED) == 3
    assert time.monotonic() - began < 20


def test_a_sum_of_squares_of_another_type_is_none(trained, monkeypatch):
    monkeypatch.setattr("redisacc._protocol.updates.committer._Round.has_updaters", True)
    monkeypatch.setattr("redisacc._protocol.updates.committer.digest_of", lambda _: "c" * 32)
    trained.rpush(KEYS.squares("c" * 32, 0), "x")
    assert update_once(trained, optimizer=CLIPPED) == 3


def test_a_foreign_registration_is_only_compared(trained):
    trained.hset(RECORD, "registered", b"\xff" * 1000)
    assert update_once(trained) == 3


def test_a_part_of_another_cut_is_not_updated(trained):
    """A forged gradient may have any cut: its sum is stored for the taker, and no parameters are touched."""
    one = updater_of(trained)
    one.work()
    part = SumPart("d" * 32, 7, (), [np.ones(4, np.float32)], 1, None)
    assert not one.update(part, 1)
