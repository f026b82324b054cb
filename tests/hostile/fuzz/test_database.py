"""A database with arbitrary contents: a typed error or a result, no hang, no crash, and nothing raw in any message.

What only reads changes nothing, and the accumulator can always be deleted. With --long, the commands of the command
line read these databases as well.

Changes that only remove something (fields, keys, ends of values) must never change a sum: the result is right, or there
is none.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import redis
from click.testing import CliRunner
from support.planting import COMMANDS, raw_text
from support.selection import thorough
from support.servers import contents
from support.strategies import SIZES, TEXTS, headers

import redisacc
from redisacc._format.record import Record
from redisacc.cli import main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey", "redis62")]

RECORD = "redisacc:{w}"
# Kind, in_place_limit, elements of a row.
KINDS = {
    "dense-in_place": ("dense", 10**9, 2),
    "dense-small": ("dense", 0, 2),
    "dense-parts": ("dense", 0, 40_000),
    "sparse-in_place": ("sparse", 10**9, 2),
    "sparse-small": ("sparse", 0, 2),
    "sparse-parts": ("sparse", 0, 40_000),
    "tree-in_place": ("tree", 10**9, 2),
    "tree-small": ("tree", 0, 2),
    "tree-parts": ("tree", 0, 40_000),
}


# A gradient of a tree has dense and sparse sections.
USUAL = [kind for kind in KINDS if kind not in ("dense-small", "dense-parts", "sparse-parts")]


@pytest.fixture(autouse=True)
def little_time(durations):
    durations(call=0.2)


class Case:
    """An accumulator with two gradients in its round, and two in one that was taken and not acknowledged."""

    def __init__(self, client, kind):
        self.kind, limit, self.width = KINDS[kind]
        self.client = client
        client.flushdb()
        options = {
            "shared_name": "w",
            "redis": client,
            "limits": redisacc.Limits(in_place=limit),
            "reduction_type": "SUM",
            "worker": "ann",
        }
        dense, rows = [self.width], [9, self.width]
        self.open = {
            "dense": lambda: redisacc.ConditionalAccumulator("float32", dense, **options),
            "sparse": lambda: redisacc.SparseConditionalAccumulator("float32", rows, **options),
            "tree": lambda: redisacc.TreeAccumulator(
                {"d": ("float32", dense), "s": redisacc.Sparse("float32", rows), "i": ("int32", ())},
                mean=redisacc.Mean(missing="skip"),
                **options,
            ),
        }[self.kind]
        self.acc = self.open()
        self.incarnation = client.hget(RECORD, "incarnation")
        for step in (0, 1):
            for _ in range(2):
                self.apply(step)
            if step == 0:
                with contextlib.suppress(ZeroDivisionError), self.acc.take(2, timeout=5):
                    raise ZeroDivisionError

    def apply(self, step=1):
        row = np.ones(self.width, np.float32)
        rows = [1, 3], [row, row]
        given = {"dense": (row,), "sparse": rows, "tree": ({"d": row, "s": rows, "i": 1},)}[self.kind]
        return self.acc.apply_grad(*given, local_step=step)

    def right(self, gradient, number):
        """Whether it is the sum of that many of our gradients."""
        if self.kind == "tree":
            leaves = [gradient[path] for path in ("d", "s", "i")]
            return all(
                leaf is not None and self.right_leaf(leaf, number, () if leaf is leaves[2] else (self.width,))
                for leaf in leaves
            )
        return self.right_leaf(gradient, number, (self.width,))

    @staticmethod
    def right_leaf(gradient, number, shape):
        if isinstance(gradient, redisacc.IndexedSlices):
            return gradient.indices.tolist() == [1, 3] and bool((gradient.values == number).all())
        return gradient.shape == shape and bool((gradient == number).all())

    def everything(self):
        """Calls every operation, and returns the results as (gradient, number of gradients)."""
        acc, found = self.acc, []

        def peek():
            seen = acc.peek()
            if seen.gradient is not None:
                found.append((seen.gradient, seen.num_accumulated))

        def take():
            with acc.take(1, timeout=0) as taken:
                found.append((taken.gradient, taken.num_accumulated))

        def recover():
            with acc.recover() as taken:
                if taken is not None:
                    found.append((taken.gradient, taken.num_accumulated))

        before = contents(self.client)
        for call in (acc.num_accumulated, acc.global_step, acc.info, peek):
            attempt(call)
        assert contents(self.client) == before
        for call in (
            recover, self.apply, peek, take, lambda: acc.set_global_step(1), lambda: acc.set_quorum(least=1),
            self.open, self.apply,
        ):  # fmt: skip
            attempt(call)
        return found

    def end(self):
        """Deletes it. That may only fail if the record is no longer that of this accumulator."""
        ours = self.client.type(RECORD) == b"hash" and self.client.hget(RECORD, "incarnation") == self.incarnation
        attempt(self.acc.delete)
        if ours:
            left = {key.decode(errors="replace").removeprefix(RECORD) for key in self.client.scan_iter()}
            assert not left & {"", *(f":{name}" for name in KEYS_OF_ITS_OWN)}
        self.acc.close()


def attempt(call):
    """Calls it. If it fails, then soon, and with a typed error whose message is short and can be printed."""
    started = time.monotonic()
    message = ""
    try:
        call()
    except redisacc.RedisAccError as error:
        message = str(error)
    assert time.monotonic() - started < 30
    assert raw_text(message) == []
    assert len(message) < 2000


KEYS_OF_ITS_OWN = (
    "sums", "buffered", "inline", "workers", "sessions", "queue", "takers", "taken", "compacting",
)  # fmt: skip
KEYS = st.integers(0, 30)
FIELDS = st.one_of(
    st.sampled_from([*(name.encode() for name in Record.FIELDS), b"tree"]),
    st.sampled_from([b"dense:float32:0", b"sparse:s:1", b"present:0", b"sparse:x:1", b"dense:float32:1"]),
    st.sampled_from([b"0", b"1", b"3", b"total", b"ann", b"lease_ms", b"tickets", b"wanted", b"chunk"]),
    TEXTS,
)
# A field of a header, and its forged value: mostly one that would be valid elsewhere.
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 9, 12, 16, 24, 32, 2**20, 2**40]), max_size=3)
LIKELY = {
    "version": st.sampled_from([0, 1, 3]),
    "sections": st.lists(
        st.tuples(st.sampled_from(["float32", "float64", "float16", "int64", "int32"]), LENGTHS).map(list), max_size=4
    ),
    "gradients": st.sampled_from([0, 2, 3, 2**53]),
    "parts": LENGTHS,
}
CHANGES = st.sampled_from(sorted(LIKELY)).flatmap(
    lambda field: st.tuples(st.just(field), st.one_of(LIKELY[field], LIKELY[field], SIZES))
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "header", "change", "change", "remove", "cut", "type", "copy"]),
        *(KEYS, FIELDS, TEXTS, headers(), CHANGES),
    ),
    min_size=1,
    max_size=4,
)


def change_header(client, key, which, change):
    entries = sorted(client.hgetall(key).items())
    if entries:
        field, entry = entries[which % len(entries)]
        order, _, packed = entry.partition(b" ")
        with contextlib.suppress(ValueError, TypeError):
            client.hset(key, field, order + b" " + msgpack.packb({**msgpack.unpackb(packed), change[0]: change[1]}))


def forge(client, action, key, field, text, header, change):
    keys = sorted(k for k in client.scan_iter() if k.startswith(RECORD.encode()))
    extra = [f"{RECORD}:{name}".encode() for name in KEYS_OF_ITS_OWN]
    keys += [k for k in (*extra, b"redisacc:names") if k not in keys]
    which, key = key, keys[key % len(keys)]
    kind = client.type(key)
    with contextlib.suppress(redis.ResponseError):
        if action == "change":
            buffered = [k for k in keys if k.endswith(b":buffered")]
            change_header(client, buffered[which % len(buffered)], which // 2, change)
        elif action == "type":
            client.delete(key)
            {0: client.rpush, 1: client.sadd, 2: client.set}[len(text) % 3](key, text)
        elif action == "copy":
            client.copy(key, keys[len(text) % len(keys)], replace=True)
        elif kind in (b"hash", b"none"):
            present = sorted(client.hkeys(key))
            if field not in present and present:
                field = present[len(field) % len(present)] if len(text) % 2 else field
            if action == "header":
                client.hset(key, field, header)
            elif action == "remove":
                client.hdel(key, field)
            elif action == "cut":
                client.hset(key, field, (client.hget(key, field) or b"")[:-1])
            else:
                client.hset(key, field, text)
        elif kind == b"string":
            client.set(key, text if action == "set" else client.get(key)[:-1])
        elif kind == b"zset":
            client.zadd(key, {text: len(field)})
        elif kind == b"set":
            client.sadd(key, text, field)


@pytest.mark.slow
@pytest.mark.parametrize("kind", thorough(KINDS, usual=USUAL))
def test_forged(request, search, real_client, real_server, kind):
    # Without `tail`: used again and again, its listener would not end between two tests, and count as left behind.
    commands = itertools.cycle(words for words in COMMANDS if "--yes" not in words and words[0] != "tail")

    def one(actions):
        case = Case(real_client, kind)
        for action in actions:
            forge(real_client, *action)
        if request.config.getoption("--long"):
            # One command for each database, in turn.
            words = [*next(commands), "--redis", real_server.url]
            result = CliRunner().invoke(main, words)
            assert isinstance(result.exception, (SystemExit, type(None))), (words, result.exc_info)
            assert raw_text(result.output) == [], words
        case.everything()
        case.end()

    search(one, ACTIONS, examples=15)


LOSSES = st.lists(st.tuples(st.sampled_from(["key", "field", "end"]), KEYS, KEYS), min_size=1, max_size=3)


def lose(client, what, key, field):
    # The fields that identify rounds stay: everything else is compared with the record's own numbers.
    keys = sorted(k for k in client.scan_iter() if k.startswith(RECORD.encode()) and k != RECORD.encode())
    keys = [k for k in keys if not k.endswith(b":taken")]
    if not keys:
        return
    key = keys[key % len(keys)]
    if client.type(key) == b"string":
        client.set(key, client.get(key)[:-4]) if what == "end" else client.unlink(key)
    elif what == "key":
        client.unlink(key)
    elif client.type(key) == b"hash":
        fields = sorted(client.hkeys(key))
        name = fields[field % len(fields)]
        client.hset(key, name, client.hget(key, name)[:-4]) if what == "end" else client.hdel(key, name)


@pytest.mark.slow(keep="sparse")
@pytest.mark.parametrize("kind", thorough(KINDS, usual=USUAL))
def test_lost(search, real_client, kind):
    def one(losses):
        case = Case(real_client, kind)
        for loss in losses:
            lose(real_client, *loss)
        for gradient, number in case.everything():
            assert case.right(gradient, number), (gradient, number)
        case.end()

    search(one, LOSSES, examples=8)
