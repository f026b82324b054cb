"""Plants hostile text into every field of every key of an accumulator and of parameters, and recognises it raw."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis

import redisacc
from redisacc._format.keys import NAMES, Keys, ParameterKeys
from redisacc.optim.scalars import pack_scalars

# Each of these, printed as it is, changes a terminal, a line or what stands beside it. "pwn" ends every one.
PIECES = [
    b"\x1b]0;pwn\x07pwn", b"\x1b[7;31mpwn", b"\xc2\x9b7mpwn", b"\x9b7mpwn", b"\rpwn", b"\npwn", b"\x08pwn",
    "\u202epwn".encode(), "\u2028pwn".encode(), b"\x00pwn", b"\xff\xfepwn",
]  # fmt: skip
# All at once, in UTF-8 and not; alone; and very long or deep.
TEXTS = {
    "utf8": b"".join(piece for piece in PIECES if piece[:1] not in (b"\x9b", b"\xff")),
    "binary": b"".join(PIECES),
    "escape": PIECES[0],
    "long": b"x" * 10_000,
    "deep": b"[" * 10_000,
}

# Commands of the command line on an accumulator `w`, those that change one last.
COMMANDS = [
    ("ls",), ("ls", "--private"), ("show", "w"), ("show", "w", "--index", "1"), ("show", "w", "--top", "1"),
    ("watch", "-n", "1"), ("recover", "w"), ("gc", "--dry-run"), ("tail", "w", "-n", "1", "--timeout", "0"),
    ("finish", "w"), ("set", "w", "least=2"), ("set-step", "w", "1", "--yes"),
    ("take", "w", "1", "--timeout", "0", "--discard", "--yes"), ("recover", "w", "--discard", "--yes"), ("gc", "--yes"),
    ("rm", "w", "--yes"),
]  # fmt: skip

_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAW = [piece.decode(errors="surrogateescape") for piece in PIECES]


def raw_text(output: str | bytes, *, styled: bool = False) -> list[str]:
    """Returns what should have been escaped in an output: planted pieces, and control characters.

    Args:
        output: what a command printed, or a message.
        styled: whether it was printed on a terminal, where rich moves the cursor and colours text.
    """
    text = output.decode(errors="surrogateescape") if isinstance(output, bytes) else output
    # A line may begin with anything, and a terminal gets a carriage return before each line feed.
    found = [piece for piece in _RAW if piece in text and piece != "\npwn"]
    rest = _STYLE.sub("", text).replace("\r", "") if styled else text
    return found + sorted({c for c in rest if not c.isprintable() and c != "\n"})


@dataclasses.dataclass(frozen=True)
class Place:
    """Somewhere to plant a text.

    Attributes:
        key: the key.
        how: "value" and "name" of a field of a hash, the last word of an "entry", a "member" of a set or sorted set, an
            "element" of a list, a "string", or another "type".
        field: the field of a hash whose value, or name, is replaced.
    """

    key: bytes
    how: str
    field: bytes = b""

    def plant(self, client: redis.Redis, text: bytes) -> None:
        """Writes the text here."""
        match self.how:
            case "value":
                client.hset(self.key, self.field, text)
            case "name":
                client.hset(self.key, text, client.hget(self.key, self.field))
            case "entry":
                # The last word of an entry is a name, and everything before it stays right.
                entry = client.hget(self.key, self.field)
                client.hset(self.key, self.field, entry[: entry.rindex(b" ") + 1] + text)
            case "member":
                {b"set": client.sadd, b"zset": lambda key, member: client.zadd(key, {member: 0})}[
                    client.type(self.key)
                ](self.key, text)
            case "string":
                client.set(self.key, text)
            case "element":
                client.lset(self.key, 0, text)
            case "type":
                was = client.type(self.key)
                client.delete(self.key)
                if was == b"list":
                    client.set(self.key, text)
                else:
                    client.rpush(self.key, text)


def trees() -> Iterator[dict[str, Any]]:
    """Yields two versions of a tree, which differ in a leaf and in two rows of another one."""
    table = np.zeros((10, 4), np.float32)
    yield {"table": table, "bias": np.zeros(3)}
    table = table.copy()
    table[[0, 2]] = 1
    yield {"table": table, "bias": np.ones(3)}


KINDS = ("sparse", "tree")


def open_kind(kind: str, client: redis.Redis, **options: Any) -> Any:
    """Opens an accumulator ``w`` of one of KINDS."""
    if kind == "tree":
        spec = {"s": redisacc.Sparse("float32", (100_000, 2)), "d": [("float32", (300,)), ("int32", ())]}
        return redisacc.TreeAccumulator(spec, "w", mean=redisacc.Mean(missing="skip"), redis=client, **options)
    return redisacc.SparseConditionalAccumulator("float32", [100_000, 2], "w", redis=client, **options)


def apply_rows(acc: Any, number: int, step: int) -> None:
    """Applies a gradient with that many rows."""
    rows = np.arange(number), np.ones((number, 2), np.float32)
    given = ({"s": rows, "d": [np.ones(300), None]},) if isinstance(acc, redisacc.TreeAccumulator) else rows
    acc.apply_grad(*given, local_step=step)


class Planted:
    """An accumulator and parameters ``w`` with every key that there is, each as it was after every `restore`.

    Args:
        client: the way to the server.
        kind: one of KINDS.
    """

    def __init__(self, client: redis.Redis, kind: str = "sparse") -> None:
        self.client = client
        self.kind = kind
        self.keys = Keys("w")
        acc = open_kind(kind, client, worker="ann")
        for step in (0, 1):
            # In place, inline and in parts.
            for number in (2, 100, 4200):
                apply_rows(acc, number, step)
            if step == 0:
                block = acc.take(3, timeout=10)
                block.__enter__()
                (self.token,) = (taken.token for taken in acc.info().unacknowledged)
        # The handle is left open: closing it changes nothing of a shared accumulator.
        self.acc = acc
        (gradient,) = {
            key.decode().split(":")[-2] for key in client.scan_iter(f"{self.keys.record}:part:*") if b"-3:" in key
        } or {"1-1"}
        self.gradient = gradient
        now = int(time.time() * 1000)
        client.zadd(self.keys.queue, {"token": 1})
        client.hset(self.keys.takers, "token", f"9 {now + 600_000} chief")
        client.lpush(self.keys.recovered, f"old token {now} chief")
        client.hset(
            self.keys.crew, mapping={"chief": f"one {now + 600_000} x.1.1 ann:1", "worker 0": f"two {now} x.1.2 bob:2"}
        )
        client.zadd(self.keys.attempts, {"other-1-1 2": now + 600_000})
        client.set(self.keys.compacting, "token", px=600_000)
        client.set(self.keys.staged("other-1", 0), "part", px=600_000)
        client.set(self.keys.place("other-1"), "1", px=600_000)
        lease = {"holder": "r", "who": "host:1", "since_ms": now, "stored": 1, "late": 0}
        client.hset(self.keys.reducer(None), mapping=lease)
        client.pexpire(self.keys.reducer(None), 600_000)
        client.set(self.keys.sum("0" * 32, 0), "part", px=600_000)
        client.set(self.keys.squares("0" * 32, 0), "0x1.0p+0", px=600_000)
        self.parameter_keys = ParameterKeys("w")
        parameters = redisacc.Parameters("w", redis=client, publisher="chief")
        for step, tree in enumerate(trees()):
            parameters.publish(tree, step, changed={"table": [0, 2]}, state={"momentum": np.zeros(3)})
        parameters.finish()
        # As an earlier chief with an optimiser leaves them; what is published now is no version that one can update.
        optimizer = redisacc.optim.SGD(0.5, momentum=0.9)
        client.hset(
            self.parameter_keys.record,
            mapping={
                "optimizer": json.dumps(optimizer.to_config()),
                "updates": "3",
                "scalars": pack_scalars(optimizer.scalars(3, 4)),
                "attempts": "4",
                "registered": f"{'0' * 16}-4",
            },
        )
        (self.blob,) = client.hget(self.parameter_keys.record, "state").decode().split(":")[:1]
        client.zadd(self.parameter_keys.attempts, {"other-1-full 2": now + 600_000})
        client.zadd(self.parameter_keys.history, {f"1 {now} 3 loss=0.5": 1})
        latest = {"history_latest": f"2 {now} 3 loss=0.25", "history_stride": "1", "history_thinned": "1"}
        client.hset(self.parameter_keys.record, mapping=latest)
        client.set(self.parameter_keys.deleted, "0" * 32, px=600_000)
        client.hset(self.parameter_keys.claims, "worker 0", f"7 {'0' * 32} {now} elsewhere.1.1")
        client.pexpire(self.parameter_keys.claims, 600_000)
        self.parameters = parameters
        self._dumps = {key: client.dump(key) for key in client.scan_iter()}
        missing = {key.encode() for key in self.all_keys()} - self._dumps.keys()
        assert not missing, f"the accumulator has no {missing}"

    def all_keys(self) -> list[str]:
        """Returns every key that an accumulator can have, from the one module that makes them.

        Raises:
            AssertionError: that module makes a key that is unknown here.
        """
        keys = self.keys
        channels = {"events", "wake", "wake_of", "calls"}
        others = {"name", "of_ref", "current", "partitions", "partition", "homes", "positions", "home", "reducers"}
        others |= {"parts", "staged_parts"}
        made = {
            "record": [keys.record],
            "sessions": [keys.sessions],
            "queue": [keys.queue],
            "takers": [keys.takers],
            "taken": [keys.taken],
            "recovered": [keys.recovered],
            "crew": [keys.crew],
            "compacting": [keys.compacting],
            "attempts": [keys.attempts],
            "reducer": [keys.reducer(None)],
            "sum": [keys.sum("0" * 32, 0)],
            "squares": [keys.squares("0" * 32, 0)],
            "taken_round": list(keys.taken_round(self.token).hashes),
            "part": [keys.part(self.gradient, 0)],
            "staged": [keys.staged("other-1", 0)],
            "place": [keys.place("other-1")],
        }
        public = {name for name in dir(keys) if not name.startswith("_")}
        assert public == made.keys() | channels | others
        others = self.parameter_keys
        # No key is named so: see redisacc/_protocol/scripts/parameters.py.
        public = {name for name in dir(others) if not name.startswith("_")} - {"guard"}
        made_of_parameters = {
            "record": [others.record],
            "part": [others.part(self.blob, 0)],
            "attempts": [others.attempts],
            "deleted": [others.deleted],
            "claims": [others.claims],
            "history": [others.history],
        }
        others_are = {"name", "events", "updated_of", "partitions", "partition", "homes"}
        assert public == made_of_parameters.keys() | others_are
        made = {**made, **{f"parameters {what}": found for what, found in made_of_parameters.items()}}
        hashes = keys.current.hashes
        assert len(hashes) == len(dataclasses.fields(keys.current))
        return [NAMES, *hashes, *(key for group in made.values() for key in group)]

    def restore(self) -> None:
        """Brings back everything as it was."""
        client = self.client
        client.flushdb()
        with client.pipeline(transaction=False) as pipe:
            for key, dump in self._dumps.items():
                pipe.restore(key, 0, dump)
            pipe.execute()

    def places(self) -> Iterator[Place]:
        """Yields every place of every key; of a tree only where it differs from a sparse accumulator."""
        current = self.keys.current
        own = (self.keys.record, current.sums, current.buffered, current.inline)
        for name in self.all_keys() if self.kind == "sparse" else own:
            key = name.encode()
            kind = self.client.type(key)
            if kind == b"hash":
                fields = sorted(self.client.hkeys(key))
                # Rows of the sums are alike, and so are gradients.
                shown = (
                    fields
                    if key in (self.keys.record.encode(), self.parameter_keys.record.encode())
                    else [*fields[:1], *(f for f in fields if f == b"total")]
                )
                for field in shown:
                    yield Place(key, "value", field)
                    if b" " in self.client.hget(key, field) and not key.endswith((b":sums", b":buffered")):
                        yield Place(key, "entry", field)
                yield Place(key, "name", fields[0])
            elif kind in (b"set", b"zset"):
                yield Place(key, "member")
            elif kind == b"list":
                yield Place(key, "element")
            else:
                yield Place(key, "string")
            yield Place(key, "type")
