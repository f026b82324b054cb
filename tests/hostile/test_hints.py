"""Messages, sums and squares that are not what they claim to be: they are hints, so every result is right anyway."""

import contextlib
import hashlib

import numpy as np
import pytest
from support.selection import thorough

import redisacc

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.forges]

RECORD = "redisacc:{w}"
# A gradient has five parts.
ELEMENTS = 300_000
PART = 2**18 - 64
LENGTHS = [PART] * 4 + [4 * ELEMENTS - 4 * PART]
NOBODY = "0123456789abcdef" * 2
MINUTE = 60_000


def digest_of(gradients):
    """Returns the digest of buffered gradients, as docs/internals/layouts.md says: ids and entries, in their order."""
    text = ""
    for identity, entry in gradients:
        place, _, header = entry.partition(b" ")
        weight = "" if b"*" in place else "*1"
        text += f"{identity.decode()} {place.decode()}{weight} {hashlib.blake2b(header, digest_size=16).hexdigest()} "
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def pretend(client):
    """Makes takers believe that a reducer works."""
    client.hset(f"{RECORD}:reducer", mapping={"holder": "r", "who": "x", "stored": 1, "late": 0})
    client.pexpire(f"{RECORD}:reducer", MINUTE)


class Waiting:
    """A take that waits for three gradients of one handle, of which two are there."""

    def __init__(self, open_dense, client, background, until):
        self.acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
        self.rows = np.random.default_rng(1).normal(size=(3, ELEMENTS)).astype(np.float32)
        pretend(client)
        self.take = background(self.acc.take_grad, 3)
        until(lambda: client.exists(f"{RECORD}:queue"))
        for row in self.rows[:2]:
            self.acc.apply_grad(row)
        found = sorted(client.hgetall(f"{RECORD}:buffered").items(), key=lambda item: int(item[1].split(b" ")[0]))
        # The ids of a session are numbered, and so are the places.
        session, _, number = found[-1][0].rpartition(b"-")
        place, _, header = found[-1][1].partition(b" ")
        step = int(number) - int(found[0][0].rpartition(b"-")[2])
        following = b"%s-%d" % (session, int(number) + step), b"%d %s" % (int(place) + 1, header)
        self.digest = digest_of([*found, following])

    def check(self):
        self.acc.apply_grad(self.rows[2])
        np.testing.assert_array_equal(self.take.result(), self.rows[0] + self.rows[1] + self.rows[2])


@pytest.fixture
def waiting(open_dense, real_client, background, until):
    return Waiting(open_dense, real_client, background, until)


@pytest.mark.parametrize("numbers", thorough([[0], [4], [0, 1, 2, 3, 4]], usual=[[4]]))
@pytest.mark.parametrize("what", thorough(["short", "long", "empty", "huge", "list"], usual=["long", "list"]))
def test_a_part_of_a_sum_that_is_none_is_not_used(waiting, real_client, numbers, what):
    for number in numbers:
        key = f"{RECORD}:sum:{waiting.digest}:{number}"
        if what == "list":
            real_client.rpush(key, "x")
            real_client.pexpire(key, MINUTE)
        else:
            length = {"short": LENGTHS[number] - 4, "empty": 0, "long": LENGTHS[number] + 4, "huge": 10**7}[what]
            real_client.set(key, bytes(length), px=MINUTE)
        real_client.publish(f"{RECORD}:wake", f"sum={waiting.digest} part={number}")
    waiting.check()


def test_messages_about_sums_that_do_not_exist(waiting, real_client):
    texts = [
        "sum= part=", f"sum={waiting.digest} part=-1", f"sum={waiting.digest} part=999999", f"sum={NOBODY} part=0",
        *(f"sum={waiting.digest} part={number}" for number in range(5)), "x" * 100_000, "gradient=x place=-1 shape=[",
        "gradient=x parts=99999999", "gradient=x place=1 shape=[2] header=zz", "applied count=999999999999999999999",
    ]  # fmt: skip
    for text in texts:
        real_client.publish(f"{RECORD}:wake", text)
    waiting.check()


VERSION = b"0123456789abcdef"
EVENTS = [
    b"", b"x", b"deleted", b"published", b"published step=9 blobs=", b"published step=9 blobs=x:1",
    b"published step=9 blobs=" + VERSION + b"-full:1", b"published step=9 blobs=" + VERSION + b"-full:" + b"9" * 30,
    b"published blobs=" + b",".join([VERSION + b"-full:1"] * 50), b"\xff" * 5000,
]  # fmt: skip


def test_events_of_parameters(open_parameters, real_client, background, until):
    chief, reader = open_parameters("w"), open_parameters("w")
    chief.publish({"a": np.zeros(3)}, 2)
    waiting = background(reader.wait, 2)
    channel = f"{RECORD}:parameters:events"
    until(lambda: dict(real_client.pubsub_numsub(channel))[channel.encode()])
    for event in EVENTS:
        real_client.publish(channel, event)
    assert waiting.running
    chief.publish({"a": np.ones(3)}, 3)
    assert waiting.result()[0] == 3


ORDERS = [
    "order", "order ", "order 1", "order 1 x y z 1 1 1", "order " + "9" * 100, "order " + " " * 100,
    "order 0 " + "a " * 6, "order " + "x" * 2**20, "order \x1b]0;pwn\x07",
    "order 1 " + "a" * 16 + " " + " ".join(["b" * 32] * 2) + " 0 nan ;",
    "order 1 " + "a" * 16 + " " + " ".join(["b" * 32] * 2) + " inf 1.0 1.0",
]  # fmt: skip
SQUARES = [b"x", b"", b"-8.0", b"nan", b"1e400", b"0x1.0p+3", b"0" * 10_000, b"\xff", None]


def trained(client):
    """Returns a chief, and a worker's gradient is there: with each weight 1, its update is -1."""
    optimizer = redisacc.optim.SGD(1.0, clip_norm=1e9)
    start = {"a": np.zeros(ELEMENTS, np.float32)}
    chief = redisacc.Chief("w", start, workers=1, redis=client, optimizer=optimizer, patience=5.0)
    with redisacc.Worker("w", number=0, redis=client) as worker:
        for _, tree in worker.steps():
            worker.apply({"a": np.ones_like(tree["a"])})
            return chief


@pytest.mark.parametrize("value", thorough(SQUARES, usual=[b"x", None]), ids=repr)
def test_squares(real_client, durations, value):
    """No text makes the chief crash, hang or allocate: who may write it may also write gradients."""
    durations(least_patience=0.01)
    with trained(real_client) as chief:
        pretend(real_client)
        digest = digest_of(list(real_client.hgetall(f"{RECORD}:buffered").items()))
        for number in range(5):
            key = f"{RECORD}:squares:{digest}:{number}"
            real_client.rpush(key, "x") if value is None else real_client.set(key, value, px=MINUTE)
        # Only another type is an error, as that of any key.
        with contextlib.nullcontext() if value is not None else pytest.raises(redisacc.CorruptDataError):
            assert list(chief.updates(until=1)) == [1]


def test_orders(real_client, background, until):
    reducer = redisacc.Reducer("w", redis=real_client)
    running = background(reducer.run)

    def works():
        real_client.publish(f"{RECORD}:calls", "required=1")
        return bool(real_client.exists(f"{RECORD}:reducer"))

    with trained(real_client) as chief:
        until(works)
        for order in [*ORDERS, *[ORDERS[1]] * 200]:
            real_client.publish(f"{RECORD}:parameters:events", order)
        assert list(chief.updates(until=1)) == [1]
        assert running.running
    reducer.close()
    running.result()
    with redisacc.Parameters("w", redis=real_client, create=False) as weights:
        assert (weights.latest()[1]["a"] == -1).all()
